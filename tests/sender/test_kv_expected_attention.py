"""Expected Attention: statistics of plain queries, the rotation that is to come, and the score, by the formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.engine.rope import NO_ROTATION, Rotation, describe
from kvferry.sender import registry
from kvferry.sender.kv.expected_attention import (
    ExpectedAttention,
    ExpectedAttentionParameters,
    QueryStatistics,
    average_rotation,
    expected_attention,
    layer_scores,
)
from kvferry.sender.kv.expected_attention_adakv import ExpectedAttentionAdaKV
from kvferry.sender.kv.selecting import Subject

Array = np.ndarray[Any, Any]
# Query heads, KV heads, head dimension.
SHAPES = [(9, 3, 64), (14, 2, 32), (4, 4, 128), (2, 1, 256)]
TOKENS = 61


def draw(shape: tuple[int, ...], seed: int, drift: float = 0.5) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + drift * rng.standard_normal(shape[-1])).astype(np.float32)


def rotation(dims: int, *, traditional: bool = False) -> Rotation:
    found = describe(nn.RoPE(dims, traditional=traditional, base=1e4))
    assert found is not None
    return found


def statistics(queries: Array, pieces: int = 1) -> QueryStatistics:
    gathered = QueryStatistics(queries.shape[0], queries.shape[2])
    for piece in np.array_split(queries, pieces, axis=1):
        gathered.add(mx.array(piece))
    return gathered


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_statistics_are_mean_and_biased_covariance(pieces: int, scale: float, attention_oracles: ModuleType) -> None:
    """Also with a mean far from zero, as outlier channels have it."""
    queries = draw((3, 50, 32), 1, drift=scale)
    mean, covariance = statistics(queries, pieces).moments()
    for head in range(3):
        mu, sigma = attention_oracles.query_statistics(queries[head], 0)
        assert np.abs(mean[head] - mu).max() < 1e-9 * scale
        assert np.abs(covariance[head] - sigma).max() < 1e-8
    # Divided by N, not by N - 1.
    assert np.abs(covariance[0] - np.cov(queries[0].T.astype(np.float64), ddof=1)).max() > 1e-3


SETTINGS: list[dict[str, Any]] = [{"dims": 32}, {"dims": 32, "traditional": True}, {"dims": 8}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (61, 1), (61, 100), (700, 64), (700, 65)])
def test_the_average_rotation_is_the_mean_of_the_matrices(
    settings: dict[str, Any], start: int, count: int, attention_oracles: ModuleType
) -> None:
    found = average_rotation(rotation(**settings), 32, start, count)
    expected = attention_oracles.average_rope(start, 32, count, **settings)
    assert np.abs(found - expected).max() < 1e-4
    if count > 1:
        # A mean of rotations is none.
        assert np.abs(found @ found.T - np.eye(32)).max() > 0.1


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope"])
def test_scaled_rotations_are_what_the_module_does(kind: str) -> None:
    """The matrix at one position times a vector is the module's output, its magnitude applied once."""
    scaling: dict[str, dict[str, Any]] = {
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "longrope": {
            "type": "longrope",
            "long_factor": [2.0, 1.5] * 4,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 64,
        },
    }
    module = initialize_rope(16, 1e4, traditional=False, scaling_config=scaling[kind], max_position_embeddings=512)
    found = describe(module)
    assert found is not None
    vector = draw((16,), 3)
    turned = np.array(module(mx.array(vector)[None, None, None], offset=90))[0, 0, 0]
    assert np.abs(average_rotation(found, 16, 90, 1) @ vector - turned).max() < 1e-5
    assert (np.linalg.norm(turned) > 1.04 * np.linalg.norm(vector)) is (np.bool_(kind != "llama3"))


def test_without_rotation_the_average_is_the_identity() -> None:
    assert np.array_equal(average_rotation(Rotation(NO_ROTATION, None), 8, 5, 512), np.eye(8))


def scores_of(queries: Array, keys: Array, values: Array, turn: Rotation, given: ExpectedAttentionParameters) -> Array:
    gathered = statistics(queries[:, given.sinks :], 3)
    average = average_rotation(turn, keys.shape[2], keys.shape[1], given.future)
    return layer_scores(DenseLayer(mx.array(keys)[None], mx.array(values)[None]), gathered, average, given)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"epsilon": 1e-2},
    {"covariance": False},
    {"value_norm": False},
    {"sinks": 0},
    {"sinks": 7, "future": 3},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_scores_are_those_of_the_formula(
    shape: tuple[int, int, int], options: dict[str, Any], attention_oracles: ModuleType
) -> None:
    heads, kv_heads, width = shape
    given = ExpectedAttentionParameters(**({"future": 12} | options))
    queries = draw((heads, 26, width), 1)
    keys, values = draw((kv_heads, 26, width), 2), draw((kv_heads, 26, width), 3)
    found = scores_of(queries, keys, values, rotation(width), given)
    expected = attention_oracles.expected_attention_scores(
        queries,
        keys,
        values,
        n_future=given.future,
        n_sink=given.sinks,
        eps=given.epsilon,
        covariance=given.covariance,
        value_norm=given.value_norm,
    )
    assert found.dtype == np.float32
    assert (found[:, : given.sinks] == 0).all()
    assert np.abs(found[:, given.sinks :] - expected).max() < 1e-5 * expected.max()


def test_the_default_looks_512_positions_ahead(attention_oracles: ModuleType) -> None:
    queries, keys, values = (draw((2, 20, 16), seed) for seed in range(3))
    found = scores_of(queries, keys, values, rotation(16), ExpectedAttentionParameters())
    expected = attention_oracles.expected_attention_scores(queries, keys, values)
    assert np.abs(found[:, 4:] - expected).max() < 1e-5 * expected.max()


def test_equal_queries_and_one_position_reduce_to_attention(selector_oracles: ModuleType) -> None:
    """softmax(q.k / sqrt(D)) * ||v||, with the query where the next token would be."""
    query, keys, values = draw((1, 1, 64), 1), draw((1, 30, 64), 2), draw((1, 30, 64), 3)
    given = ExpectedAttentionParameters(future=1)
    found = scores_of(np.tile(query, (1, 30, 1)), keys, values, rotation(64), given)[0, 4:]
    turned = selector_oracles.rotate(query[0], np.array([30]))[0]
    logits = keys[0, 4:].astype(np.float64) @ turned / 8
    weights = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(found - weights * np.linalg.norm(values[0, 4:], axis=1)).max() < 1e-5


def test_doubling_a_value_doubles_its_score() -> None:
    queries, keys, values = (draw((2, 20, 16), seed) for seed in range(3))
    given = ExpectedAttentionParameters()
    twice = values.copy()
    twice[:, 9] *= 2
    one, two = (scores_of(queries, keys, each, rotation(16), given) for each in (values, twice))
    assert np.allclose(two[:, 9], 2 * one[:, 9], rtol=1e-6)
    assert np.array_equal(np.delete(two, 9, axis=1), np.delete(one, 9, axis=1))


def test_logits_in_the_thousands_stay_finite() -> None:
    """Keys with outlier channels make them; the largest takes everything."""
    queries, keys, values = (draw((2, 20, 16), seed, drift=40.0) for seed in range(3))
    found = scores_of(queries, keys, values, rotation(16), ExpectedAttentionParameters(value_norm=False))
    assert np.isfinite(found).all()
    assert np.allclose(found.sum(axis=1), 1.0)


def test_the_share_of_a_row_is_the_mean_over_its_query_heads() -> None:
    mean, keys = draw((5, 16), 1).astype(np.float64), draw((12, 16), 2).astype(np.float64)
    together = expected_attention(mean, None, keys)
    alone = [expected_attention(mean[head : head + 1], None, keys) for head in range(5)]
    assert np.allclose(together, np.mean(alone, axis=0))
    assert together.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("where", ["keys", "values", "queries"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(where: str, bad: float) -> None:
    arrays = {name: draw((2, 20, 16), seed) for seed, name in enumerate(("queries", "keys", "values"))}
    arrays[where][1, 9, 3] = bad
    with pytest.raises(ModelError, match="^expected-attention: a score is not finite"):
        scores_of(**arrays, turn=rotation(16), given=ExpectedAttentionParameters(value_norm=False))


class Case:
    """A model, a prefix that it has read, and its scores [Hk, T - sinks] a layer by the formula."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any]) -> None:
        self.ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, TOKENS)]
        self.model, self.drain = model, drain
        self.subject = Subject(drain(model.prefill(self.ids)), model, self.ids, None)

    def scores(self, asked: Any, oracles: ModuleType, **given: Any) -> list[Array]:
        expected = []
        for layer, seen in zip(self.subject.layers, asked(self.model.model, self.ids), strict=True):
            keys, values = np.array(layer.keys[0]), np.array(layer.values[0])
            base = self.model.rotations[0].rope.base
            expected.append(oracles.expected_attention_scores(seen.plain, keys, values, base=base, n_future=9, **given))
        return expected

    def keep(self, method: Any, count: int, **given: Any) -> list[list[list[int]]]:
        parameters = registry.check_parameters(method, {"future": 9, **given})
        keep = self.drain(method.rank(self.subject, parameters))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2), ("qwen3", 4, 1)], ids=lambda it: it[0])
def case(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Case:
    kind, heads, kv_heads = request.param
    model = tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, layers=2)
    return Case(dataclasses.replace(model, prefill_chunk=20), drain)


@pytest.mark.parametrize("epsilon", [0.0, 0.01])
def test_the_method_keeps_what_the_formula_says(
    case: Case, asked: Any, attention_oracles: ModuleType, selector_oracles: ModuleType, epsilon: float
) -> None:
    """With the model's own queries before rotation, recorded as its rotary modules get them."""
    scores = case.scores(asked, attention_oracles, eps=epsilon)
    for count in (4, 5, 20, 60):
        expected = [
            [[0, 1, 2, 3, *(4 + selector_oracles.keep(head, count - 4)).tolist()] for head in layer]
            if count > 4
            else [[0, 1, 2, 3]] * len(layer)
            for layer in scores
        ]
        assert case.keep(ExpectedAttention(), count, epsilon=epsilon) == expected


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_the_cut_of_the_reading_does_not_matter(case: Case, chunk: int) -> None:
    """Also when the sinks end within a chunk, or at its end."""
    other = Case(dataclasses.replace(case.model, prefill_chunk=chunk), case.drain)
    assert other.keep(ExpectedAttention(), 20) == case.keep(ExpectedAttention(), 20)


def test_progress_follows_the_second_reading_and_the_layers(case: Case) -> None:
    steps = list(ExpectedAttention().rank(case.subject, registry.check_parameters(ExpectedAttention(), {})))
    assert {step.stage for step in steps} == {"method"}
    assert [(step.done, step.total) for step in steps] == [
        *((done, TOKENS) for done in (20, 40, 60, TOKENS)),
        (1, 2),
        (2, 2),
    ]


@pytest.mark.parametrize("method", [ExpectedAttention(), ExpectedAttentionAdaKV()])
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_prefix_of_sinks_alone_has_no_statistics(case: Case, method: Any, tokens: int) -> None:
    ids = case.ids[:tokens]
    subject = Subject(case.drain(case.model.prefill(ids)), case.model, ids, None)
    given = registry.check_parameters(method, {})
    with pytest.raises(InvalidRequestError, match=f"^sinks: 4, but the prefix has {tokens} tokens"):
        case.drain(method.rank(subject, given))


def test_one_row_behind_the_sinks_is_enough(case: Case) -> None:
    ids = case.ids[:5]
    subject = Subject(case.drain(case.model.prefill(ids)), case.model, ids, None)
    keep = case.drain(ExpectedAttention().rank(subject, registry.check_parameters(ExpectedAttention(), {})))
    assert all(rows.tolist() == [0, 1, 2, 3] for heads in keep(4) for rows in heads)
    assert all(rows.tolist() == [0, 1, 2, 3, 4] for heads in keep(5) for rows in heads)


@pytest.mark.parametrize("method", [ExpectedAttention(), ExpectedAttentionAdaKV()])
def test_a_budget_below_the_sinks_is_refused(case: Case, method: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^budget: 3 rows, but 4 are always kept"):
        case.keep(method, 3)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"sinks": -1}, "sinks"),
        ({"future": 0}, "future"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"covariance": "x"}, "covariance"),
        ({"alpha": 0.5}, "alpha"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(ExpectedAttention(), given)


def test_the_variant_with_budgets_has_the_leaderboards_defaults() -> None:
    given: Any = registry.check_parameters(ExpectedAttentionAdaKV(), {})
    assert (given.epsilon, given.alpha, given.sinks, given.future) == (0.01, 0.2, 4, 512)
    plain: Any = registry.check_parameters(ExpectedAttention(), {})
    assert (plain.epsilon, plain.sinks, plain.future, plain.covariance, plain.value_norm) == (0.0, 4, 512, True, True)


def test_with_everything_guaranteed_heads_keep_as_many_as_without_budgets(case: Case) -> None:
    expected = case.keep(ExpectedAttention(), 20, epsilon=0.01)
    assert case.keep(ExpectedAttentionAdaKV(), 20, alpha=1.0) == expected


@pytest.mark.parametrize("count", [4, 5, 20, 60, 61, 100])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_budgets_share_a_layers_rows_among_its_heads(
    case: Case, asked: Any, attention_oracles: ModuleType, selector_oracles: ModuleType, count: int, alpha: float
) -> None:
    """Whatever a head's budget, it keeps the sinks and its own best rows by the formula."""
    kept = case.keep(ExpectedAttentionAdaKV(), count, alpha=alpha)
    scores = case.scores(asked, attention_oracles, eps=0.01)
    for heads, layer in zip(kept, scores, strict=True):
        assert sum(len(rows) for rows in heads) == len(heads) * min(count, TOKENS)
        for rows, head in zip(heads, layer, strict=True):
            assert rows[:4] == [0, 1, 2, 3]
            if len(rows) > 4:
                assert rows[4:] == (4 + selector_oracles.keep(head, len(rows) - 4)).tolist()


def test_heads_that_concentrate_get_more(case: Case) -> None:
    counts = [len(rows) for heads in case.keep(ExpectedAttentionAdaKV(), 20, alpha=0.0) for rows in heads]
    assert (len(set(counts)) > 1) is (case.subject.layers[0].kv_heads > 1)
