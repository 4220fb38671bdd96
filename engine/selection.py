"""Which rows are kept: the contract that every selector obeys.

Scores are fp32. Protected rows stand outside the contest and are always kept. The others go by score, highest first,
and by index, lowest first, where scores are equal. What is returned ascends. Everything runs in numpy, so that a
selection is the same on every device. Symbols: Hk KV heads, T rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kvferry.core.errors import InvalidRequestError, ModelError

Scores = np.ndarray[Any, np.dtype[np.float32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Positions = np.ndarray[Any, np.dtype[np.int32]]


def to_scores(name: str, scores: mx.array) -> Scores:
    """Return scores as numpy fp32.

    Raises:
        ModelError: when one is not finite. As a rank NaN would quietly keep too few rows.
    """
    plain: Scores = np.array(scores.astype(mx.float32))
    if not np.isfinite(plain).all():
        raise ModelError(f"{name}: a score is not finite; nothing is selected", field=name)
    return plain


def protect(rows: int, sinks: int = 0, recent: int = 0) -> Flags:
    """Return flags [T] of the first ``sinks`` and the last ``recent`` rows."""
    flags = np.zeros(rows, dtype=np.bool_)
    flags[: max(sinks, 0)] = True
    flags[max(rows - recent, 0) :] = True
    return flags


def check_room(count: int, rows: int, sinks: int, recent: int) -> None:
    """Refuse a budget that is smaller than what is always kept, unless every row is kept anyway.

    Raises:
        InvalidRequestError: naming the budget and what it must hold.
    """
    if count < rows and count < sinks + recent:
        raise InvalidRequestError(
            f"budget: {count} rows, but {sinks} sinks and {recent} recent rows are always kept",
            field="budget",
            value=count,
            minimum=sinks + recent,
        )


def top_rows(scores: Scores, count: int, protected: Flags | None = None) -> list[Positions]:
    """Return the rows that every head keeps.

    Args:
        scores: [Hk, T].
        count: rows a head, protected ones included; all T when there are no more.
        protected: [T], rows that are kept whatever their score.

    Returns:
        For every head int32 [min(count, T)], ascending.

    Raises:
        InvalidRequestError: when ``count`` is less than 1, or than the protected rows.
    """
    heads, rows = scores.shape
    flags = np.zeros(rows, dtype=np.bool_) if protected is None else protected
    kept = int(flags.sum())
    count = min(count, rows)
    if count < max(kept, 1):
        raise InvalidRequestError(
            f"budget: {count} rows, but {kept} are always kept", field="budget", value=count, minimum=max(kept, 1)
        )
    contest = np.flatnonzero(~flags)
    # Stable on negated scores: equal ones stay in the order of their index.
    order = np.argsort(-scores[:, contest], axis=1, kind="stable")[:, : count - kept]
    always = np.broadcast_to(np.flatnonzero(flags), (heads, kept))
    chosen = np.sort(np.concatenate([always, contest[order]], axis=1), axis=1).astype(np.int32)
    return list(chosen)


def same_for_every_head(rows: Positions, heads: int) -> list[Positions]:
    """Return one ascending set of rows for every head."""
    return [rows.astype(np.int32)] * heads
