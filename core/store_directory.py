"""A store's directory: opened by one process at a time, and where in it everything lies.

ROOT/lock
ROOT/artifacts/<id>/manifest.msgpack, payload.safetensors, record.json
ROOT/partial/<id>/…        on their way in
ROOT/quarantine/<id>/…     put aside, with reason.txt
ROOT/aside/…               being written; emptied at start
ROOT/<name>/<digest>…      files beside the artifacts, where a daemon keeps some
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from kvferry.core import stored
from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.errors import StoreError
from kvferry.core.retention import Key

ARTIFACTS, PARTIAL, QUARANTINE = "artifacts", "partial", "quarantine"
AREAS = (ARTIFACTS, PARTIAL, QUARANTINE)
_ASIDE = "aside"
_BLOCK_BYTES = 512
_ID_NAME = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class StoreDirectory:
    """Paths, and the lock that keeps a second process out."""

    def __init__(self, root: Path) -> None:
        """Create what is missing, and lock it.

        Raises:
            StoreError: when the directory cannot be used or another process has it open.
        """
        self.root = root
        with self.errors():
            for folder in (*AREAS, _ASIDE):
                (root / folder).mkdir(parents=True, exist_ok=True)
            self._lock_file = (root / "lock").open("a")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise StoreError(f"store {root}: already open in another process", path=str(root)) from error

    def close(self) -> None:
        """Let another process have it."""
        self._lock_file.close()

    def path(self, folder: str, artifact_id: bytes) -> Path:
        """Return where an artifact lies, or would, in one of the three folders."""
        return self.root / folder / artifact_id.hex()

    def ids(self, folder: str) -> list[bytes]:
        """Return the ids of what lies in a folder, sorted."""
        # A file manager leaves files of its own (.DS_Store), so only names of ids count.
        entries = (self.root / folder).iterdir()
        return sorted(
            bytes.fromhex(entry.name) for entry in entries if _ID_NAME.fullmatch(entry.name) and entry.is_dir()
        )

    def size(self, artifact_id: bytes) -> int:
        """Return the bytes of all copies with this id: one may be on its way in while another is put aside."""
        return sum(stored.size(self.path(folder, artifact_id)) for folder in AREAS)

    def remove(self, artifact_id: bytes) -> bool:
        """Remove all copies with this id. Return whether there was one.

        Raises:
            StoreError: when the disk refuses.
        """
        aside = self.aside()
        found = False
        with self.errors():
            for folder in AREAS:
                path = self.path(folder, artifact_id)
                if path.exists():
                    found = True
                    path.rename(aside)
                    shutil.rmtree(aside)
        return found

    def aside(self) -> Path:
        """Return a new path for what nobody may see yet, or any more."""
        return self.root / _ASIDE / secrets.token_hex(8)

    def clear_aside(self) -> None:
        """Remove what an earlier process did not finish.

        Raises:
            OSError: when the disk refuses.
        """
        shutil.rmtree(self.root / _ASIDE)
        (self.root / _ASIDE).mkdir()

    def check_room(self, length: int, victims: Iterable[Key] = ()) -> None:
        """Check that the disk has room for a payload, or will have once these artifacts and files are gone.

        Raises:
            StoreError: when it has not.
            OSError: when it does not say how much is free.
        """
        free = shutil.disk_usage(self.root).free
        if free >= length:
            return
        # What they declare is no measure: an artifact on its way in is a file with holes.
        given_back = sum(disk_bytes(path) for victim in victims for path in self._places(victim))
        if free + given_back < length:
            evicting = f", {given_back} more after evicting" if given_back else ""
            raise StoreError(
                f"store {self.root}: the payload takes {length} bytes, {free} are free{evicting}",
                value=length,
                limit=free + given_back,
            )

    def _places(self, key: Key) -> list[Path]:
        return [key] if isinstance(key, Path) else [self.path(folder, key) for folder in AREAS]

    def errors(self) -> AbstractContextManager[None]:
        """Turn what the system refuses in the block into a StoreError that names the store."""
        return disk_errors(self.root)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the system refuses in the block into a StoreError that names the folder."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"store {folder}: {error.strerror or error}", path=str(folder)) from error


def disk_bytes(path: Path) -> int:
    """Return allocated bytes of a file or a folder, as ``du`` does: an artifact on its way in is a file with holes."""
    inside = (Path(parent, name) for parent, _, names in os.walk(path) for name in names)
    total = 0
    for file in [path] if path.is_file() else inside:
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * _BLOCK_BYTES
    return total
