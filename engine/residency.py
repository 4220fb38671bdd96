"""Prefix caches kept at hand, the least recently used going first when memory runs out."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.engine.cache import PrefixCache


class Residency:
    """Prefix caches by key within a byte budget. Use from one thread."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: OrderedDict[bytes, PrefixCache] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes held, counted from the arrays."""
        return sum(cache.nbytes for cache in self._held.values())

    def get(self, key: bytes) -> PrefixCache | None:
        """Return a cache and mark it as used."""
        cache = self._held.get(key)
        if cache is not None:
            self._held.move_to_end(key)
        return cache

    def put(self, key: bytes, cache: PrefixCache) -> None:
        """Keep a cache, if it fits the budget at all."""
        self._held.pop(key, None)
        if cache.nbytes > self._budget:
            return
        while self._held and self.nbytes + cache.nbytes > self._budget:
            self._held.popitem(last=False)
        self._held[key] = cache

    def drop(self, key: bytes) -> None:
        """Forget a cache."""
        self._held.pop(key, None)
