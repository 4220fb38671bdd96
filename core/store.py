"""Artifacts on disk, addressed by their id. Published by one rename, so an artifact is wholly there or not at all.

ROOT/lock
ROOT/artifacts/<id>/manifest.msgpack, payload.safetensors, record.json
ROOT/partial/<id>/…        on their way in
ROOT/quarantine/<id>/…     put aside, with reason.txt
ROOT/aside/…               being written; emptied at start
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from kvferry.core import container, limits, manifest, stored
from kvferry.core.container import Content
from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.errors import (
    NotFoundError,
    QuarantinedError,
    StoreError,
    TooLargeError,
)
from kvferry.core.files import fsync_directory, write_atomic
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import Manifest, Payload, Section
from kvferry.core.ownership import OWNER_FILE, Ownership, owner_record
from kvferry.core.partial import MANIFEST_FILE, PAYLOAD_FILE, Partial
from kvferry.core.plan import make_plan
from kvferry.core.retention import Retention
from kvferry.core.stored import REASON_FILE, RECORD_FILE, Record, Stored
from kvferry.core.tokens import Token

_KEPT = ("artifacts", "partial", "quarantine")
_ID_NAME = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


def _holds(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


def _write_record(path: Path, record: Record) -> None:
    write_atomic(path / RECORD_FILE, msgspec.json.encode(record))


class ArtifactStore:
    """A directory of artifacts with one writing process. Thread-safe.

    Attributes:
        root: the directory.
        evictions, quarantines: how many artifacts went for want of room or of use, and were put aside, since it opened.
    """

    def __init__(self, root: Path, *, budget: int = 0, ttl_seconds: float = 0.0, durable: bool = True) -> None:
        """Open the store, creating it if needed. What an earlier process left damaged is put into quarantine.

        Args:
            root: the directory.
            budget: most bytes kept; the least recently used artifacts go first. 0 is no limit.
            ttl_seconds: how long an artifact stays without being used. 0 is for ever.
            durable: whether Commit waits for the disk. Without it a payload is in the system's memory when Commit
                answers: it survives this process, and not a loss of power.

        Raises:
            StoreError: when the directory cannot be used or another process has it open.
        """
        self.root = root
        try:
            for folder in (*_KEPT, "aside"):
                (root / folder).mkdir(parents=True, exist_ok=True)
            self._lock_file = (root / "lock").open("a")
        except OSError as error:
            raise StoreError(f"store {root}: {error.strerror}", path=str(root)) from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise StoreError(f"store {root}: already open in another process", path=str(root)) from error
        self._ownership = Ownership()
        self._lock = threading.RLock()
        self._partials: dict[bytes, Partial] = {}
        self._retention = Retention(budget, ttl_seconds)
        self._durable = durable
        self.evictions = 0
        self.quarantines = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock_file.close)
            try:
                self._recover()
            except OSError as error:
                raise self._failed(error) from error
            undo.pop_all()

    def close(self) -> None:
        """Release every file and the lock."""
        with self._lock:
            for partial in self._partials.values():
                partial.close()
            self._partials.clear()
        self._lock_file.close()

    def create(
        self,
        contents: Iterable[Content],
        chunk_size: int,
        describe: Callable[[tuple[Section, ...], Payload], Manifest],
    ) -> Stored:
        """Write a payload, describe it, and publish the artifact.

        Args:
            contents: the payload's sections in order.
            chunk_size: bytes a chunk.
            describe: makes the manifest once the digests of sections and payload are known. Called twice, and for the
                same sizes its manifest has the same size.

        Raises:
            TooLargeError: when the artifact does not fit the budget; nothing is evicted then.
            StoreError: when the disk refuses; nothing is published then.
        """
        listed = tuple(contents)
        outline = container.outline(listed, chunk_size)
        size = len(manifest.encode(describe(*outline))) + outline[1].length
        with self._lock:
            self._make_room(size)
        aside = self.root / "aside" / secrets.token_hex(8)
        try:
            aside.mkdir()
            with (aside / PAYLOAD_FILE).open("xb") as file:
                sections, payload = container.write_payload(listed, file.write, chunk_size)
                file.flush()
                os.fsync(file.fileno())
            described = describe(sections, payload)
            make_plan(described)
            encoded = manifest.encode(described)
            artifact_id = manifest.artifact_id(encoded)
            write_atomic(aside / MANIFEST_FILE, encoded)
            _write_record(aside, Record(time.time(), 0.0, None, None))
            with self._lock:
                # Somebody else may have used the room meanwhile.
                if not self._path("artifacts", artifact_id).exists():
                    self._make_room(size)
                return self._publish(aside, artifact_id)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def begin(self, encoded: bytes, owner: Token | None = None) -> Partial:
        """Return the assembly of the artifact with this manifest, new or resumed.

        Args:
            encoded: the manifest.
            owner: the token that a new artifact counts against; a resumed one keeps its owner.

        Raises:
            ManifestError: when the manifest does not hold together.
            QuotaError: when the owner may store no more.
            TooLargeError: when too many artifacts are on their way in.
            StoreError: when the disk refuses or has no room for the payload.
        """
        artifact_id = manifest.artifact_id(encoded)
        with self._lock:
            if artifact_id in self._partials:
                self._retention.touch(artifact_id)
                return self._partials[artifact_id]
            decoded = manifest.decode(encoded)
            make_plan(decoded)
            path = self._path("partial", artifact_id)
            size = len(encoded) + decoded.payload.length
            self._check_open_files()
            new = not path.exists()
            try:
                if new:
                    self._ownership.check(owner, artifact_id, size)
                    self._make_room(size)
                    self._check_room(decoded.payload.length)
                    path.mkdir()
                    if owner is not None:
                        write_atomic(path / OWNER_FILE, owner_record(owner.name))
                if not _holds(path / MANIFEST_FILE, encoded):
                    write_atomic(path / MANIFEST_FILE, encoded)
                self._partials[artifact_id] = Partial(path, encoded, durable=self._durable)
            except OSError as error:
                if new:
                    # Left behind, it would be resumed without its owner.
                    shutil.rmtree(path, ignore_errors=True)
                raise self._failed(error) from error
            if new and owner is not None:
                self._ownership.add(artifact_id, owner.name, size)
            self._count(artifact_id)
            return self._partials[artifact_id]

    def partial(self, artifact_id: bytes) -> Partial:
        """Return an assembly that was begun, also by an earlier process.

        Raises:
            NotFoundError: when the artifact was never offered.
            IntegrityError: when its manifest on disk has changed; offering it again mends that.
        """
        with self._lock:
            found = self._partials.get(artifact_id)
            if found is not None:
                # Every chunk comes through here: what is under way is in use.
                self._retention.touch(artifact_id)
                return found
            try:
                encoded = (self._path("partial", artifact_id) / MANIFEST_FILE).read_bytes()
            except OSError as error:
                raise NotFoundError(
                    f"artifact {artifact_id.hex()}: not offered here", artifact=artifact_id.hex()
                ) from error
            stored.check_identity(artifact_id, encoded)
            return self.begin(encoded)

    def commit(self, artifact_id: bytes, account: SenderAccount | None) -> Stored:
        """Verify an assembly and publish it.

        Raises:
            NotFoundError: when the artifact was never offered.
            TransferError: when chunks are missing.
            ContainerError: when a digest differs (IntegrityError) or the file on disk was cut short.
            StoreError: when the disk refuses, or another commit or a drop came first.
        """
        partial = self.partial(artifact_id)
        start = time.perf_counter()
        partial.verify()
        verify_ms = (time.perf_counter() - start) * 1000
        with self._lock:
            if self._partials.get(artifact_id) is not partial:
                # Its directory may by now belong to another assembly, which nobody has verified.
                raise StoreError(f"artifact {artifact_id.hex()}: committed or dropped meanwhile")
            traffic = partial.traffic()
            partial.close()
            del self._partials[artifact_id]
            try:
                # While the journal is still there: if the disk is full, no chunk has to come again.
                owner = self._ownership.owner(artifact_id)
                _write_record(partial.path, Record(time.time(), verify_ms, account, traffic, owner))
                (partial.path / "chunks").unlink(missing_ok=True)
                published = self._publish(partial.path, artifact_id)
                # Only now that the record names the owner: at no moment does nothing name it.
                (published.path / OWNER_FILE).unlink(missing_ok=True)
            except OSError as error:
                raise self._failed(error) from error
            return published

    def get(self, artifact_id: bytes) -> Stored:
        """Return a published artifact.

        Raises:
            NotFoundError: when it is not here.
            StoreError: when its files cannot be read.
        """
        self.sweep()
        try:
            return stored.read(self._path("artifacts", artifact_id), artifact_id)
        except NotFoundError:
            self._raise_if_quarantined(artifact_id)
            raise

    def holds(self, artifact_id: bytes) -> bool:
        """Whether an artifact is published. One that can be seen to be damaged is put aside, and is not.

        Raises:
            StoreError: when its files cannot be read now, or the disk refuses.
        """
        self.sweep()
        path = self._path("artifacts", artifact_id)
        if not path.exists():
            return False
        problem = stored.problem(path, artifact_id)
        if problem:
            self.quarantine(artifact_id, problem)
        return not problem

    def get_quarantined(self, artifact_id: bytes) -> Stored:
        """Return an artifact from quarantine, for what is still whole in it.

        Raises:
            NotFoundError: when it is not there.
            StoreError: when its files cannot be read.
        """
        return stored.read(self._path("quarantine", artifact_id), artifact_id)

    def sweep(self) -> None:
        """Drop what has not been used for longer than the time to live; what the disk keeps is tried again later."""
        with self._lock:
            for artifact_id in self._retention.expired():
                # It must not stop answers from the rest.
                with contextlib.suppress(StoreError):
                    self._drop_all([artifact_id])

    @contextlib.contextmanager
    def pinned(self, artifact_id: bytes) -> Iterator[None]:
        """Keep an artifact from eviction for the block, and note that it is used."""
        with self._lock:
            self._retention.touch(artifact_id)
            with contextlib.suppress(OSError):
                os.utime(self._path("artifacts", artifact_id) / RECORD_FILE)
            pin = self._retention.pinned(artifact_id)
            pin.__enter__()
        try:
            yield
        finally:
            with self._lock:
                pin.__exit__(None, None, None)

    def quarantine(self, artifact_id: bytes, reason: str) -> None:
        """Put a published artifact aside. It is invisible from now on; offering it again replaces it.

        Raises:
            StoreError: when the disk refuses.
        """
        with self._lock:
            source, target = self._path("artifacts", artifact_id), self._path("quarantine", artifact_id)
            if not source.exists():
                # Another question found the damage first.
                return
            # A full disk must not keep a damaged artifact visible.
            with contextlib.suppress(OSError):
                write_atomic(source / REASON_FILE, reason.encode("utf-8", "replace"))
            try:
                shutil.rmtree(target, ignore_errors=True)
                source.rename(target)
            except OSError as error:
                raise self._failed(error) from error
            self.quarantines += 1

    def quarantined(self) -> dict[bytes, str]:
        """Return what is in quarantine, with the reasons."""
        return {
            artifact_id: stored.reason(self._path("quarantine", artifact_id)) for artifact_id in self._ids("quarantine")
        }

    def ids(self) -> list[bytes]:
        """Return the ids of all published artifacts, sorted."""
        self.sweep()
        return self._ids("artifacts")

    def _ids(self, folder: str) -> list[bytes]:
        # A file manager leaves files of its own (.DS_Store), so only names of ids count.
        entries = (self.root / folder).iterdir()
        return sorted(
            bytes.fromhex(entry.name) for entry in entries if _ID_NAME.fullmatch(entry.name) and entry.is_dir()
        )

    def drop(self, artifact_id: bytes) -> None:
        """Remove an artifact, published or on its way in.

        Raises:
            NotFoundError: when there is none.
            StoreError: when the disk refuses.
        """
        with self._lock:
            partial = self._partials.pop(artifact_id, None)
            if partial is not None:
                partial.close()
            aside = self.root / "aside" / secrets.token_hex(8)
            found = False
            try:
                for folder in _KEPT:
                    path = self._path(folder, artifact_id)
                    if path.exists():
                        found = True
                        path.rename(aside)
                        shutil.rmtree(aside)
            except OSError as error:
                raise self._failed(error) from error
            self._ownership.remove(artifact_id)
            self._retention.remove(artifact_id)
        if not found:
            raise NotFoundError(f"artifact {artifact_id.hex()}: not here", artifact=artifact_id.hex())

    def _publish(self, path: Path, artifact_id: bytes) -> Stored:
        with self._lock:
            target = self._path("artifacts", artifact_id)
            if self.holds(artifact_id):
                shutil.rmtree(path)
            else:
                path.rename(target)
                fsync_directory(target.parent)
            # A new copy, verified whole, takes the place of one that was put aside.
            shutil.rmtree(self._path("quarantine", artifact_id), ignore_errors=True)
            self._count(artifact_id)
            return stored.read(target, artifact_id)

    def _recover(self) -> None:
        """Clear what was being written, put aside what is not whole, and count what an earlier process left."""
        shutil.rmtree(self.root / "aside")
        (self.root / "aside").mkdir()
        for artifact_id in self._ids("artifacts"):
            try:
                problem = stored.problem(self._path("artifacts", artifact_id), artifact_id)
            except StoreError as error:
                problem = error.message
            if problem:
                self.quarantine(artifact_id, f"found damaged at start: {problem}")
            else:
                # Still there if the process ended right after the artifact was published anew.
                shutil.rmtree(self._path("quarantine", artifact_id), ignore_errors=True)
        now = time.time()
        # Of two copies with one id, the later entry says when it was last used and whose it is.
        for folder, owner_file in (("quarantine", RECORD_FILE), ("partial", OWNER_FILE), ("artifacts", RECORD_FILE)):
            self._ownership.recover(self.root / folder, owner_file, (MANIFEST_FILE, PAYLOAD_FILE))
            for artifact_id in self._ids(folder):
                self._count(artifact_id, now - stored.used_at(self._path(folder, artifact_id)))

    def _count(self, artifact_id: bytes, idle_seconds: float = 0.0) -> None:
        """Note the size of all copies with this id: one may be on its way in while another is put aside."""
        copies = [self._path(folder, artifact_id) for folder in _KEPT]
        self._retention.add(artifact_id, sum(map(stored.size, copies)), idle_seconds)

    def _make_room(self, needed: int) -> None:
        self.sweep()
        self._drop_all(self._retention.victims(needed))

    def _drop_all(self, artifact_ids: Iterable[bytes]) -> None:
        for artifact_id in artifact_ids:
            # Somebody may have removed the files by hand.
            with contextlib.suppress(NotFoundError):
                self.drop(artifact_id)
                self.evictions += 1

    def _raise_if_quarantined(self, artifact_id: bytes) -> None:
        path = self._path("quarantine", artifact_id)
        if path.exists():
            reason = stored.reason(path)
            raise QuarantinedError(
                f"artifact {artifact_id.hex()}: put aside: {reason}", artifact=artifact_id.hex(), reason=reason
            )

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(f"store {self.root}: {error.strerror or error}", path=str(self.root))

    def _check_open_files(self) -> None:
        # Each assembly holds two files open, and a process that has none left can take no connection either.
        if len(self._partials) >= limits.MAX_PARTIALS:
            raise TooLargeError(
                f"store {self.root}: {len(self._partials)} artifacts are on their way in, the limit is "
                f"{limits.MAX_PARTIALS}; commit or drop some",
                value=len(self._partials),
                limit=limits.MAX_PARTIALS,
            )

    def _check_room(self, length: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < length:
            raise StoreError(
                f"store {self.root}: the payload takes {length} bytes, {free} are free",
                value=length,
                limit=free,
            )

    def _path(self, folder: str, artifact_id: bytes) -> Path:
        return self.root / folder / artifact_id.hex()
