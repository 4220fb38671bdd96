"""Files beside a store's artifacts, by digest: they share its budget and its time to live."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.eviction import Eviction
from kvferry.core.files import remove_unfinished, write_atomic
from kvferry.core.retention import Retention
from kvferry.core.store_directory import disk_errors

_OWN_FOLDER, _OWN_FILE, _OTHERS = 0o700, 0o600, 0o077


class StoreFiles:
    """A folder of files that only their owner can read. Thread-safe: under the store's lock."""

    def __init__(
        self,
        folder: Path,
        suffix: str,
        lock: AbstractContextManager[object],
        retention: Retention,
        eviction: Eviction,
    ) -> None:
        """Open the folder, or make it, and count what an earlier process left.

        Raises:
            StoreError: when the disk refuses.
        """
        self._folder = folder
        self._suffix = suffix
        self._name = re.compile(f"([0-9a-f]{{{2 * DIGEST_BYTES}}}){re.escape(suffix)}")
        self._lock = lock
        self._retention = retention
        self._eviction = eviction
        with disk_errors(self._folder):
            folder.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
            # One that was made by hand, or before its files were kept from others.
            if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:
                folder.chmod(_OWN_FOLDER)
            remove_unfinished(folder)
            self._count_all()

    def path(self, key: bytes) -> Path:
        """Return where a file lies, or would."""
        return self._folder / f"{key.hex()}{self._suffix}"

    def digests(self) -> list[bytes]:
        """Return the digests of all files, sorted.

        Raises:
            StoreError: when the disk refuses.
        """
        with disk_errors(self._folder):
            names = [self._name.fullmatch(path.name) for path in self._folder.iterdir()]
        return sorted(bytes.fromhex(name[1]) for name in names if name)

    def last_used(self, most: int) -> list[bytes]:
        """Return the digests of the files that were used last, the newest first.

        Raises:
            StoreError: when the disk refuses.
        """
        used: dict[bytes, float] = {}
        for key in self.digests():
            # It may be gone by now.
            with contextlib.suppress(OSError):
                used[key] = _used_at(self.path(key).stat())
        return sorted(used, key=lambda key: used[key], reverse=True)[:most]

    @contextlib.contextmanager
    def in_use(self, key: bytes) -> Iterator[Path]:
        """Keep a file, which need not be there yet, from eviction for the block, and note that it is used.

        What was not used for longer than the time to live is gone before.
        """
        path = self.path(key)
        with contextlib.ExitStack() as pins:
            with self._lock:
                self._eviction.sweep()
                self._retention.touch(path)
                # The time of the last change stays: it tells whether what was read of a file is still what it holds.
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                pins.enter_context(self._retention.pinned(path, self._lock))
            yield path

    def write(self, key: bytes, data: bytes) -> None:
        """Write a file, in the place of what was there.

        Raises:
            TooLargeError: when it does not fit the budget; nothing is evicted then.
            StoreError: when the disk refuses.
        """
        path = self.path(key)
        with self._retention.pinned(path, self._lock):
            try:
                with self._lock:
                    # What is replaced needs no room of its own.
                    self._retention.remove(path)
                    self._eviction.make_room(len(data))
                    self._retention.add(path, len(data))
                with disk_errors(self._folder):
                    write_atomic(path, data, _OWN_FILE)
            finally:
                self._count(path)

    def remove(self, key: bytes) -> None:
        """Remove a file, if it is there.

        Raises:
            StoreError: when the disk refuses.
        """
        path = self.path(key)
        with self._lock:
            remove_file(path)
            self._retention.remove(path)

    def _count(self, path: Path) -> None:
        with self._lock:
            try:
                size = path.stat().st_size
            except OSError:
                self._retention.remove(path)
            else:
                self._retention.add(path, size)

    def _count_all(self) -> None:
        now = time.time()
        for key in self.digests():
            found = self.path(key).stat()
            with self._lock:
                self._retention.add(self.path(key), found.st_size, now - _used_at(found))


def _used_at(found: os.stat_result) -> float:
    return max(found.st_atime, found.st_mtime)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        StoreError: when the disk refuses.
    """
    with disk_errors(path.parent):
        path.unlink(missing_ok=True)
