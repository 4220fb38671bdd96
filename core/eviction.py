"""Dropping what a store no longer keeps: what has expired, and what must make room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from kvferry.core.errors import NotFoundError, StoreError
from kvferry.core.retention import Retention


class Eviction:
    """Does what ``Retention`` decides. Not thread-safe: the store holds its lock.

    Attributes:
        count: how many artifacts went since it opened.
    """

    def __init__(self, retention: Retention, drop: Callable[[bytes], None]) -> None:
        """Evict by ``drop``, which removes one artifact, files and all."""
        self._retention = retention
        self._drop = drop
        self.count = 0

    def sweep(self) -> None:
        """Drop what has expired; what the disk keeps is tried again later."""
        for artifact_id in self._retention.expired():
            # It must not stop answers from the rest.
            with contextlib.suppress(StoreError):
                self._drop_all([artifact_id])

    def make_room(self, needed: int) -> None:
        """Drop the least recently used artifacts until ``needed`` more bytes fit.

        Raises:
            TooLargeError: when they do not fit even then; nothing is dropped for them.
            StoreError: when the disk refuses.
        """
        self.sweep()
        self._drop_all(self._retention.victims(needed))

    def _drop_all(self, artifact_ids: Iterable[bytes]) -> None:
        for artifact_id in artifact_ids:
            # Somebody may have removed the files by hand.
            with contextlib.suppress(NotFoundError):
                self._drop(artifact_id)
                self.count += 1
