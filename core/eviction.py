"""Dropping what a store no longer keeps: what has expired, and what must make room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from kvferry.core.errors import NotFoundError, StoreError
from kvferry.core.retention import Key, Retention
from kvferry.core.store_directory import StoreDirectory


class Eviction:
    """Does what ``Retention`` decides. Not thread-safe: the store holds its lock.

    Attributes:
        count: how many artifacts went since it opened; files beside them do not count.
    """

    def __init__(self, directory: StoreDirectory, retention: Retention, drop: Callable[[Key], None]) -> None:
        """Evict by ``drop``, which removes one artifact, files and all, or one file beside them."""
        self._directory = directory
        self._retention = retention
        self._drop = drop
        self.count = 0

    def sweep(self) -> None:
        """Drop what has expired; what the disk keeps is tried again later."""
        for key in self._retention.expired():
            # It must not stop answers from the rest.
            with contextlib.suppress(StoreError):
                self._drop_all([key])

    def make_room(self, needed: int, to_write: int = 0) -> None:
        """Drop what was not used for longest until ``needed`` more bytes fit.

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

    def _drop_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            # Somebody may have removed the files by hand.
            with contextlib.suppress(NotFoundError):
                self._drop(key)
                self.count += isinstance(key, bytes)
