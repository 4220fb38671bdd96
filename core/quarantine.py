"""Artifacts put aside because they could not be trusted: nobody answers from them, and they say what was wrong."""

from __future__ import annotations

import contextlib
import shutil

from kvferry.core import stored
from kvferry.core.errors import QuarantinedError
from kvferry.core.files import write_atomic
from kvferry.core.store_directory import ARTIFACTS, QUARANTINE, StoreDirectory
from kvferry.core.stored import REASON_FILE, Stored


class Quarantine:
    """What is put aside in a store. Changes are not thread-safe: the store holds its lock.

    Attributes:
        count: how many artifacts were put aside since it opened.
    """

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self.count = 0

    def put(self, artifact_id: bytes, reason: str) -> None:
        """Put a published artifact aside.

        Raises:
            StoreError: when the disk refuses.
        """
        source = self._directory.path(ARTIFACTS, artifact_id)
        target = self._directory.path(QUARANTINE, artifact_id)
        if not source.exists():
            # Another question found the damage first.
            return
        # A full disk must not keep a damaged artifact visible.
        with contextlib.suppress(OSError):
            write_atomic(source / REASON_FILE, reason.encode("utf-8", "replace"))
        with self._directory.errors():
            shutil.rmtree(target, ignore_errors=True)
            source.rename(target)
        self.count += 1

    def replaced(self, artifact_id: bytes) -> None:
        """Forget a copy of which there is a whole one again."""
        shutil.rmtree(self._directory.path(QUARANTINE, artifact_id), ignore_errors=True)

    def get(self, artifact_id: bytes) -> Stored:
        """Return an artifact that was put aside.

        Raises:
            NotFoundError: when it is not there.
            StoreError: when its files cannot be read.
        """
        return stored.read(self._directory.path(QUARANTINE, artifact_id), artifact_id)

    def check(self, artifact_id: bytes) -> None:
        """Check that an artifact was not put aside.

        Raises:
            QuarantinedError: with the reason, when it was.
        """
        path = self._directory.path(QUARANTINE, artifact_id)
        if path.exists():
            reason = stored.reason(path)
            raise QuarantinedError(
                f"artifact {artifact_id.hex()}: put aside: {reason}", artifact=artifact_id.hex(), reason=reason
            )

    def reasons(self) -> dict[bytes, str]:
        """Return what was put aside, and why."""
        return {
            artifact_id: stored.reason(self._directory.path(QUARANTINE, artifact_id))
            for artifact_id in self._directory.ids(QUARANTINE)
        }
