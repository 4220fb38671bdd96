"""Prefix caches kept at hand, the least recently used going first when memory runs out."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.engine.cache import PrefixCache


class Residency:
    """Prefix caches by key within a byte budget. Use from one thread."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: OrderedDict[bytes, PrefixCache] = OrderedDict()
        # A running sum: other threads may look at it while this one changes what is held.
        self._nbytes = 0
        self._evicted = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, counted from the arrays. May be read from any thread."""
        return self._nbytes

    @property
    def evicted(self) -> int:
        """How many caches went for want of room. May be read from any thread."""
        return self._evicted

    def get(self, key: bytes) -> PrefixCache | None:
        """Return a cache and mark it as used."""
        cache = self._held.get(key)
        if cache is not None:
            self._held.move_to_end(key)
        return cache

    def holds(self, key: bytes) -> bool:
        """Whether a cache is at hand. It does not count as a use."""
        return key in self._held

    def put(self, key: bytes, cache: PrefixCache) -> None:
        """Keep a cache, if it fits the budget at all."""
        self.drop(key)
        if cache.nbytes > self._budget:
            return
        while self._held and self._nbytes + cache.nbytes > self._budget:
            self.drop(next(iter(self._held)))
            self._evicted += 1
        self._held[key] = cache
        self._nbytes += cache.nbytes

    def drop(self, key: bytes) -> None:
        """Forget a cache."""
        dropped = self._held.pop(key, None)
        if dropped is not None:
            self._nbytes -= dropped.nbytes
