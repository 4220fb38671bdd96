from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def planted(drift: Any, rows: int = 400, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, len(drift))) * 0.3 + drift


@pytest.mark.parametrize("rule", ["majority", "sum"])
def test_the_planted_drift_is_found_with_its_sign(qfilter_oracles: Any, rule: str) -> None:
    drift = np.array([1.0, -2, 0.5, 3])
    queries = planted(drift)
    assert cosine(qfilter_oracles.direction(queries, rule), drift) > 0.99
    assert cosine(qfilter_oracles.direction(-queries, rule), drift) < -0.99
    assert np.linalg.norm(qfilter_oracles.direction(queries, rule)) == pytest.approx(1)


def test_the_drift_beats_the_variance_because_nothing_is_centred(qfilter_oracles: Any) -> None:
    queries = np.random.default_rng(1).standard_normal((400, 3)) * [0.1, 2.0, 0.1]
    queries[:, 0] += 5
    assert abs(qfilter_oracles.direction(queries)[0]) > 0.99


def test_the_two_sign_rules_part_on_skewed_rows(qfilter_oracles: Any) -> None:
    queries = np.zeros((50, 3))
    queries[:20, 1] = 6
    queries[20:, 1] = -1
    assert qfilter_oracles.direction(queries, "majority") == pytest.approx([0, -1, 0])
    assert qfilter_oracles.direction(queries, "sum") == pytest.approx([0, 1, 0])


@pytest.mark.parametrize("rule", ["majority", "sum"])
def test_the_vote_makes_up_for_the_solver_s_sign(qfilter_oracles: Any, rule: str) -> None:
    left = np.random.default_rng(2).standard_normal(51)
    assert qfilter_oracles.vote(left, rule) == -qfilter_oracles.vote(-left, rule)
    assert qfilter_oracles.vote([0.1, 0.1, -5], rule) == {"majority": 1, "sum": -1}[rule]


def test_votes_that_a_solver_would_decide_are_refused(qfilter_oracles: Any) -> None:
    for left in ([1, -1], [1, 2, -1, -2], [1, 1, -1, 0, 0]):
        with pytest.raises(ValueError, match="no majority"):
            qfilter_oracles.vote(left, "majority")
    with pytest.raises(ValueError, match="the sum is 0"):
        qfilter_oracles.vote([3, -1, -2], "sum")


def test_filters_are_minus_the_plain_group_mean(qfilter_oracles: Any) -> None:
    axes = np.eye(4)
    queries = np.array([planted(3 * axis, seed=h) for h, axis in enumerate([axes[0], axes[1], axes[2], -axes[2]])])
    stored = qfilter_oracles.stored_filters(queries, 2)
    assert stored.shape == (2, 4)
    assert stored[0] == pytest.approx([-0.5, -0.5, 0, 0], abs=0.05)
    assert np.linalg.norm(stored[0]) == pytest.approx(np.sqrt(0.5), abs=0.05)
    assert np.linalg.norm(stored[1]) < 0.1
    expected = -(qfilter_oracles.direction(queries[0]) + qfilter_oracles.direction(queries[1])) / 2
    assert stored[0] == pytest.approx(expected)


def test_keys_along_the_queries_score_highest(qfilter_oracles: Any) -> None:
    keys = np.array([[[1.0, 0], [0, 1], [-2, 0]], [[1.0, 0], [0, 1], [-2, 0]]])
    stored = np.array([[-1.0, 0], [0.5, -3]])
    found = qfilter_oracles.scores(keys, stored)
    assert found.tolist() == [[1, 0, -2], [-0.5, 3, 1]]
    assert qfilter_oracles.rows(found[0], 1).tolist() == [0]
    assert qfilter_oracles.rows(qfilter_oracles.scores(keys, -stored)[0], 1).tolist() == [2]


def test_window_and_sinks_are_kept_unscored(qfilter_oracles: Any) -> None:
    row_scores = [-9.0, 5, 6, 7, 6, -9, -9]
    assert qfilter_oracles.rows(row_scores, 4, 2, 1).tolist() == [0, 3, 5, 6]
    assert qfilter_oracles.rows(row_scores, 5, 2, 1).tolist() == [0, 2, 3, 5, 6]
    assert qfilter_oracles.rows(row_scores, 4, 2).tolist() == [2, 3, 5, 6]
    assert qfilter_oracles.rows(row_scores, 7, 2, 1).tolist() == list(range(7))
    assert qfilter_oracles.rows(row_scores, 9, 2, 1).tolist() == list(range(7))
    for window, sinks in ((4, 0), (2, 2), (0, 5)):
        with pytest.raises(ValueError, match="leave nothing of 4"):
            qfilter_oracles.rows(row_scores, 4, window, sinks)


def test_chunking_changes_nothing(qfilter_oracles: Any) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        length, sinks, window = int(rng.integers(1, 60)), int(rng.integers(0, 4)), int(rng.integers(0, 7))
        budget = sinks + window + int(rng.integers(1, 9))
        row_scores = rng.integers(0, 6, length)
        cuts = np.sort(rng.integers(0, length + 1, 5))
        chunks = np.diff([0, *cuts, length]).tolist()
        once = qfilter_oracles.rows(row_scores, budget, window, sinks).tolist()
        assert qfilter_oracles.stream(row_scores, chunks, budget, window, sinks).tolist() == once
        assert qfilter_oracles.stream(row_scores, [1] * length, budget, window, sinks).tolist() == once


def test_the_fallback_s_axis_is_that_of_the_first_keys(qfilter_oracles: Any) -> None:
    keys = np.zeros((12, 2))
    keys[:, 0] = 3
    keys[:, 1] = [1, -1] * 6
    keys[8:, 1] = 50
    assert np.abs(qfilter_oracles.fallback_axis(keys, warmup=8)) == pytest.approx([1, 0])
    assert np.abs(qfilter_oracles.fallback_axis(keys, warmup=8, centre=True)) == pytest.approx([0, 1])
    assert qfilter_oracles.fallback_axis(keys, warmup=13) is None


def test_the_fallback_depends_on_the_chunk_that_crosses(qfilter_oracles: Any) -> None:
    keys = np.zeros((12, 2))
    keys[:8, 0] = 3
    keys[8:, 1] = 50
    early = qfilter_oracles.fallback_axis(keys, [5, 3, 4], warmup=8)
    late = qfilter_oracles.fallback_axis(keys, [5, 7], warmup=8)
    assert np.abs(early) == pytest.approx([1, 0])
    assert np.abs(late) == pytest.approx([0, 1])
    assert qfilter_oracles.fallback_axis(keys, [5, 2], warmup=8) is None
