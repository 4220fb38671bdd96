"""AdaKV: SnapKV's scores, rows shared among the heads of a layer, and heads of unequal length in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.model import LoadedModel
from kvferry.engine.ragged import RaggedLayer
from kvferry.engine.residency import Residency
from kvferry.sender import registry
from kvferry.sender.kv.adakv import AdaKV
from kvferry.sender.kv.selecting import Subject
from kvferry.sender.kv.snapkv import SnapKV
from kvferry.sender.reading import Reading

TOKENS, WINDOW, EDGE = 151, 8, 143
TEXT = "The access code of the north warehouse is 4417. The ferry carries eleven crates of paper at dawn. " * 3


class Case:
    """A model and a prefix that it has read."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any], tokens: int = TOKENS) -> None:
        self.ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, tokens)]
        self.model, self.drain = model, drain
        self.subject = Subject(drain(model.prefill(self.ids)), model, self.ids, None)

    def keep(self, count: int, method: Any = None, **given: Any) -> list[list[list[int]]]:
        method = method or AdaKV()
        parameters = registry.check_parameters(method, {"window_tokens": WINDOW, **given})
        keep = self.drain(method.rank(self.subject, parameters))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2)], ids=lambda it: it[0])
def case(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Case:
    kind, heads, kv_heads = request.param
    return Case(tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=16, layers=3), drain)


def test_the_defaults_are_the_published_ones() -> None:
    given: Any = registry.check_parameters(AdaKV(), {})
    assert (given.window_tokens, given.kernel, given.pooling, given.alpha) == (32, 7, "max", 0.2)
    assert (given.query_reduction, given.group_reduction, given.reduction_order) == ("mean", "mean", "group-pool")


@pytest.mark.parametrize("count", [9, 48, 130])
@pytest.mark.parametrize("alpha", [0.2, 0.5])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_the_method_keeps_what_the_rule_says_but_for_the_balance(
    case: Case,
    asked: Any,
    attention_oracles: ModuleType,
    selector_oracles: ModuleType,
    budget_oracles: ModuleType,
    count: int,
    alpha: float,
    group: str,
) -> None:
    kept = case.keep(count, alpha=alpha, group_reduction=group)
    own = list(range(EDGE, TOKENS))
    for heads, seen in zip(kept, asked(case.model.model, case.ids), strict=True):
        scores = attention_oracles.snapkv_scores(
            seen.queries[:, EDGE:], seen.keys[:, :EDGE], seen.keys[:, EDGE:], group=group
        )
        caps = budget_oracles.adakv_caps(scores, count, WINDOW, alpha, ties="row")
        assert sum(len(rows) for rows in heads) == len(heads) * count
        for rows, head, cap in zip(heads, scores, caps, strict=True):
            assert rows[-WINDOW:] == own
            mine = len(rows) - WINDOW
            assert abs(mine - cap) <= 1
            assert rows[:mine] == (selector_oracles.keep(head, mine).tolist() if mine else [])


def test_heads_differ_in_length_and_everything_guaranteed_is_snapkv(case: Case) -> None:
    assert any(len({len(rows) for rows in heads}) > 1 for heads in case.keep(48))
    plain = case.keep(48, SnapKV(), window="prompt")
    assert case.keep(48, alpha=1.0) == plain
    assert case.keep(48, alpha=0) != plain


def test_rows_are_removed_for_real(case: Case, drain: Callable[..., Any]) -> None:
    """No padding: what is held is what is kept, head by head."""
    reading = Reading(case.model, Residency(2**30), TEXT, "", None)
    cache = drain(AdaKV().make(reading, registry.check_parameters(AdaKV(), {"budget": 64}))).cache
    kv_heads = case.model.profile.layers[0].kv_heads
    assert sum(cache.row_counts) == 3 * kv_heads * 64
    assert any(isinstance(layer, RaggedLayer) for layer in cache.layers)
    for layer in cache.layers:
        rows = sum(layer.row_counts)
        assert sum(array.size for array in layer.arrays) == 2 * rows * 16


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17])
def test_short_prefixes_around_window_and_budget(case: Case, tokens: int) -> None:
    kept = Case(case.model, case.drain, tokens).keep(16)
    for heads in kept:
        assert sum(len(rows) for rows in heads) == len(heads) * min(tokens, 16)
        for rows in heads:
            assert rows == sorted(set(rows))
            assert rows[-WINDOW:] == list(range(tokens))[-WINDOW:]


@pytest.mark.parametrize(("tokens", "always"), [(TOKENS, 8), (8, 8), (6, 6)])
def test_a_budget_below_the_window_is_refused(case: Case, tokens: int, always: int) -> None:
    short = Case(case.model, case.drain, tokens)
    with pytest.raises(InvalidRequestError, match=f"^budget: 5 rows, but {always} are always kept"):
        short.keep(5)


def test_the_cut_of_the_reading_does_not_matter(case: Case) -> None:
    other = Case(dataclasses.replace(case.model, prefill_chunk=43), case.drain)
    assert other.keep(48) == case.keep(48)


@pytest.mark.parametrize(("options", "field"), [({"alpha": 1.1}, "alpha"), ({"window": "prompt"}, "window")])
def test_wrong_parameters_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(AdaKV(), options)
