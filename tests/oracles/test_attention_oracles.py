from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

LOG3 = math.log(3)


def test_each_query_sees_the_rows_up_to_its_own(attention_oracles: Any) -> None:
    keys = np.array([[[0.0], [LOG3], [0.0]]])
    weights = attention_oracles.causal_attention(np.ones((1, 2, 1)), keys)
    assert weights[0, 0] == pytest.approx([1 / 4, 3 / 4, 0])
    assert weights[0, 1] == pytest.approx([1 / 5, 3 / 5, 1 / 5])


def test_logits_are_divided_by_the_root_of_the_dimension(attention_oracles: Any) -> None:
    keys = np.array([[[0.0] * 4, [LOG3] * 4]])
    # 4 * log 3 / sqrt(4)
    assert attention_oracles.causal_attention(np.ones((1, 1, 4)), keys)[0, 0] == pytest.approx([1 / 10, 9 / 10])


def test_query_heads_share_kv_heads_in_runs(attention_oracles: Any) -> None:
    keys = np.array([[[0.0], [LOG3]], [[LOG3], [0.0]]])
    weights = attention_oracles.causal_attention(np.ones((4, 1, 1)), keys)[:, 0, 0]
    assert weights == pytest.approx([0.25, 0.25, 0.75, 0.75])


def test_average_pooling_counts_its_zeros(attention_oracles: Any) -> None:
    assert attention_oracles.pool([3.0, 6, 9, 12], 3, "avg") == pytest.approx([3, 6, 9, 7])
    assert attention_oracles.pool([5.0, 10, 15], 5, "avg") == pytest.approx([6, 6, 6])
    assert attention_oracles.pool([4.0], 7, "avg") == pytest.approx([4 / 7])


def test_maximum_pooling_ignores_its_padding(attention_oracles: Any) -> None:
    assert attention_oracles.pool([-3.0, -6, -1, -9, -9], 3, "max").tolist() == [-3, -1, -1, -1, -9]
    assert attention_oracles.pool([1.0, 0, 0, 0], 1, "max").tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="even"):
        attention_oracles.pool([1.0], 2, "max")


def snapkv(oracles: Any, **options: Any) -> Any:
    """Two query heads on one KV head, T = 2, W = 2; the first window key is as strong as 3 prefix rows."""
    queries = np.array([[[1.0], [0.0]], [[0.0], [0.0]]])
    prefix, window = np.array([[[0.0], [LOG3]]]), np.array([[[LOG3], [0.0]]])
    return oracles.snapkv_scores(queries, prefix, window, kernel=1, **options)


def test_snapkv_by_hand(attention_oracles: Any) -> None:
    # Head 0: [1, 3 | 3] / 7, then level over 4; head 1: level over 3, then over 4. The window's columns are dropped
    # after the softmax.
    head_0, head_1 = np.array([1 / 7 + 1 / 4, 3 / 7 + 1 / 4]), np.array([1 / 3 + 1 / 4] * 2)
    assert snapkv(attention_oracles, group="none", over="sum") == pytest.approx(np.array([head_0, head_1]))
    assert snapkv(attention_oracles, group="none") == pytest.approx(np.array([head_0, head_1]) / 2)
    assert snapkv(attention_oracles, over="sum")[0] == pytest.approx((head_0 + head_1) / 2)
    assert snapkv(attention_oracles, over="sum", group="max")[0] == pytest.approx([head_1[0], head_0[1]])


def test_the_defaults_are_those_of_b5(attention_oracles: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((4, 3, 8)), rng.standard_normal((2, 20, 8)), rng.standard_normal((2, 3, 8))
    weights = attention_oracles.causal_attention(arrays[0], np.concatenate(arrays[1:], axis=1))[:, :, :20]
    mean = weights.reshape(2, 6, 20).mean(axis=1)
    padded = np.pad(mean, ((0, 0), (3, 3)), constant_values=-np.inf)
    expected = np.stack([padded[:, t : t + 7].max(axis=1) for t in range(20)], axis=1)
    assert attention_oracles.snapkv_scores(*arrays) == pytest.approx(expected)


def test_the_group_mean_commutes_with_average_pooling_only(attention_oracles: Any) -> None:
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((6, 4, 8)), rng.standard_normal((2, 30, 8)), rng.standard_normal((2, 4, 8))

    def both(**options: Any) -> tuple[Any, Any]:
        score = attention_oracles.snapkv_scores
        return score(*arrays, order="group-pool", **options), score(*arrays, order="pool-group", **options)

    before, after = both(pooling="avg", kernel=5)
    assert before == pytest.approx(after)
    before, after = both(pooling="max", kernel=7)
    assert np.abs(before - after).max() > 1e-3
    assert (after >= before - 1e-12).all()


def test_a_planted_key_survives_with_its_neighbours(attention_oracles: Any) -> None:
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((3, 4, 8))
    prefix, window = 0.1 * rng.standard_normal((1, 40, 8)), 0.1 * rng.standard_normal((1, 4, 8))
    prefix[0, 17] = 5 * queries[1, 2]
    scores = attention_oracles.snapkv_scores(queries, prefix, window)[0]
    assert attention_oracles.best(scores, range(40), 7) == list(range(14, 21))


def test_a_query_head_changes_only_its_group(attention_oracles: Any) -> None:
    rng = np.random.default_rng(3)
    queries, prefix = rng.standard_normal((9, 4, 8)), rng.standard_normal((3, 12, 8))
    window = rng.standard_normal((3, 4, 8))
    before = attention_oracles.snapkv_scores(queries, prefix, window)
    queries[4] *= 3
    after = attention_oracles.snapkv_scores(queries, prefix, window)
    assert before.shape == (3, 12)
    assert [np.array_equal(before[k], after[k]) for k in range(3)] == [True, False, True]


def test_heavy_hitters_are_sums_and_not_means(attention_oracles: Any) -> None:
    weights = np.zeros((1, 50, 50))
    weights[0, :, 0] = 0.2
    weights[0, 40:, 40] = 0.5
    sums = attention_oracles.column_sums(weights, 1)
    assert (sums[0, 0], sums[0, 40]) == (pytest.approx(10), pytest.approx(5))
    assert attention_oracles.h2o_rows(sums[0], 1, 4).tolist() == [0, 46, 47, 48, 49]
    normalised = attention_oracles.normalised_h2o_scores(sums)
    assert (normalised[0, 0], normalised[0, 40]) == (pytest.approx(0.2), pytest.approx(0.5))
    assert attention_oracles.h2o_rows(normalised[0], 1, 4).tolist() == [40, 46, 47, 48, 49]


def test_h2o_sums_run_over_all_causal_queries_and_the_group(attention_oracles: Any) -> None:
    keys = np.array([[[0.0], [LOG3], [0.0]]])
    queries = np.array([[[0.0], [1.0], [0.0]], [[0.0], [0.0], [0.0]]])
    # Head 0: [1], [1, 3]/4, [1, 1, 1]/3; head 1: [1], [1, 1]/2, [1, 1, 1]/3.
    expected = [1 + 1 / 4 + 1 / 3 + 1 + 1 / 2 + 1 / 3, 3 / 4 + 1 / 3 + 1 / 2 + 1 / 3, 2 / 3]
    assert attention_oracles.h2o_scores(queries, keys)[0] == pytest.approx(expected)


def test_h2o_rows_at_and_above_the_budget(attention_oracles: Any) -> None:
    assert attention_oracles.h2o_rows([1.0, 2, 3, 4, 5], 2, 3).tolist() == [0, 1, 2, 3, 4]
    assert attention_oracles.h2o_rows([1.0, 2, 3, 4, 5], 2, 2).tolist() == [1, 2, 3, 4]
    assert attention_oracles.h2o_rows([3.0, 2, 3, 3, 9, 9], 2, 2).tolist() == [0, 2, 4, 5]
    # Room for one row to come: the recent rows are one fewer.
    assert attention_oracles.h2o_rows([3.0, 2, 1, 9, 5], 2, 3, coming=1).tolist() == [0, 1, 3, 4]
    assert attention_oracles.h2o_rows([3.0, 2, 1, 9], 2, 3, coming=1).tolist() == [0, 1, 2, 3]


def test_h2o_sums_stay_with_their_rows(attention_oracles: Any) -> None:
    # Prefill: [1], [0, 1], [0, 1, 1]/2. Row 0 goes; row 3 then sees 1, 2 and itself, evenly, and 2 goes.
    keys = np.array([[[-99.0], [0.0], [0.0], [0.0]]])
    queries = np.array([[[1.0], [1.0], [1.0], [0.0]]])
    ((held, kept),) = attention_oracles.h2o_stream(queries, keys, 1, 1, prefill=3)
    assert held.tolist() == [1, 3]
    assert kept == pytest.approx([1 + 1 / 2 + 1 / 3, 1 / 3])
    # With room for all three, row 0 takes part in row 3's softmax.
    ((held, kept),) = attention_oracles.h2o_stream(queries, keys, 2, 1, prefill=3)
    assert held.tolist() == [0, 1, 3]
    assert kept == pytest.approx([1 + 1 / 4, 1 + 1 / 2 + 1 / 4, 1 / 4])


def test_h2o_without_evictions_is_the_prefill(attention_oracles: Any) -> None:
    rng = np.random.default_rng(4)
    queries, keys = rng.standard_normal((6, 12, 4)), rng.standard_normal((2, 12, 4))
    for held, sums in attention_oracles.h2o_stream(queries, keys, 8, 4, prefill=5):
        assert held.tolist() == list(range(12))
        assert len(sums) == 12
    streamed = np.array([sums for _, sums in attention_oracles.h2o_stream(queries, keys, 8, 4, prefill=5)])
    assert streamed == pytest.approx(attention_oracles.h2o_scores(queries, keys))


def test_tova_takes_one_mean_over_all_heads(attention_oracles: Any) -> None:
    keys = np.array([[[0.0], [LOG3], [0.0]], [[LOG3], [0.0], [0.0]]])
    # KV head 0 has a query of 1 and one of 0, KV head 1 has 0 twice.
    scores = attention_oracles.tova_scores(np.array([[1.0], [0.0], [0.0], [0.0]]), keys)
    assert scores == pytest.approx([(1 / 5 + 1) / 4, (3 / 5 + 1) / 4, (1 / 5 + 1) / 4])


def test_tova_may_drop_the_last_row(attention_oracles: Any) -> None:
    scores = [0.3, 0.2, 0.4, 0.1]
    assert attention_oracles.tova_rows(scores, 4).tolist() == [0, 1, 2, 3]
    assert attention_oracles.tova_rows(scores, 3).tolist() == [0, 1, 2]
    assert attention_oracles.tova_rows(scores, 3, force_last=True).tolist() == [0, 2, 3]
    assert attention_oracles.tova_rows([0.25] * 4, 2).tolist() == [0, 1]


def test_tova_drops_one_row_a_step(attention_oracles: Any) -> None:
    # Row 3's query likes small keys: of 0, 2, 3 it drops 2. A prefill of 3 first dropped 1.
    keys = np.array([[[0.5], [0.0], [3.0], [0.1]]])
    queries = np.array([[[0.0], [0.0], [1.0], [-1.0]]])
    assert attention_oracles.tova_stream(queries, keys, 2, prefill=3).tolist() == [0, 3]
    assert attention_oracles.tova_stream(queries, keys, 4, prefill=3).tolist() == [0, 1, 2, 3]
    # All at once, only the last query counts.
    assert attention_oracles.tova_stream(queries, keys, 2, prefill=4).tolist() == [1, 3]


@pytest.mark.parametrize("pairing", ["half-split", "adjacent"])
@pytest.mark.parametrize("dims", [None, 4])
def test_the_rope_matrix_is_the_rotation(
    attention_oracles: Any, selector_oracles: Any, pairing: str, dims: int | None
) -> None:
    traditional = pairing == "adjacent"
    x = np.random.default_rng(5).standard_normal((1, 8))
    R = attention_oracles.rope_matrix(11, 8, 50.0, traditional=traditional, dims=dims)
    assert R @ x[0] == pytest.approx(selector_oracles.rotate(x, [11], 50.0, traditional=traditional, dims=dims)[0])
    assert np.abs(R @ R.T - np.eye(8)).max() < 1e-12


def test_the_average_rotation_is_no_rotation(attention_oracles: Any) -> None:
    Rbar = attention_oracles.average_rope(10, 2, 3)
    c, s = sum(math.cos(p) for p in (10, 11, 12)) / 3, sum(math.sin(p) for p in (10, 11, 12)) / 3
    assert Rbar == pytest.approx(np.array([[c, -s], [s, c]]))
    assert c * c + s * s < 0.9


def test_expected_attention_by_hand(attention_oracles: Any) -> None:
    # D = 2, one sink, T = 3: queries (1, 0) and (3, 2): mu = (2, 1), Sigma = [[1, 1], [1, 1]]. Position 3 turns by 3.
    queries = np.array([[[50.0, 50], [1, 0], [3, 2]]])
    keys = np.array([[[9.0, 9], [1, 0], [0, 2]]])
    values = np.array([[[9.0, 9], [3, 4], [0, 1]]])
    c, s = math.cos(3), math.sin(3)
    mu = (2 * c - s, 2 * s + c)
    # Sigma' = R (1, 1)' (1, 1) R', so k' Sigma' k = (k . R (1, 1))^2.
    u = (c - s, s + c)
    z = [mu[0] / math.sqrt(2) + u[0] ** 2 / 4, 2 * mu[1] / math.sqrt(2) + (2 * u[1]) ** 2 / 4]
    a = np.exp(z) / np.exp(z).sum()
    options = {"n_future": 1, "n_sink": 1}
    score = attention_oracles.expected_attention_scores
    assert score(queries, keys, values, **options)[0] == pytest.approx(a * [5, 1])
    assert score(queries, keys, values, eps=0.01, **options)[0] == pytest.approx((a + 0.01) * [5, 1])
    assert score(queries, keys, values, value_norm=False, **options)[0] == pytest.approx(a)
    z = [mu[0] / math.sqrt(2), 2 * mu[1] / math.sqrt(2)]
    a = np.exp(z) / np.exp(z).sum()
    assert score(queries, keys, values, covariance=False, **options)[0] == pytest.approx(a * [5, 1])


def test_one_query_and_one_future_position_is_plain_attention(attention_oracles: Any, selector_oracles: Any) -> None:
    rng = np.random.default_rng(6)
    query = rng.standard_normal((4, 1, 8))
    keys, values = rng.standard_normal((2, 9, 8)), rng.standard_normal((2, 9, 8))
    scores = attention_oracles.expected_attention_scores(np.repeat(query, 9, axis=1), keys, values, n_future=1)
    rotated = selector_oracles.rotate(query, [9])
    weights = attention_oracles.causal_attention(rotated, keys[:, 4:])[:, 0].reshape(2, 2, 5).mean(axis=1)
    assert scores == pytest.approx(weights * np.linalg.norm(values[:, 4:], axis=-1))
    double = attention_oracles.expected_attention_scores(np.repeat(query, 9, axis=1), keys, 2 * values, n_future=1)
    assert double == pytest.approx(2 * scores)


def test_expected_attention_averages_the_weights_of_a_group(attention_oracles: Any) -> None:
    rng = np.random.default_rng(7)
    queries, keys, values = (rng.standard_normal((n, 8, 4)) for n in (4, 2, 2))
    score = attention_oracles.expected_attention_scores
    both = score(queries, keys, values, n_future=5, n_sink=2)
    first = score(queries[[0, 2]], keys, values, n_future=5, n_sink=2)
    second = score(queries[[1, 3]], keys, values, n_future=5, n_sink=2)
    assert both == pytest.approx((first + second) / 2)
    with pytest.raises(ValueError, match="after the sinks"):
        score(queries, keys, values, n_sink=8)


def test_the_defaults_of_expected_attention(attention_oracles: Any) -> None:
    rng = np.random.default_rng(8)
    queries, keys, values = (rng.standard_normal((1, 6, 2)) for _ in range(3))
    score = attention_oracles.expected_attention_scores
    explicit = score(
        queries, keys, values, n_future=512, n_sink=4, eps=0.0, covariance=True, value_norm=True, base=10_000.0
    )
    assert np.array_equal(score(queries, keys, values), explicit)
    assert explicit.shape == (1, 2)
