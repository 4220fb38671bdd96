"""What a store keeps and what goes first: a byte budget, a time to live, and pins for what is in use."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import TooLargeError

Key = bytes | Path
"""An artifact's id, or the path of a file that lies beside the artifacts."""


@dataclass
class _Entry:
    size: int
    used_at: float


class Retention:
    """Sizes and last uses of artifacts, and of files beside them. Not thread-safe: the store holds its lock.

    Ages are counted on a monotonic clock, so that a wall clock that jumps expires nothing.
    """

    def __init__(self, budget: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep at most ``budget`` bytes and nothing unused for longer than ``ttl_seconds``; 0 is no limit."""
        self._budget = budget
        self._ttl = ttl_seconds
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}
        self._pins: Counter[Key] = Counter()

    @property
    def total(self) -> int:
        """Bytes kept."""
        return sum(entry.size for entry in self._entries.values())

    def add(self, key: Key, size: int, idle_seconds: float = 0.0) -> None:
        """Count what was last used ``idle_seconds`` ago."""
        self._entries[key] = _Entry(size, self._clock() - max(idle_seconds, 0.0))

    def touch(self, key: Key) -> None:
        """Note that something is used now."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used_at = self._clock()

    def remove(self, key: Key) -> None:
        """Forget something."""
        self._entries.pop(key, None)

    @contextlib.contextmanager
    def pinned(self, key: Key, lock: AbstractContextManager[object] | None = None) -> Iterator[None]:
        """Keep something from eviction and expiry for the block, which may be long: ``lock`` is not held for it."""
        with lock or contextlib.nullcontext():
            self._pins[key] += 1
        try:
            yield
        finally:
            with lock or contextlib.nullcontext():
                self._pins[key] -= 1
                if not self._pins[key]:
                    del self._pins[key]

    def expired(self) -> list[Key]:
        """Return what has not been used for longer than the time to live, oldest first."""
        if not self._ttl:
            return []
        oldest = self._clock() - self._ttl
        return [key for key in self._by_age() if self._entries[key].used_at < oldest]

    def victims(self, needed: int) -> list[Key]:
        """Return what must go, least recently used first, so that ``needed`` more bytes fit.

        Raises:
            TooLargeError: when they do not fit even then; nothing should go in that case.
        """
        if not self._budget:
            return []
        chosen: list[Key] = []
        excess = self.total + needed - self._budget
        for key in self._by_age():
            if excess <= 0:
                break
            chosen.append(key)
            excess -= self._entries[key].size
        if excess > 0:
            held = self.total - sum(self._entries[key].size for key in chosen)
            raise TooLargeError(
                f"store: {needed} bytes do not fit: {held} are in use and the budget is {self._budget}",
                field="max_store_bytes",
                value=needed,
                used=held,
                limit=self._budget,
            )
        return chosen

    def _by_age(self) -> list[Key]:
        free = (key for key in self._entries if key not in self._pins)
        return sorted(free, key=lambda key: self._entries[key].used_at)
