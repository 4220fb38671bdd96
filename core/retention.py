"""What a store keeps and what goes first: a byte budget, a time to live, and pins for what is in use."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.core.errors import TooLargeError


@dataclass
class _Entry:
    size: int
    used_at: float


class Retention:
    """Sizes and last uses by artifact id. Not thread-safe: the store holds its lock.

    Ages are counted on a monotonic clock, so that a wall clock that jumps expires nothing.
    """

    def __init__(self, budget: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep at most ``budget`` bytes and nothing unused for longer than ``ttl_seconds``; 0 is no limit."""
        self._budget = budget
        self._ttl = ttl_seconds
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._pins: Counter[bytes] = Counter()

    @property
    def total(self) -> int:
        """Bytes kept."""
        return sum(entry.size for entry in self._entries.values())

    def add(self, artifact_id: bytes, size: int, idle_seconds: float = 0.0) -> None:
        """Count an artifact that was last used ``idle_seconds`` ago."""
        self._entries[artifact_id] = _Entry(size, self._clock() - max(idle_seconds, 0.0))

    def touch(self, artifact_id: bytes) -> None:
        """Note that an artifact is used now."""
        entry = self._entries.get(artifact_id)
        if entry is not None:
            entry.used_at = self._clock()

    def remove(self, artifact_id: bytes) -> None:
        """Forget an artifact."""
        self._entries.pop(artifact_id, None)

    @contextlib.contextmanager
    def pinned(self, artifact_id: bytes) -> Iterator[None]:
        """Keep an artifact from eviction and expiry for the block."""
        self._pins[artifact_id] += 1
        try:
            yield
        finally:
            self._pins[artifact_id] -= 1
            if not self._pins[artifact_id]:
                del self._pins[artifact_id]

    def expired(self) -> list[bytes]:
        """Return what has not been used for longer than the time to live, oldest first."""
        if not self._ttl:
            return []
        oldest = self._clock() - self._ttl
        return [artifact_id for artifact_id in self._by_age() if self._entries[artifact_id].used_at < oldest]

    def victims(self, needed: int) -> list[bytes]:
        """Return what must go, least recently used first, so that ``needed`` more bytes fit.

        Raises:
            TooLargeError: when they do not fit even then; nothing should go in that case.
        """
        if not self._budget:
            return []
        chosen: list[bytes] = []
        excess = self.total + needed - self._budget
        for artifact_id in self._by_age():
            if excess <= 0:
                break
            chosen.append(artifact_id)
            excess -= self._entries[artifact_id].size
        if excess > 0:
            held = self.total - sum(self._entries[artifact_id].size for artifact_id in chosen)
            raise TooLargeError(
                f"store: {needed} bytes do not fit: {held} are in use and the budget is {self._budget}",
                field="max_store_bytes",
                value=needed,
                used=held,
                limit=self._budget,
            )
        return chosen

    def _by_age(self) -> list[bytes]:
        free = (artifact_id for artifact_id in self._entries if artifact_id not in self._pins)
        return sorted(free, key=lambda artifact_id: self._entries[artifact_id].used_at)
