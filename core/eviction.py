"""Dropping what a store no longer keeps: what has expired, and what must make room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from kvferry.core.errors import NotFoundError, StoreError
from kvferry.core.retention import Retention
from kvferry.core.store_directory import StoreDirectory


class Eviction:
    """Does what ``Retention`` decides. Not thread-safe: the store holds its lock.

    Attributes:
        count: how many artifacts went since it opened.
    """

    def __init__(self, directory: StoreDirectory, retention: Retention, drop: Callable[[bytes], None]) -> None:
        """Evict by ``drop``, which removes one artifact, files and all."""
        self._directory = directory
        self._retention = retention
        self._drop = drop
        self.count = 0

    def sweep(self) -> None:
        """Drop what has expired; what the disk keeps is tried again later."""
        for artifact_id in self._retention.expired():
            # It must not stop answers from the rest.
            with contextlib.suppress(StoreError):
                self._drop_all([artifact_id])

    def make_room(self, needed: int, to_write: int = 0) -> None:
        """Drop the least recently used artifacts until ``needed`` more bytes fit.

        Args:
            needed: bytes of the budget.
            to_write: how many of them the disk must have room for; 0 when they are written already.

        Raises:
            TooLargeError: when they do not fit the budget even then; nothing is dropped for them.
            StoreError: likewise for the disk; or when it refuses to remove something.
            OSError: when it does not say how much is free.
        """
        self.sweep()
        victims = self._retention.victims(needed)
        if to_write:
            self._directory.check_room(to_write, victims)
        self._drop_all(victims)

    def _drop_all(self, artifact_ids: Iterable[bytes]) -> None:
        for artifact_id in artifact_ids:
            # Somebody may have removed the files by hand.
            with contextlib.suppress(NotFoundError):
                self._drop(artifact_id)
                self.count += 1
