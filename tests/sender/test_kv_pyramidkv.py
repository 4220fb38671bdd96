"""B6, PyramidKV: the published budgets to the row, B5's scores within a layer, layers of unequal length in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.kv.pyramidkv import PyramidKV, PyramidKVAware, pyramid_budgets, pyramid_rows
from kvferry.sender.kv.selecting import Subject
from kvferry.sender.kv.snapkv import SnapKV, SnapKVAware
from kvferry.sender.kv.window_scores import Scored

TOKENS = 151
QUESTION = "Who keeps the keys of the south warehouse?"
# Capacity, W, L; keep[0], keep[L - 1] and the mean of all rows, as published.
GOLDEN = [
    (128, 8, 28, 234, 18, 134.0),
    (512, 8, 28, 983, 38, 518.5),
    (64, 32, 28, 63, 9, 68.0),
    (64, 8, 28, 110, 2, 64.0),
    (1024, 32, 32, 1935, 75, 1037.0),
    (2048, 8, 32, 3978, 103, 2048.5),
]


@pytest.mark.parametrize(("capacity", "window", "layers", "bottom", "top", "mean"), GOLDEN)
def test_the_published_budgets(capacity: int, window: int, layers: int, bottom: int, top: int, mean: float) -> None:
    rows = pyramid_budgets(100_000, capacity, window, layers)
    assert (rows[0] - window, rows[-1] - window, len(rows)) == (bottom, top, layers)
    assert sum(rows) / layers == mean


def test_the_rules_branches() -> None:
    def rows(tokens: int) -> list[int]:
        return pyramid_budgets(tokens, 512, 32, 28)

    assert rows(20) == [20] * 28
    assert rows(511) == [511] * 28
    assert rows(512) == [512] * 28
    assert rows(959) == [512] * 28
    assert [rows(tokens)[0] for tokens in (960, 967, 968, 969)] == [960, 967, 968, 968]
    # At 960: most 928, least 32, step 896 // 27 = 33.
    assert rows(960) == [960 - 33 * layer for layer in range(28)]


def test_one_layer_gets_the_capacity_and_two_get_the_ends() -> None:
    assert pyramid_budgets(9999, 512, 32, 1) == [512]
    assert pyramid_budgets(9999, 512, 32, 2) == [936 + 32, 24 + 32]


def test_without_a_window_in_the_prefix_the_whole_budget_is_scored() -> None:
    assert pyramid_budgets(1000, 100, 0, 3) == [195, 100, 5]
    assert pyramid_budgets(200, 100, 0, 3) == [195, 100, 5]
    assert pyramid_budgets(199, 100, 0, 3) == [100, 100, 100]
    assert pyramid_budgets(195, 98, 0, 3) == [98, 98, 98]
    # From 2 C on, until there are more rows than the bottom layer may have, it keeps all.
    assert pyramid_budgets(40, 20, 0, 3) == [39, 20, 1]
    assert pyramid_budgets(40, 20, 0, 3, beta=50) == [40, 20, 1]


def test_every_layer_keeps_a_row_where_the_rule_leaves_none() -> None:
    assert pyramid_budgets(1000, 10, 0, 3) == [20, 10, 1]
    assert pyramid_budgets(1000, 1, 0, 3) == [2, 1, 1]
    # Two more rows than layers: no step, and twice the budget. What is kept is what is reported.
    assert pyramid_budgets(1000, 14, 0, 30) == [28] * 30


@pytest.mark.parametrize("tokens", [33, 1000])
def test_a_capacity_below_the_window_is_refused(tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="^budget: 31 rows, but 0 sinks and 32 recent rows are always kept"):
        pyramid_budgets(tokens, 31, 32, 28)
    assert pyramid_budgets(tokens, 32, 32, 28) == [32] * 28
    assert pyramid_budgets(31, 31, 32, 28) == [31] * 28


@given(
    tokens=st.integers(1, 3000),
    capacity=st.integers(1, 1200),
    window=st.integers(0, 40),
    layers=st.integers(1, 40),
    beta=st.integers(1, 40),
)
def test_budgets_are_the_independent_ones(
    budget_oracles: ModuleType, tokens: int, capacity: int, window: int, layers: int, beta: int
) -> None:
    if capacity < window and capacity < tokens:
        with pytest.raises(InvalidRequestError, match="^budget: "):
            pyramid_budgets(tokens, capacity, window, layers, beta)
        return
    rows = pyramid_budgets(tokens, capacity, window, layers, beta)
    if capacity < window:
        # Not a capacity that the rule has; but nothing has to go.
        assert rows == [tokens] * layers
        return
    expected = budget_oracles.pyramid_rows(tokens, capacity, window, layers, beta)
    assert rows == [max(count, 1) for count in expected]
    assert rows == sorted(rows, reverse=True)
    assert 1 <= rows[-1] <= rows[0] <= tokens


def test_each_layer_keeps_its_own_best_rows() -> None:
    rising = np.tile(np.arange(100, dtype=np.float32), (2, 1))
    scored = Scored([rising, -rising, np.zeros_like(rising)], np.zeros(100, dtype=np.bool_))
    kept = pyramid_rows(scored, 20, 20)
    assert [heads[0].tolist() for heads in kept] == [list(range(61, 100)), list(range(20)), [0]]
    assert all(np.array_equal(*heads) for heads in kept)


class Case:
    """A model and a prefix that it has read."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any], tokens: int = TOKENS) -> None:
        self.ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, tokens)]
        self.model, self.drain = model, drain
        self.cache: PrefixCache = drain(model.prefill(self.ids))

    def keep(self, method: Any, count: int, question: str | None = None, **given: Any) -> list[list[list[int]]]:
        subject = Subject(self.cache, self.model, self.ids, question)
        keep = self.drain(method.rank(subject, registry.check_parameters(method, given)))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]

    def selected(self, kept: list[list[list[int]]]) -> PrefixCache:
        return self.cache.select([[mx.array(rows, dtype=mx.int32) for rows in heads] for heads in kept])


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2)], ids=lambda it: it[0])
def case(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Case:
    kind, heads, kv_heads = request.param
    return Case(tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=16, layers=4), drain)


@pytest.mark.parametrize(
    ("question", "given", "window"),
    [(None, {}, 0), (QUESTION, {}, 0), (None, {"window": "prompt", "window_tokens": 8}, 8)],
)
def test_a_layer_keeps_what_b5_would_with_its_budget(
    case: Case, question: str | None, given: dict[str, Any], window: int
) -> None:
    pyramid, plain = (PyramidKVAware(), SnapKVAware()) if question else (PyramidKV(), SnapKV())
    budgets = pyramid_budgets(TOKENS, 48, window, 4)
    assert len(set(budgets)) == 4
    kept = case.keep(pyramid, 48, question, **given)
    for layer, count in enumerate(budgets):
        assert kept[layer] == case.keep(plain, count, question, **given)[layer]


def test_blind_and_aware_keep_as_many_rows(case: Case) -> None:
    counts = [
        [len(heads[0]) for heads in case.keep(method, 48, question)]
        for method, question in ((PyramidKV(), None), (PyramidKVAware(), QUESTION), (PyramidKVAware(), QUESTION * 5))
    ]
    assert counts[0] == counts[1] == counts[2]


def test_the_aware_method_needs_and_follows_the_question(case: Case) -> None:
    other = "When does the ferry leave, and what does it carry?"
    assert case.keep(PyramidKVAware(), 48, QUESTION) != case.keep(PyramidKVAware(), 48, other)
    assert case.keep(PyramidKV(), 48, QUESTION) == case.keep(PyramidKV(), 48, other)
    with pytest.raises(InvalidRequestError, match="^question: method B6-aware needs the question"):
        case.keep(PyramidKVAware(), 48)


def test_beta_of_one_is_snapkv(case: Case) -> None:
    assert case.keep(PyramidKV(), 48, beta=1) == case.keep(SnapKV(), 48)


def test_one_pass_over_unequal_layers_equals_token_by_token(case: Case) -> None:
    """And the rule's layers do differ in length, so that a mask of one length would not fit."""
    kept = case.keep(PyramidKV(), 48)
    assert len({len(heads[0]) for heads in kept}) == 4
    cache, fresh = case.selected(kept), case.model.prompt.fresh(QUESTION)
    at_once = np.array(case.model.forward(fresh, cache.branch(len(fresh))))
    branches = cache.branch(len(fresh))
    singly = np.concatenate([np.array(case.model.forward([token], branches)) for token in fresh])
    assert np.abs(at_once - singly).max() <= 1e-5 * np.abs(at_once).max()


def test_a_question_is_one_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, fresh = case.selected(case.keep(PyramidKV(), 48)), case.model.prompt.fresh(QUESTION)
    seen = []
    inner = type(case.model.model).__call__

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(args[0].shape)
        return inner(self, *args, **options)

    monkeypatch.setattr(type(case.model.model), "__call__", counted)
    mx.eval(case.model.forward(fresh, cache.branch(len(fresh))))
    assert seen == [(1, len(fresh))]


@pytest.mark.parametrize("window", ["instruction", "prompt"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_short_prefixes_around_window_and_budget(case: Case, window: str, tokens: int) -> None:
    short = Case(case.model, case.drain, tokens)
    kept = short.keep(PyramidKV(), 16, window=window, window_tokens=8)
    for rows in (rows for heads in kept for rows in heads):
        assert 1 <= len(rows) <= tokens
        assert rows == sorted(set(rows))
        assert window == "instruction" or rows[-8:] == list(range(tokens))[-8:]
    if tokens <= 16:
        assert {len(rows) for heads in kept for rows in heads} == {tokens}


def test_a_model_of_one_layer(tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> None:
    single = Case(tiny_model("llama", layers=1), drain)
    for window in ("instruction", "prompt"):
        given = {"window": window, "window_tokens": 8}
        assert single.keep(PyramidKV(), 48, **given) == single.keep(SnapKV(), 48, **given)


@pytest.mark.parametrize("method", [PyramidKV(), PyramidKVAware()])
@pytest.mark.parametrize(("options", "field"), [({"beta": 0}, "beta"), ({"kernel": 2}, "kernel")])
def test_wrong_parameters_are_refused_by_name(method: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(method, options)


def test_the_cut_of_the_reading_does_not_matter(case: Case) -> None:
    other = Case(dataclasses.replace(case.model, prefill_chunk=43), case.drain)
    assert other.keep(PyramidKV(), 48) == case.keep(PyramidKV(), 48)
