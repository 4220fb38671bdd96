"""H2O: attention summed over every query so far, half the budget for who drew most of it, half for the last rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.kv import h2o
from kvferry.sender.kv.h2o import H2O, attention_columns, h2o_rows
from kvferry.sender.kv.selecting import Subject

Array = np.ndarray[Any, Any]
# Query heads, KV heads, head dimension.
SHAPES = [(9, 3, 64), (14, 2, 32), (4, 4, 128), (6, 2, 256)]
TOKENS = 61


def draw(heads: int, rows: int, width: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((heads, rows, width)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 13, 30])
def test_columns_are_sums_of_causal_attention(
    shape: tuple[int, int, int], tokens: int, attention_oracles: ModuleType
) -> None:
    heads, kv_heads, width = shape
    queries, keys = 2 * draw(heads, tokens, width, 1), draw(kv_heads, 30, width, 2)
    expected = attention_oracles.column_sums(attention_oracles.causal_attention(queries, keys), kv_heads)
    found = attention_columns(mx.array(queries), mx.array(keys))
    assert np.abs(found - expected).max() < 1e-5 * expected.max()
    # Every query spends 1, whatever it sees.
    assert found.sum(axis=1) == pytest.approx(heads // kv_heads * tokens)


@pytest.mark.parametrize("weights", [1, 9 * 30 * 4, 9 * 30 * 7])
def test_queries_come_in_blocks_that_memory_holds(weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = mx.array(draw(9, 30, 64, 1)), mx.array(draw(3, 30, 64, 2))
    whole = attention_columns(queries, keys)
    sizes = []
    plain = h2o.causal_softmax

    def watched(scores: mx.array, tokens: int) -> mx.array:
        sizes.append(scores.size)
        return plain(scores, tokens)

    monkeypatch.setattr(h2o, "causal_softmax", watched)
    monkeypatch.setattr(h2o, "_WEIGHTS_AT_ONCE", weights)
    assert np.abs(attention_columns(queries, keys) - whole).max() < 1e-5
    assert max(sizes) <= max(weights, 9 * 30)
    assert len(sizes) == -(-30 // max(weights // (9 * 30), 1))


def test_sums_are_not_divided_by_how_many_queries_saw_a_row(attention_oracles: ModuleType) -> None:
    """Row 0 gets 0.2 from 50 queries, row 40 gets 0.5 from the last 10."""
    sums = np.zeros((1, 50), dtype=np.float32)
    sums[0, 0], sums[0, 40] = 50 * 0.2, 10 * 0.5
    assert [rows.tolist() for rows in h2o_rows(sums, 1, 4)] == [[0, 46, 47, 48, 49]]
    divided = attention_oracles.normalised_h2o_scores(sums).astype(np.float32)
    assert [rows.tolist() for rows in h2o_rows(divided, 1, 4)] == [[40, 46, 47, 48, 49]]


def test_recent_rows_take_no_part_in_the_contest(attention_oracles: ModuleType) -> None:
    scores = np.random.default_rng(4).random((3, 40)).astype(np.float32)
    scores[:, -5:] = 100.0
    for heavy, recent in ((5, 5), (1, 5), (7, 1), (0, 9), (9, 0), (20, 20), (39, 0)):
        expected = [attention_oracles.h2o_rows(head, heavy, recent).tolist() for head in scores]
        assert [rows.tolist() for rows in h2o_rows(scores, heavy, recent)] == expected


def test_equal_scores_go_to_the_lower_rows() -> None:
    assert [rows.tolist() for rows in h2o_rows(np.ones((2, 20), dtype=np.float32), 3, 2)] == [[0, 1, 2, 18, 19]] * 2


def official_mask(sums: Array, heavy: int, recent: int) -> list[int]:
    """``utils_hh``, one head: which of T rows the next token sees. The mask has its column too, the last one."""
    mask = np.ones(len(sums) + 1)
    if len(sums) > heavy + recent:
        mask[:-recent] = 0
        order = sorted(range(len(sums) - recent), key=lambda row: (-sums[row], row))
        mask[order[:heavy]] = 1
    return [int(row) for row in np.flatnonzero(mask[:-1])]


@pytest.mark.parametrize(("heavy", "recent"), [(5, 5), (1, 1), (4, 9), (20, 20)])
def test_variant_hh_sees_what_the_official_mask_leaves(heavy: int, recent: int) -> None:
    scores = np.random.default_rng(5).random((3, 40)).astype(np.float32)
    found = [rows.tolist() for rows in h2o_rows(scores, heavy, recent, coming=1)]
    assert found == [official_mask(head, heavy, recent) for head in scores]
    # The variant that drops rows keeps one more: there, the next token is not one of the recent rows.
    dropped = h2o_rows(scores, heavy, recent)
    assert all(len(rows) == len(masked) + (heavy + recent < 40) for rows, masked in zip(dropped, found, strict=True))


class Case:
    """A model, a prefix that it has read, and its attention sums [Hk, T] a layer by the formula."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any], asked: Any, oracles: ModuleType) -> None:
        self.ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, TOKENS)]
        self.model, self.drain = model, drain
        self.subject = Subject(drain(model.prefill(self.ids)), model, self.ids, None)
        self.sums = [oracles.h2o_scores(layer.queries, layer.keys) for layer in asked(model.model, self.ids)]

    def keep(self, count: int, **given: Any) -> list[list[list[int]]]:
        keep = self.drain(H2O().rank(self.subject, registry.check_parameters(H2O(), given)))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2), ("qwen3", 4, 1)], ids=lambda it: it[0])
def case(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., LoadedModel],
    drain: Callable[..., Any],
    asked: Any,
    attention_oracles: ModuleType,
) -> Case:
    kind, heads, kv_heads = request.param
    model = tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, layers=2)
    return Case(dataclasses.replace(model, prefill_chunk=20), drain, asked, attention_oracles)


@pytest.mark.parametrize(
    ("count", "given", "heavy", "recent"),
    [
        (20, {}, 10, 10),
        (21, {}, 11, 10),
        (20, {"recent": 0.25}, 15, 5),
        (20, {"recent": 4}, 16, 4),
        (20, {"recent": 0}, 20, 0),
        (20, {"recent": 20}, 0, 20),
        (20, {"recent": 1.0}, 0, 20),
        (1, {}, 1, 0),
        (60, {}, 30, 30),
    ],
)
def test_the_method_keeps_what_the_formula_says(
    case: Case, count: int, given: dict[str, Any], heavy: int, recent: int, attention_oracles: ModuleType
) -> None:
    expected = [[attention_oracles.h2o_rows(head, heavy, recent).tolist() for head in layer] for layer in case.sums]
    assert case.keep(count, **given) == expected
    assert {len(rows) for heads in expected for rows in heads} == {count}


def test_variant_hh_rounds_both_parts_down(case: Case) -> None:
    expected = [[official_mask(head, 6, 6) for head in layer] for layer in case.sums]
    assert case.keep(13, variant="hh") == expected
    assert case.keep(12, variant="hh") == expected
    assert case.keep(12) != expected


@pytest.mark.parametrize("tokens", range(10, 400, 7))
def test_variant_hh_at_a_fifth_has_the_official_budgets(tokens: int) -> None:
    """int(0.1 T) heavy rows and as many recent ones, the next token's among them."""
    given = msgspec.convert({"variant": "hh", "budget": 0.2}, h2o.H2OParameters)
    count = int(tokens * 0.2)
    assert h2o._split(count, tokens, given) == (int(0.1 * tokens), int(0.1 * tokens), 1)


@pytest.mark.parametrize("chunk", [1, 13, 512])
def test_the_cut_of_the_reading_does_not_matter(case: Case, chunk: int) -> None:
    subject = dataclasses.replace(case.subject, model=dataclasses.replace(case.model, prefill_chunk=chunk))
    keep = case.drain(H2O().rank(subject, registry.check_parameters(H2O(), {})))
    assert [[rows.tolist() for rows in heads] for heads in keep(20)] == case.keep(20)


def test_the_second_reading_shows_as_progress_of_the_method(case: Case) -> None:
    steps = list(H2O().rank(case.subject, registry.check_parameters(H2O(), {})))
    assert [(step.stage, step.done, step.total) for step in steps] == [
        ("method", done, TOKENS) for done in (20, 40, 60, TOKENS)
    ]


@pytest.mark.parametrize("count", [TOKENS, TOKENS + 1, 1000])
@pytest.mark.parametrize("given", [{}, {"variant": "hh"}, {"recent": 3}, {"recent": 500}])
def test_a_budget_for_all_keeps_all(case: Case, count: int, given: dict[str, Any]) -> None:
    assert all(rows == list(range(TOKENS)) for heads in case.keep(count, **given) for rows in heads)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_prefixes(case: Case, tokens: int) -> None:
    ids = case.ids[:tokens]
    subject = Subject(case.drain(case.model.prefill(ids)), case.model, ids, None)
    keep = case.drain(H2O().rank(subject, registry.check_parameters(H2O(), {})))
    for count in range(1, tokens + 1):
        assert {len(rows) for heads in keep(count) for rows in heads} == {count}


def test_renumbered_rows_answer_as_if_they_were_all(
    tiny_model: Callable[..., LoadedModel], workshop: Callable[..., Any], drain: Callable[..., Any]
) -> None:
    """In a model of one layer and one KV head a row depends on its token and position only."""
    model = tiny_model("llama", layers=1, heads=4, kv_heads=1)
    reading = workshop(model).reading("The ferry leaves at dawn and returns when the tide allows it. " * 4)

    def make(**given: Any) -> PrefixCache:
        cache: PrefixCache = drain(H2O().make(reading, registry.check_parameters(H2O(), {"budget": 24, **given}))).cache
        return cache

    plain, moved = make(), make(renumber=True)
    layer = plain.layers[0]
    assert isinstance(layer, DenseLayer)
    rows = [int(row) for row in np.array(layer.positions)[0]]
    assert rows[-12:] == list(range(len(reading.ids) - 12, len(reading.ids)))
    assert rows[11] < len(reading.ids) - 13
    assert (plain.offset, moved.offset) == (len(reading.ids), 24)
    fresh = model.prompt.fresh("Who?")
    expected = np.array(model.forward(fresh, drain(model.prefill([reading.ids[row] for row in rows])).branch(40)))
    assert np.abs(np.array(model.forward(fresh, moved.branch(40))) - expected).max() < 2e-5 * np.abs(expected).max()
    assert np.abs(np.array(model.forward(fresh, plain.branch(40))) - expected).max() > 1e-3 * np.abs(expected).max()


def test_the_variant_that_looks_ahead_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequestError, match="^variant: lm_eval sums the attention of queries that are yet to"):
        registry.check_parameters(H2O(), {"variant": "lm_eval"})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"recent": -1}, "recent"),
        ({"recent": 1.5}, "recent"),
        ({"variant": "none"}, "variant"),
        ({"renumber": 2}, "renumber"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(H2O(), given)


def test_a_budget_below_the_recent_rows_is_refused(case: Case) -> None:
    with pytest.raises(InvalidRequestError, match="^budget: 20 rows, but 0 sinks and 21 recent rows"):
        case.keep(20, recent=21)


def test_variant_hh_must_keep_a_row(case: Case) -> None:
    with pytest.raises(InvalidRequestError, match="^budget: 1 rows, of which variant hh keeps none"):
        case.keep(1, variant="hh")
    assert {len(rows) for heads in case.keep(2, variant="hh") for rows in heads} == {1}


def test_attention_that_is_not_finite_is_refused(
    tiny_model_dir: Callable[..., Any], drain: Callable[..., Any], tmp_path: Any
) -> None:
    import shutil

    from kvferry.engine.model import load

    shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")
    model = load(str(tmp_path / "model"))
    cache = drain(model.prefill([1, 2, 3, 4]))
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = mx.full(projection.weight.shape, float("nan"))
    subject = Subject(cache, model, [1, 2, 3, 4], None)
    with pytest.raises(ModelError, match="^h2o: a score is not finite"):
        drain(H2O().rank(subject, registry.check_parameters(H2O(), {})))
