"""Budgets: tokens, a fraction kept, or bytes on the wire, turned into rows a KV head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from kvferry.core.errors import InvalidRequestError

Kept = TypeVar("Kept")
_UNITS = {"kib": 1024, "mib": 1024**2, "kb": 1000, "mb": 1000**2, "b": 1}


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "200KB" (1,000 each) or "2 MiB" (1,024 x 1,024 each)."""
    plain = text.strip().casefold()
    for unit, factor in _UNITS.items():
        if plain.endswith(unit):
            return math.floor(float(plain.removesuffix(unit)) * factor)
    raise InvalidRequestError(f"budget: {text!r} has no unit; B, KB, MB, KiB or MiB", field="budget", value=text)


def spend(given: float | str, tokens: int, keep: Callable[[int], Kept], size: Callable[[Kept], int]) -> Kept:
    """Return what a budget keeps.

    Args:
        given: rows, a fraction of the prefix's tokens, or bytes with a unit.
        tokens: the prefix's.
        keep: what a number of rows keeps.
        size: bytes on the wire of what is kept; it grows with the rows.

    Raises:
        InvalidRequestError: when the bytes do not suffice for a row.
    """
    if isinstance(given, str):
        return _within(parse_bytes(given), tokens, keep, size)
    if isinstance(given, float):
        return keep(max(1, math.floor(tokens * given)))
    return keep(min(given, tokens))


def _within(limit: int, tokens: int, keep: Callable[[int], Kept], size: Callable[[Kept], int]) -> Kept:
    low, high, best = 1, tokens, None
    smallest: InvalidRequestError | None = None
    while low <= high:
        middle = (low + high) // 2
        try:
            kept = keep(middle)
        except InvalidRequestError as error:
            # So few rows are below what the method always keeps: it may still go with more.
            smallest, low = error, middle + 1
            continue
        if size(kept) <= limit:
            best, low = kept, middle + 1
        else:
            high = middle - 1
    if best is None:
        reason = f"; {smallest.message}" if smallest else ""
        raise InvalidRequestError(
            f"budget: {limit} bytes do not suffice for this prefix{reason}", field="budget", value=limit
        )
    return best
