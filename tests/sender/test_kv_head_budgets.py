"""AdaKV's budgets: the published rule, with a total that is exact."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.selection import protect
from kvferry.sender.kv.head_budgets import head_budgets, rows_by_head

Array = np.ndarray[Any, Any]
NONE = np.zeros(60, dtype=np.bool_)


def planted(*concentration: int, rows: int = 60) -> Array:
    """Scores of heads that have so many large ones each."""
    scores = np.zeros((len(concentration), rows), np.float32)
    for head, count in enumerate(concentration):
        scores[head, :count] = 1 + np.arange(count, 0, -1)
    return scores


def test_a_head_with_all_the_mass_gets_what_is_not_guaranteed() -> None:
    # C = 10 rows a head; Hk C (1 - alpha) + int(alpha C) = 30 * 0.8 + 2.
    assert head_budgets(planted(30, 0, 0), 10, 0.2, NONE) == [26, 2, 2]


def test_heads_get_rows_by_how_many_of_the_best_scores_are_theirs() -> None:
    assert head_budgets(planted(15, 10, 5), 10, 0.2, NONE) == [14, 10, 6]
    assert head_budgets(planted(15, 10, 5), 10, 0.0, NONE) == [15, 10, 5]
    assert head_budgets(planted(15, 10, 5), 10, 1.0, NONE) == [10, 10, 10]


def test_equal_scores_give_equal_budgets() -> None:
    assert head_budgets(np.ones((3, 60), np.float32), 10, 0.2, NONE) == [10, 10, 10]


def test_a_total_that_rounding_moves_is_balanced() -> None:
    # With alpha 0.5: 9, 8.5 and 12.5, officially 9 + 8 + 12 = 29 of 30.
    assert head_budgets(planted(8, 7, 15), 10, 0.5, NONE) == [9, 9, 12]
    # 15, 7.5 and 7.5, officially 15 + 8 + 8 = 31.
    assert head_budgets(planted(20, 5, 5), 10, 0.5, NONE) == [15, 7, 8]
    # C = 8, guaranteed int(1.6): 20.2, 1 and 1, officially 20 + 1 + 1 of 24.
    assert head_budgets(planted(24, 0, 0), 8, 0.2, NONE) == [21, 2, 1]
    # C = 11, guaranteed int(2.2): 12 * 0.8 + 2 = 11.6, 11 * 0.8 + 2 = 10.8, 10 * 0.8 + 2 = 10.0; 12 + 11 + 10 = 33.
    assert head_budgets(planted(12, 11, 10), 11, 0.2, NONE) == [12, 11, 10]


def test_protected_rows_are_kept_by_all_and_win_nothing() -> None:
    scores = planted(15, 10, 5)
    scores[:, -8:] = 100
    protected = protect(60, recent=8)
    assert head_budgets(scores, 18, 0.2, protected) == [22, 18, 14]
    kept = rows_by_head(scores, [22, 18, 14], protected)
    assert [rows.tolist() for rows in kept] == [[*range(count), *range(52, 60)] for count in (14, 10, 6)]
    assert {rows.dtype for rows in kept} == {np.dtype(np.int32)}


def test_a_head_that_wins_nothing_keeps_a_row() -> None:
    assert head_budgets(planted(30, 0, 0), 10, 0.0, NONE) == [28, 1, 1]
    # Where it keeps protected ones, these suffice.
    assert head_budgets(planted(32, 0, 0), 12, 0.0, protect(60, sinks=2)) == [32, 2, 2]
    assert head_budgets(planted(30, 0, 0), 1, 0.0, NONE) == [1, 1, 1]


def test_no_head_gets_more_rows_than_there_are() -> None:
    assert head_budgets(planted(9, 0, 0, rows=10), 8, 0.0, np.zeros(10, np.bool_)) == [9, 8, 7]
    assert head_budgets(planted(9, 0, 0, rows=10), 10, 0.0, np.zeros(10, np.bool_)) == [10, 10, 10]
    assert head_budgets(planted(9, 0, 0, rows=10), 99, 0.2, np.zeros(10, np.bool_)) == [10, 10, 10]


@pytest.mark.parametrize(("count", "always"), [(0, 0), (7, 8)])
def test_a_budget_below_what_is_kept_is_refused(count: int, always: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^budget: {count} rows, but {always} are always kept"):
        head_budgets(planted(15, 10), count, 0.2, protect(60, recent=always))


@given(
    seed=st.integers(0, 10_000),
    heads=st.integers(1, 8),
    rows=st.integers(1, 60),
    window=st.integers(0, 20),
    count=st.integers(1, 70),
    alpha=st.sampled_from([0.0, 0.2, 0.5, 0.77, 1.0]),
    levels=st.sampled_from([1, 3, 10_000]),
)
def test_budgets_are_the_published_ones_but_for_the_balance(
    budget_oracles: ModuleType, seed: int, heads: int, rows: int, window: int, count: int, alpha: float, levels: int
) -> None:
    window = min(window, rows)
    if count < max(window, 1) and count < rows:
        return
    # Squared, so that heads differ in how concentrated they are.
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, levels, (heads, rows)) * rng.random((heads, 1)) ** 2).astype(np.float32)
    protected = protect(rows, recent=window)
    found = head_budgets(scores, count, alpha, protected)
    assert sum(found) == heads * min(count, rows)
    assert all(max(window, 1) <= budget <= rows for budget in found)
    published = budget_oracles.adakv_caps(scores[:, : rows - window], min(count, rows), window, alpha, ties="row")
    published = [max(cap + window, 1) for cap in published]
    missing = sum(found) - sum(published)
    # Nothing moves but what has to: all one way, unless a head had to get its first row.
    changes = [one - other for one, other in zip(found, published, strict=True)]
    assert sum(changes) == missing
    assert all(change * missing >= 0 for change in changes)
    assert alpha in (0.0, 1.0) or window or max(map(abs, changes)) <= max(1, abs(missing))
    if missing == 0:
        assert found == published
    for head, kept in enumerate(rows_by_head(scores, found, protected)):
        assert len(kept) == found[head]
