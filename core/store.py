"""Artifacts on disk, addressed by their id. Published by one rename, so an artifact is wholly there or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvferry.core import container, manifest, publishing, stored
from kvferry.core.assemblies import Assemblies
from kvferry.core.container import Content
from kvferry.core.errors import NotFoundError
from kvferry.core.eviction import Eviction
from kvferry.core.ledger import SenderAccount
from kvferry.core.ownership import Ownership
from kvferry.core.partial import Partial
from kvferry.core.publishing import Describe, Publisher
from kvferry.core.quarantine import Quarantine
from kvferry.core.retention import Key, Retention
from kvferry.core.store_directory import AREAS, ARTIFACTS, StoreDirectory
from kvferry.core.store_files import StoreFiles, remove_file
from kvferry.core.store_recovery import recover
from kvferry.core.stored import RECORD_FILE, Stored
from kvferry.core.tokens import Token


class ArtifactStore:
    """A directory of artifacts with one writing process. Thread-safe: what it is made of does its work under one lock.

    Attributes:
        root: the directory.
    """

    def __init__(self, root: Path, *, budget: int = 0, ttl_seconds: float = 0.0, durable: bool = True) -> None:
        """Open the store, creating it if needed. What an earlier process left damaged is put into quarantine.

        Args:
            root: the directory.
            budget: most bytes kept, in artifacts and files beside them; what was not used for longest goes first. 0 is
                no limit.
            ttl_seconds: how long either stays without being used. 0 is for ever.
            durable: whether Commit waits for the disk. Without it a payload is in the system's memory when Commit
                answers: it survives this process, and not a loss of power.

        Raises:
            StoreError: when the directory cannot be used or another process has it open.
        """
        self.root = root
        self._lock = threading.RLock()
        self._ownership = Ownership()
        self._retention = Retention(budget, ttl_seconds)
        self._areas = list(AREAS)
        self._directory = StoreDirectory(root)
        self._eviction = Eviction(self._directory, self._retention, self._let_go)
        self._quarantine = Quarantine(self._directory)
        self._assemblies = Assemblies(
            self._directory, self._ownership, self._retention, self._eviction, durable=durable
        )
        self._publisher = Publisher(self._directory, self._quarantine, self._ownership, self._retention, self._eviction)
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory.close)
            recover(self._directory, self._quarantine, self._ownership, self._retention)
            undo.pop_all()

    @property
    def areas(self) -> tuple[str, ...]:
        """The folders that hold what is kept."""
        return tuple(self._areas)

    @property
    def evictions(self) -> int:
        """How many artifacts went for want of room or of use since it opened."""
        return self._eviction.count

    @property
    def quarantines(self) -> int:
        """How many artifacts were put aside since it opened."""
        return self._quarantine.count

    def files(self, name: str, suffix: str = "") -> StoreFiles:
        """Open a folder of files beside the artifacts, which shares the budget and the time to live.

        Args:
            name: of the folder, and of nothing else in the store.
            suffix: of every file.

        Raises:
            StoreError: when the disk refuses.
        """
        opened = StoreFiles(self.root / name, suffix, self._lock, self._retention, self._eviction)
        if name not in self._areas:
            self._areas.append(name)
        return opened

    def close(self) -> None:
        """Release every file and the lock."""
        with self._lock:
            self._assemblies.close()
        self._directory.close()

    def create(self, contents: Iterable[Content], chunk_size: int, describe: Describe) -> Stored:
        """Write a payload, describe it, and publish the artifact.

        Args:
            contents: the payload's sections in order.
            chunk_size: bytes a chunk.
            describe: makes the manifest once the digests of sections and payload are known. Called twice, and for the
                same sizes its manifest has the same size.

        Raises:
            TooLargeError: when the artifact does not fit the budget; nothing is evicted then.
            StoreError: when the disk has no room, and nothing is evicted then; or refuses. Nothing is published then.
        """
        listed = tuple(contents)
        outline = container.outline(listed, chunk_size)
        size = len(manifest.encode(describe(*outline))) + outline[1].length
        with self._lock, self._directory.errors():
            self._eviction.make_room(size, outline[1].length)
        aside = self._directory.aside()
        try:
            with self._directory.errors():
                artifact_id = publishing.write(aside, listed, chunk_size, describe)
                with self._lock:
                    # Somebody else may have used the room meanwhile.
                    if not self._directory.path(ARTIFACTS, artifact_id).exists():
                        self._eviction.make_room(size)
                    return self._publisher.publish(aside, artifact_id)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def offer(self, encoded: bytes, owner: Token | None = None) -> Partial | None:
        """Return what ``begin`` does, or None when the artifact is published.

        Raises:
            StoreError: also when what is published cannot be read now.
        """
        with self._lock:
            # Published between the two, it would be received once more, beside the one that is there.
            if self.holds(manifest.artifact_id(encoded)):
                return None
            return self.begin(encoded, owner)

    def begin(self, encoded: bytes, owner: Token | None = None) -> Partial:
        """Return the assembly of the artifact with this manifest, new or resumed.

        It may be closed when others are begun; ``assembly`` keeps one open.

        Args:
            encoded: the manifest.
            owner: the token that a new artifact counts against; a resumed one keeps its owner.

        Raises:
            ManifestError: when the manifest does not hold together.
            QuotaError: when the owner may store no more.
            TooLargeError: when it does not fit the budget; nothing is evicted then.
            BusyError: when calls are using as many assemblies as may be open; likewise.
            StoreError: when the disk refuses; or, likewise, has no room for the payload.
        """
        with self._lock:
            return self._assemblies.begin(encoded, owner)

    def partial(self, artifact_id: bytes) -> Partial:
        """Return an assembly that was begun, also by an earlier process. ``begin`` says when it may be closed.

        Raises:
            NotFoundError: when the artifact was never offered.
            IntegrityError: when its manifest on disk has changed; offering it again mends that.
            BusyError: when it is not open, and calls are using as many assemblies as may be.
        """
        with self._lock:
            return self._assemblies.get(artifact_id)

    @contextlib.contextmanager
    def assembly(self, artifact_id: bytes) -> Iterator[Partial]:
        """Do what ``partial`` does; for the block only Commit, a drop or an eviction closes it.

        Raises:
            NotFoundError, IntegrityError, BusyError: as ``partial`` does.
        """
        with self._lock:
            partial = self.partial(artifact_id)
            self._assemblies.hold(partial)
        try:
            yield partial
        finally:
            with self._lock:
                self._assemblies.let_go(partial)

    def commit(self, artifact_id: bytes, account: SenderAccount | None) -> Stored:
        """Verify an assembly and publish it.

        Raises:
            NotFoundError: when the artifact was never offered.
            TransferError: when chunks are missing.
            ContainerError: when a digest differs (IntegrityError) or the file on disk was cut short.
            BusyError: as ``partial`` does.
            StoreError: when the disk refuses, or another commit or a drop came first.
        """
        with self.assembly(artifact_id) as partial:
            start = time.perf_counter()
            partial.verify()
            verify_ms = (time.perf_counter() - start) * 1000
            with self._lock:
                self._assemblies.finish(artifact_id, partial)
                # Closed: what is charged from now on is refused, not left out.
                traffic = partial.traffic()
                return self._publisher.publish_received(partial.path, artifact_id, verify_ms, account, traffic)

    def get(self, artifact_id: bytes) -> Stored:
        """Return a published artifact.

        Raises:
            NotFoundError: when it is not here.
            StoreError: when its files cannot be read.
        """
        self.sweep()
        try:
            return stored.read(self._directory.path(ARTIFACTS, artifact_id), artifact_id)
        except NotFoundError:
            self._quarantine.check(artifact_id)
            raise

    def holds(self, artifact_id: bytes) -> bool:
        """Whether an artifact is published. One that can be seen to be damaged is put aside, and is not.

        Raises:
            StoreError: when its files cannot be read now, or the disk refuses.
        """
        with self._lock:
            return self._publisher.holds(artifact_id)

    def get_quarantined(self, artifact_id: bytes) -> Stored:
        """Return an artifact from quarantine, for what is still whole in it.

        Raises:
            NotFoundError: when it is not there.
            StoreError: when its files cannot be read.
        """
        return self._quarantine.get(artifact_id)

    def sweep(self) -> None:
        """Drop what has not been used for longer than the time to live; what the disk keeps is tried again later."""
        with self._lock:
            self._eviction.sweep()

    @contextlib.contextmanager
    def pinned(self, artifact_id: bytes) -> Iterator[None]:
        """Keep an artifact from eviction for the block, and note that it is used."""
        with contextlib.ExitStack() as pins:
            with self._lock:
                self._retention.touch(artifact_id)
                with contextlib.suppress(OSError):
                    os.utime(self._directory.path(ARTIFACTS, artifact_id) / RECORD_FILE)
                pins.enter_context(self._retention.pinned(artifact_id, self._lock))
            yield

    def quarantine(self, artifact_id: bytes, reason: str) -> None:
        """Put a published artifact aside. It is invisible from now on; offering it again replaces it.

        Raises:
            StoreError: when the disk refuses.
        """
        with self._lock:
            self._quarantine.put(artifact_id, reason)

    def quarantined(self) -> dict[bytes, str]:
        """Return what is in quarantine, with the reasons."""
        return self._quarantine.reasons()

    def ids(self) -> list[bytes]:
        """Return the ids of all published artifacts, sorted."""
        self.sweep()
        return self._directory.ids(ARTIFACTS)

    def drop(self, artifact_id: bytes) -> None:
        """Remove an artifact, published or on its way in.

        Raises:
            NotFoundError: when there is none.
            StoreError: when the disk refuses.
        """
        with self._lock:
            self._assemblies.release(artifact_id)
            found = self._directory.remove(artifact_id)
            self._ownership.remove(artifact_id)
            self._retention.remove(artifact_id)
        if not found:
            raise NotFoundError(f"artifact {artifact_id.hex()}: not here", artifact=artifact_id.hex())

    def _let_go(self, key: Key) -> None:
        if isinstance(key, bytes):
            self.drop(key)
        else:
            remove_file(key)
            self._retention.remove(key)
