"""The direction of rows and its sign: planted drifts, both rules, groups, and what has no direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import ModelError
from kvferry.sender.calibration.directions import first_axis, majority, sign_of_sum, signed_axis, stored_filters

RULES = ("majority", "sum")


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def drifting(drift: Any, rows: int = 400, spread: float = 0.5, seed: int = 0) -> Any:
    drift = np.asarray(drift, dtype=np.float64)
    return drift + spread * np.random.default_rng(seed).standard_normal((rows, len(drift)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [32, 64, 256])
def test_a_planted_drift_is_found_with_its_sign_and_flips_with_it(rule: Any, dim: int) -> None:
    drift = np.random.default_rng(dim).standard_normal(dim) * 2
    queries = drifting(drift, spread=1.0)
    axis, decided = signed_axis(queries, rule)
    assert decided
    assert cosine(axis, drift) > 0.99
    flipped, _ = signed_axis(-queries, rule)
    assert cosine(flipped, drift) < -0.99
    assert np.linalg.norm(axis) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", RULES)
def test_the_drift_wins_over_a_wider_spread_on_another_axis(rule: Any) -> None:
    queries = np.random.default_rng(1).standard_normal((600, 8)) * [0.1, 3.0, *[0.1] * 6]
    queries[:, 0] -= 5.0
    axis, _ = signed_axis(queries, rule)
    assert axis[0] < -0.99
    # The same rows without their mean point along the spread: what centring would have found.
    assert abs(first_axis(queries - queries.mean(axis=0))[1]) > 0.99


def skewed() -> Any:
    """Forty percent of the rows at +6 and sixty at -1 along one axis."""
    rows = np.zeros((50, 4))
    rows[:20, 2], rows[20:, 2] = 6.0, -1.0
    return rows


def test_the_official_and_the_paper_s_sign_part_on_skewed_rows() -> None:
    official, paper = (signed_axis(skewed(), rule)[0] for rule in RULES)
    assert official == pytest.approx([0, 0, -1, 0])
    assert paper == pytest.approx([0, 0, 1, 0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 32), (14, 2, 64), (4, 4, 256)])
def test_filters_agree_with_the_independent_ones(
    qfilter_oracles: Any, rule: Any, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(heads)
    queries = (rng.standard_normal((heads, 120, dim)) + rng.standard_normal((heads, 1, dim))).astype(np.float32)
    found = stored_filters(queries, kv_heads, rule)
    assert found.stored.dtype == np.float32
    assert found.stored.shape == (kv_heads, dim)
    assert found.undecided == 0
    assert np.allclose(found.stored, qfilter_oracles.stored_filters(queries, kv_heads, rule), atol=1e-6)


def test_filters_are_minus_the_plain_mean_of_neighbouring_heads() -> None:
    axes = np.eye(4)
    queries = np.stack([drifting(4 * axes[0], seed=1), drifting(4 * axes[1], seed=2)] * 2)
    stored = stored_filters(queries, 2, "majority").stored
    assert stored[0] == pytest.approx([-0.5, -0.5, 0, 0], abs=0.1)
    # Not brought back to length 1: two heads that point apart count for less.
    assert np.linalg.norm(stored[0]) == pytest.approx(np.sqrt(0.5), abs=0.05)
    apart = stored_filters(np.stack([queries[0], queries[1], queries[0], queries[0]]), 2, "majority").stored
    assert np.linalg.norm(apart[1]) == pytest.approx(1.0, abs=0.01)


def test_rules_without_an_answer_say_so() -> None:
    assert (majority(np.array([1.0, -1.0])), majority(np.array([1.0, 0.0]))) == (0, 0)
    assert (majority(np.array([1.0, 2.0, -9.0])), majority(np.array([-1.0, -2.0, 9.0]))) == (1, -1)
    assert (sign_of_sum(np.array([0.1, 0.2, -0.3])), sign_of_sum(np.array([0.1, 0.2, -0.4]))) == (0, -1)


def test_a_tied_vote_is_decided_by_the_sum_and_counted() -> None:
    tied = np.zeros((4, 3))
    tied[:, 1] = [5.0, 5.0, -1.0, -1.0]
    axis, decided = signed_axis(tied, "majority")
    assert (axis[1], decided) == (pytest.approx(1.0), False)
    assert signed_axis(tied, "sum")[1]
    assert stored_filters(np.stack([tied, tied]), 1, "majority").undecided == 2


def test_a_sum_of_zero_is_decided_by_the_majority_and_counted() -> None:
    rows = np.zeros((3, 3))
    rows[:, 1] = [-1.0, -1.0, 2.0]
    axis, decided = signed_axis(rows, "sum")
    assert (axis[1], decided) == (pytest.approx(-1.0), False)


def test_a_head_that_no_rule_decides_does_not_hang_on_the_solver() -> None:
    rows = np.zeros((2, 3))
    rows[:, 1] = [-2.0, 2.0]
    for rule in RULES:
        for queries in (rows, -rows):
            axis, decided = signed_axis(queries, rule)  # type: ignore[arg-type]
            assert (axis[1], decided) == (pytest.approx(1.0), False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_has_no_direction_and_names_its_head(value: float) -> None:
    queries = np.stack([drifting([1.0, 2.0])] * 2)
    queries[1, 7, 0] = value
    with pytest.raises(ModelError, match="^query head 1: rows: a number is not finite"):
        stored_filters(queries, 1, "majority")


def test_silence_has_no_direction() -> None:
    with pytest.raises(ModelError, match="^query head 0: rows: all of them are 0"):
        stored_filters(np.zeros((2, 5, 3)), 1, "sum")


def test_heads_that_cancel_out_are_refused() -> None:
    queries = drifting([1.0, 2.0, 3.0])
    with pytest.raises(ModelError, match="^KV head 1: its query heads cancel out"):
        stored_filters(np.stack([queries, queries, queries, -queries]), 2, "majority")
