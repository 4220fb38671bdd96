"""Budgets: tokens, a fraction kept, or bytes on the wire, turned into rows a KV head."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Generic, TypeVar

from kvferry.core.errors import InvalidRequestError
from kvferry.core.shares import share

Kept = TypeVar("Kept")
_UNITS = {"kib": 1024, "mib": 1024**2, "gib": 1024**3, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "b": 1}


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "200KB" (1,000 each) or "2 MiB" (1,024 x 1,024 each)."""
    plain = text.strip().casefold()
    for unit, factor in _UNITS.items():
        if plain.endswith(unit):
            return math.floor(Decimal(plain.removesuffix(unit)) * factor)
    raise InvalidRequestError(
        f"budget: {text!r} has no unit; B, KB, MB, GB, KiB, MiB or GiB", field="budget", value=text
    )


def spend(
    given: float | str, tokens: int, keep: Callable[[int], Kept], size: Callable[[Kept], int], block: int = 1
) -> Kept:
    """Return what a budget keeps.

    Args:
        given: rows, a fraction of the prefix's tokens, or bytes of payload with a unit.
        tokens: the prefix's.
        keep: what a number of rows keeps.
        size: bytes of the payload that holds what is kept; within a block of rows it grows with them.
        block: rows after which what was dense is packed, so that the size falls.

    Raises:
        InvalidRequestError: when the bytes do not suffice for a row.
    """
    if isinstance(given, str):
        return _Bytes(parse_bytes(given), keep, size).most(tokens, block)
    if isinstance(given, float):
        return keep(max(1, share(given, tokens)))
    return keep(min(given, tokens))


class _Bytes(Generic[Kept]):
    """A budget in bytes. What a method refuses because it always keeps more counts as too little, not as too large."""

    def __init__(self, limit: int, keep: Callable[[int], Kept], size: Callable[[Kept], int]) -> None:
        self._limit = limit
        self._keep = keep
        self._size = size
        self._refusal = ""

    def most(self, tokens: int, block: int) -> Kept:
        """Return what the largest number of rows keeps that fits."""
        # The whole cache needs no positions, so it may fit where one row less does not.
        first = tokens
        kept = self._try(first)[0]
        while kept is None and block > 1 and first > block:
            first = (first - 1) // block * block
            kept = self._try(first)[0]
        if kept is not None:
            return self._bisect(first + 1, min(first + block, tokens) - 1) or kept
        kept = self._bisect(1, first - 1)
        if kept is not None:
            return kept
        reason = f"; {self._refusal}" if self._refusal else ""
        raise InvalidRequestError(
            f"budget: {self._limit} bytes do not suffice for this prefix{reason}", field="budget", value=self._limit
        )

    def _bisect(self, low: int, high: int) -> Kept | None:
        best = None
        while low <= high:
            middle = (low + high) // 2
            kept, too_large = self._try(middle)
            best = best if kept is None else kept
            if too_large:
                high = middle - 1
            else:
                low = middle + 1
        return best

    def _try(self, rows: int) -> tuple[Kept | None, bool]:
        """Return what fits, and whether what does not is too large."""
        try:
            kept = self._keep(rows)
        except InvalidRequestError as error:
            self._refusal = error.message
            return None, False
        too_large = self._size(kept) > self._limit
        return (None if too_large else kept), too_large
