"""Rows that are kept while others are dropped: the same choice, all at once or a chunk at a time.

The first ``sinks`` rows and, at any time, the last ``recent`` ones stand outside the contest. The others go by score,
highest first, and by index, lowest first, where scores are equal. Under one fixed order the best m of a stream are
among the best m of its parts, so how it is cut changes nothing. This holds for rows whose scores are given; in a model
that evicts while it still reads, later keys depend on what was dropped before. Symbols: Hk KV heads, T rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.selection import Positions, Scores, protect, top_rows


def check_contest(count: int, rows: int, sinks: int, recent: int) -> None:
    """Refuse a budget that leaves nothing to choose, unless every row is kept anyway.

    Raises:
        InvalidRequestError: naming the budget and what it must exceed.
    """
    if count < rows and count <= sinks + recent:
        raise InvalidRequestError(
            f"budget: {count} rows, but {sinks} sinks and {recent} recent rows are always kept; none is left to choose",
            field="budget",
            value=count,
            minimum=sinks + recent + 1,
        )


def rows_at_once(scores: Scores, count: int, *, sinks: int, recent: int) -> list[Positions]:
    """Return the rows that every head keeps, ascending; ``scores`` is [Hk, T].

    Raises:
        InvalidRequestError: when the budget leaves nothing to choose.
    """
    rows = scores.shape[1]
    check_contest(count, rows, sinks, recent)
    protected = protect(rows, sinks, recent) if count < rows else None
    return top_rows(scores, count, protected)


def rows_in_chunks(
    scores: Scores, count: int, *, sinks: int, recent: int, chunks: Iterable[int], warmup: int = 0
) -> list[Positions]:
    """As ``rows_at_once``, dropping rows whenever a chunk has come in; what is dropped never comes back.

    Args:
        scores: [Hk, T].
        count: rows a head.
        sinks: first rows that are kept.
        recent: last rows that are kept, of those seen.
        chunks: lengths, T in all.
        warmup: rows that must have been seen before any is dropped.

    Raises:
        InvalidRequestError: when the budget leaves nothing to choose.
    """
    heads, rows = scores.shape
    check_contest(count, rows, sinks, recent)
    held = [np.zeros(0, dtype=np.int32)] * heads
    seen = 0
    for length in chunks:
        fresh = np.arange(seen, seen + length, dtype=np.int32)
        seen += length
        held = [np.concatenate([kept, fresh]) for kept in held]
        if seen > count and seen >= warmup:
            held = [_drop(scores[head], held[head], count, sinks, seen - recent) for head in range(heads)]
    if seen != rows:
        raise InvalidRequestError(f"chunks: {seen} rows in all, but there are {rows}", field="chunks", value=seen)
    return held


def _drop(scores: np.ndarray[Any, Any], held: Positions, count: int, sinks: int, recent_from: int) -> Positions:
    safe = (held < sinks) | (held >= recent_from)
    contest = held[~safe]
    best = np.argsort(-scores[contest], kind="stable")[: count - int(safe.sum())]
    return np.sort(np.concatenate([held[safe], contest[best]]))
