"""The artifacts that are on their way into a store: begun, resumed after a restart, and let go."""

from __future__ import annotations

import shutil
from collections import Counter

from kvferry.core import limits, manifest, stored
from kvferry.core.admission import RETRY_AFTER_MS
from kvferry.core.errors import BusyError, NotFoundError, StoreError
from kvferry.core.eviction import Eviction
from kvferry.core.files import write_atomic
from kvferry.core.ownership import OWNER_FILE, Ownership, owner_record
from kvferry.core.partial import MANIFEST_FILE, Partial
from kvferry.core.plan import make_plan
from kvferry.core.retention import Retention
from kvferry.core.store_directory import PARTIAL, StoreDirectory
from kvferry.core.tokens import Token


class Assemblies:
    """Open assemblies by artifact id. Not thread-safe: the store holds its lock.

    Each holds two files open, and a process that has none left can take no connection either. So no more than
    ``limits.MAX_PARTIALS`` are open: beyond that the least recently used one that no call is using is closed. Its files
    stay, and it is opened again when its sender comes back.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        ownership: Ownership,
        retention: Retention,
        eviction: Eviction,
        *,
        durable: bool,
    ) -> None:
        self._directory = directory
        self._ownership = ownership
        self._retention = retention
        self._eviction = eviction
        self._durable = durable
        # The least recently used comes first.
        self._open: dict[bytes, Partial] = {}
        self._calls: Counter[Partial] = Counter()

    def begin(self, encoded: bytes, owner: Token | None) -> Partial:
        """Return the assembly of the artifact with this manifest, new or resumed; ``ArtifactStore.begin`` says more."""
        artifact_id = manifest.artifact_id(encoded)
        if artifact_id in self._open:
            return self._used(artifact_id)
        decoded = manifest.decode(encoded)
        make_plan(decoded)
        path = self._directory.path(PARTIAL, artifact_id)
        new = not path.exists()
        size = len(encoded) + decoded.payload.length
        with self._directory.errors():
            if new:
                self._ownership.check(owner, artifact_id, size)
            self._close_idle()
            if new:
                self._eviction.make_room(size, decoded.payload.length)
            try:
                self._open[artifact_id] = self._assembly(artifact_id, encoded, owner if new else None)
            except OSError:
                if new:
                    # Left behind, it would be resumed without its owner.
                    shutil.rmtree(path, ignore_errors=True)
                raise
        if new and owner is not None:
            self._ownership.add(artifact_id, owner.name, size)
        self._retention.add(artifact_id, self._directory.size(artifact_id))
        return self._open[artifact_id]

    def get(self, artifact_id: bytes) -> Partial:
        """Return an assembly that was begun, also by an earlier process.

        Raises:
            NotFoundError: when the artifact was never offered.
            IntegrityError: when its manifest on disk has changed.
            BusyError: when it is not open, and calls are using as many as may be.
        """
        if artifact_id in self._open:
            # Every chunk comes through here: what is under way is in use.
            return self._used(artifact_id)
        try:
            encoded = (self._directory.path(PARTIAL, artifact_id) / MANIFEST_FILE).read_bytes()
        except OSError as error:
            raise NotFoundError(
                f"artifact {artifact_id.hex()}: not offered here", artifact=artifact_id.hex()
            ) from error
        stored.check_identity(artifact_id, encoded)
        return self.begin(encoded, None)

    def hold(self, partial: Partial) -> None:
        """Note that one more call is using an assembly, which stays open until ``let_go``."""
        self._calls[partial] += 1

    def let_go(self, partial: Partial) -> None:
        """Note that a call is using an assembly no more."""
        self._calls[partial] -= 1
        if not self._calls[partial]:
            del self._calls[partial]

    def finish(self, artifact_id: bytes, verified: Partial) -> None:
        """Close an assembly that was verified meanwhile; its files stay.

        Raises:
            StoreError: when another commit or a drop came first.
        """
        if self._open.get(artifact_id) is not verified:
            # Its directory may by now belong to another assembly, which nobody has verified.
            raise StoreError(f"artifact {artifact_id.hex()}: committed or dropped meanwhile")
        self.release(artifact_id)

    def release(self, artifact_id: bytes) -> None:
        """Close the files of an assembly, if it is open."""
        partial = self._open.pop(artifact_id, None)
        if partial is not None:
            partial.close()

    def close(self) -> None:
        """Close the files of all of them."""
        for artifact_id in list(self._open):
            self.release(artifact_id)

    def _used(self, artifact_id: bytes) -> Partial:
        self._retention.touch(artifact_id)
        self._open[artifact_id] = partial = self._open.pop(artifact_id)
        return partial

    def _assembly(self, artifact_id: bytes, encoded: bytes, owner: Token | None) -> Partial:
        path = self._directory.path(PARTIAL, artifact_id)
        path.mkdir(exist_ok=True)
        if owner is not None:
            write_atomic(path / OWNER_FILE, owner_record(owner.name))
        described = path / MANIFEST_FILE
        if not described.exists() or described.read_bytes() != encoded:
            write_atomic(described, encoded)
        return Partial(path, encoded, durable=self._durable)

    def _close_idle(self) -> None:
        """Close what no call is using until one more may be opened.

        Raises:
            BusyError: when calls are using all of them. Calls end, so unlike a limit on size this one passes.
        """
        idle = (artifact_id for artifact_id, partial in self._open.items() if not self._calls[partial])
        for artifact_id in list(idle)[: max(len(self._open) - limits.MAX_PARTIALS + 1, 0)]:
            self.release(artifact_id)
        if len(self._open) >= limits.MAX_PARTIALS:
            raise BusyError(
                f"store {self._directory.root}: {len(self._open)} artifacts are being received at this moment, the "
                f"limit is {limits.MAX_PARTIALS}",
                retry_after_ms=RETRY_AFTER_MS,
            )
