"""B5, SnapKV's rule: blind with an instruction or the prefix's own end, and aware with the question."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.kv import probes
from kvferry.sender.kv.selecting import Subject
from kvferry.sender.kv.snapkv import SnapKV, SnapKVAware, best_rows
from kvferry.sender.kv.window_scores import Scored

TOKENS = 61
QUESTION = "Who keeps the keys of the south warehouse?"
OTHER = "When does the ferry leave, and what does it carry?"


class Case:
    """A model and a prefix that it has read."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any], tokens: int = TOKENS) -> None:
        self.ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, tokens)]
        self.model, self.drain = model, drain
        self.cache = drain(model.prefill(self.ids))

    def keep(self, method: Any, count: int, question: str | None = None, **given: Any) -> list[list[list[int]]]:
        subject = Subject(self.cache, self.model, self.ids, question)
        keep = self.drain(method.rank(subject, registry.check_parameters(method, given)))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2), ("qwen3", 4, 1)], ids=lambda it: it[0])
def case(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Case:
    kind, heads, kv_heads = request.param
    model = tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, layers=2)
    return Case(dataclasses.replace(model, prefill_chunk=20), drain)


def expected_scores(case: Case, asked: Any, oracles: ModuleType, probe: list[int], **given: Any) -> list[Any]:
    """By the formula, from one plain reading of prefix and probe."""
    found = []
    for seen in asked(case.model.model, case.ids + probe):
        keys, own = seen.keys[:, :TOKENS], seen.keys[:, TOKENS:]
        found.append(oracles.snapkv_scores(seen.queries[:, TOKENS:], keys, own, **given))
    return found


@pytest.mark.parametrize("count", [1, 7, 20, 60])
@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, {}),
        ({"pooling": "avg", "kernel": 5, "group_reduction": "max"}, {"pooling": "avg", "kernel": 5, "group": "max"}),
    ],
)
def test_both_keep_what_the_formula_says(
    case: Case,
    asked: Any,
    attention_oracles: ModuleType,
    selector_oracles: ModuleType,
    count: int,
    given: dict[str, Any],
    rule: dict[str, Any],
) -> None:
    for method, question, probe in (
        (SnapKV(), None, probes.instruction_ids(case.model)),
        (SnapKVAware(), QUESTION, case.model.prompt.fresh(QUESTION)),
    ):
        scores = expected_scores(case, asked, attention_oracles, probe, **rule)
        expected = [[selector_oracles.keep(head, count).tolist() for head in layer] for layer in scores]
        assert case.keep(method, count, question, **given) == expected


@pytest.mark.parametrize("window", [1, 8, 32])
def test_the_published_window_is_kept_and_the_rest_by_score(
    case: Case, asked: Any, attention_oracles: ModuleType, selector_oracles: ModuleType, window: int
) -> None:
    """The sum over queries ranks as their mean. Window rows are no candidates, and no neighbours of candidates."""
    edge, count = TOKENS - window, window + 9
    own = list(range(edge, TOKENS))
    expected = []
    for seen in asked(case.model.model, case.ids):
        keys, end = seen.keys[:, :edge], seen.keys[:, edge:]
        scores = attention_oracles.snapkv_scores(seen.queries[:, edge:], keys, end, over="sum")
        expected.append([selector_oracles.keep(head, 9).tolist() + own for head in scores])
    given = {"window": "prompt", "window_tokens": window}
    assert case.keep(SnapKV(), count, query_reduction="sum", **given) == expected
    assert case.keep(SnapKV(), count, **given) == expected


@pytest.mark.parametrize("window", ["instruction", "prompt"])
@pytest.mark.parametrize("chunk", [17, 512])
def test_the_cut_of_the_reading_does_not_matter(case: Case, window: str, chunk: int) -> None:
    """At 17 tokens a pass the prefix is read in three and a half."""
    other = Case(dataclasses.replace(case.model, prefill_chunk=chunk), case.drain)
    given = {"window": window, "window_tokens": 8}
    assert other.keep(SnapKV(), 20, **given) == case.keep(SnapKV(), 20, **given)


@pytest.mark.parametrize("window", ["instruction", "prompt"])
def test_the_blind_method_does_not_know_the_question(case: Case, window: str) -> None:
    kept = [case.keep(SnapKV(), 20, question, window=window, window_tokens=8) for question in (None, QUESTION, OTHER)]
    assert kept[0] == kept[1] == kept[2]


def test_the_aware_method_follows_the_question(case: Case) -> None:
    assert case.keep(SnapKVAware(), 20, QUESTION) != case.keep(SnapKVAware(), 20, OTHER)
    with pytest.raises(InvalidRequestError, match="^question: method B5-aware needs the question"):
        case.keep(SnapKVAware(), 20)


@pytest.mark.parametrize("window", ["instruction", "prompt"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17])
def test_short_prefixes_around_window_and_budget(case: Case, window: str, tokens: int) -> None:
    short = Case(case.model, case.drain, tokens)
    kept = short.keep(SnapKV(), 16, window=window, window_tokens=8)
    for rows in (rows for heads in kept for rows in heads):
        assert len(rows) == min(tokens, 16)
        assert rows == sorted(set(rows))
        assert set(rows) <= set(range(tokens))
        assert window == "instruction" or rows[-8:] == list(range(tokens))[-8:]


@pytest.mark.parametrize("tokens", [16, TOKENS])
def test_a_budget_below_the_published_window_is_refused(case: Case, tokens: int) -> None:
    other, given = Case(case.model, case.drain, tokens), {"window": "prompt", "window_tokens": 16}
    with pytest.raises(InvalidRequestError, match="^budget: 15 rows, but 16 are always kept"):
        other.keep(SnapKV(), 15, **given)
    assert {tuple(rows) for heads in other.keep(SnapKV(), 16, **given) for rows in heads} == {
        tuple(range(tokens - 16, tokens))
    }


def test_a_whole_prefix_of_window_keeps_all_or_nothing(case: Case) -> None:
    short, given = Case(case.model, case.drain, 9), {"window": "prompt", "window_tokens": 32}
    assert short.keep(SnapKV(), 9, **given)[0][0] == list(range(9))
    with pytest.raises(InvalidRequestError, match="^budget: 8 rows, but 9 are always kept"):
        short.keep(SnapKV(), 8, **given)


def test_protected_rows_stand_outside_a_contest_of_equals() -> None:
    scored = Scored([np.ones((2, 10), np.float32)], np.arange(10) >= 7)
    assert [rows.tolist() for rows in best_rows(scored, 5)[0]] == [[0, 1, 7, 8, 9]] * 2


def test_a_cache_of_grouped_heads_stays_one(case: Case, drain: Callable[..., Any]) -> None:
    """Not repeated for every query head, and exactly the budget."""
    from kvferry.engine.residency import Residency
    from kvferry.sender.reading import Reading

    reading = Reading(case.model, Residency(2**30), "The ferry leaves at dawn. " * 20, "", None)
    cache = drain(SnapKV().make(reading, registry.check_parameters(SnapKV(), {"budget": 40}))).cache
    kv_heads = case.model.profile.layers[0].kv_heads
    assert cache.row_counts == [40] * kv_heads * 2
    assert {layer.keys.shape for layer in cache.layers} == {(1, kv_heads, 40, 32)}
    assert cache.offset == len(reading.ids)
