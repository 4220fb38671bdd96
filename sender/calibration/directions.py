"""Where vectors point: the first right singular vector of rows, and its sign. Float64 on the CPU.

Nothing is centred: a common drift of the rows is the signal that is looked for. Symbols: H query heads, Hk KV heads,
N rows, D head dimension. Rule: Q-Filters, arXiv 2503.02812; NathanGodey/qfilters, make_filters.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvferry.core.errors import ModelError

SignRule = Literal["majority", "sum"]
Array = np.ndarray[Any, Any]
_NO_SUM = 1e-12


@dataclass(frozen=True)
class Filters:
    """What is stored: ``stored`` fp32 [Hk, D], and for how many query heads the sign rule had no answer."""

    stored: Array
    undecided: int


def first_axis(rows: Array) -> Array:
    """Return the first right singular vector [D] of rows [N, D], oriented so that its largest component is positive.

    Raises:
        ModelError: when a row is not finite, or all of them are 0.
    """
    plain = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(plain).all():
        raise ModelError("rows: a number is not finite; they have no direction", field="rows")
    if not plain.any():
        raise ModelError("rows: all of them are 0; they have no direction", field="rows")
    # The eigenvector of the D x D matrix is the same, for any number of rows; its sign is a solver's whim.
    axis: Array = np.linalg.eigh(plain.T @ plain)[1][:, -1]
    return axis if axis[np.argmax(np.abs(axis))] > 0 else -axis


def majority(projections: Array) -> int:
    """Return +1 when more than half of the projections are positive, -1 when more than half are negative, else 0."""
    count = len(projections)
    return int(2 * np.sum(projections > 0) > count) - int(2 * np.sum(projections < 0) > count)


def sign_of_sum(projections: Array) -> int:
    """Return the sign of the projections' sum, 0 where that is rounding."""
    total = float(np.sum(projections))
    return 0 if abs(total) <= _NO_SUM * float(np.sum(np.abs(projections))) else int(np.sign(total))


def signed_axis(rows: Array, rule: SignRule) -> tuple[Array, bool]:
    """Return the first right singular vector with its sign, and whether the rule decided it.

    Where the rule has no answer (a tied vote, a sum of 0) the other one is asked, then the largest component.
    The left singular vector is the projection onto the axis but for a positive factor, so its signs are these.

    Raises:
        ModelError: as ``first_axis``.
    """
    axis = first_axis(rows)
    projections = np.asarray(rows, dtype=np.float64) @ axis
    rules = (majority, sign_of_sum) if rule == "majority" else (sign_of_sum, majority)
    first, second = (ask(projections) for ask in rules)
    return (first or second or 1) * axis, first != 0


def stored_filters(queries: Array, kv_heads: int, rule: SignRule) -> Filters:
    """Return the filters of one layer.

    Args:
        queries: [H, N, D], as they stand in the attention: rotated, after their norm.
        kv_heads: Hk; query heads h * H / Hk and those that follow share KV head h.
        rule: how the sign is found: "majority" is the official code's, "sum" the paper's.

    Returns:
        Minus the plain mean over each group, not normalised again, as the published filters are stored.

    Raises:
        ModelError: naming the query or KV head that has no direction.
    """
    heads = queries.shape[0]
    axes, undecided = [], 0
    for head in range(heads):
        try:
            axis, decided = signed_axis(queries[head], rule)
        except ModelError as error:
            raise ModelError(f"query head {head}: {error.message}", field="queries", head=head) from error
        axes.append(axis)
        undecided += 0 if decided else 1
    stored: Array = -np.stack(axes).reshape(kv_heads, heads // kv_heads, -1).mean(axis=1)
    stored = stored.astype(np.float32)
    if not stored.any(axis=1).all():
        empty = int(np.argmin(stored.any(axis=1)))
        raise ModelError(f"KV head {empty}: its query heads cancel out", field="queries", head=empty)
    return Filters(stored, undecided)
