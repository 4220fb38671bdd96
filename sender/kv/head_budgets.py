"""AdaKV's budgets: heads of a layer share its rows by how strongly their scores concentrate.

Symbols: Hk KV heads, T rows, P protected rows, B rows a head on average with the protected ones, C = B - P.
"""

from __future__ import annotations

import numpy as np

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.selection import Flags, Positions, Scores, top_rows


def head_budgets(scores: Scores, per_head: int, alpha: float, protected: Flags) -> list[int]:
    """Return how many rows every head keeps, protected rows included. They add up to Hk * min(B, T) exactly.

    The rule of AdaKV's official code: of a layer's best Hk * C scores, c_h are head h's, and it gets
    round(c_h * (1 - alpha) + int(alpha * C)) rows beside the protected ones. Rounding moves the total, which the
    official code accepts; here heads give or get a row each, those first that rounding moved furthest the other way.
    A head keeps a row at least. Of equal scores the lower row comes first, then the lower head.

    Args:
        scores: [Hk, T]; those of protected rows do not count.
        per_head: B; all rows when there are no more.
        alpha: part of C that every head has for sure; with 1 all heads get the same.
        protected: [T], rows that every head keeps.

    Raises:
        InvalidRequestError: when B is less than 1, or than P.
    """
    heads, rows = scores.shape
    always = int(protected.sum())
    if per_head >= rows:
        return [rows] * heads
    if per_head < max(always, 1):
        raise InvalidRequestError(
            f"budget: {per_head} rows, but {always} are always kept",
            field="budget",
            value=per_head,
            minimum=max(always, 1),
        )
    contest, each = scores[:, ~protected], per_head - always
    ideal = [won * (1 - alpha) + int(alpha * each) for won in _won(contest, heads * each)]
    counts = _rebalanced(ideal, heads * each, int(always == 0), contest.shape[1])
    return [always + count for count in counts]


def rows_by_head(scores: Scores, budgets: list[int], protected: Flags) -> list[Positions]:
    """Return each head's own best rows, as many as its budget says, protected ones included; see ``top_rows``."""
    return [top_rows(scores[head : head + 1], count, protected)[0] for head, count in enumerate(budgets)]


def _won(scores: Scores, winners: int) -> list[int]:
    """Return how many of the best scores of a layer every head has."""
    heads = len(scores)
    # Row by row, so that equal scores are shared among heads rather than all going to the first.
    order = np.argsort(-scores.T.reshape(-1), kind="stable")[:winners]
    return [int(count) for count in np.bincount(order % heads, minlength=heads)]


def _rebalanced(ideal: list[float], total: int, least: int, most: int) -> list[int]:
    """Round so that the sum is ``total``, each number within ``least`` and ``most``."""
    counts = [min(max(round(share), least), most) for share in ideal]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        movable = [head for head, count in enumerate(counts) if least <= count + step <= most]
        counts[max(movable, key=lambda head: (step * (ideal[head] - counts[head]), -head))] += step
    return counts
