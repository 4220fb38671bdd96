"""TOVA: the last token's attention, averaged over all heads, decides for all KV heads alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.model import LoadedModel
from kvferry.engine.selection import top_rows
from kvferry.sender import registry
from kvferry.sender.kv.selecting import Subject
from kvferry.sender.kv.tova import Tova, tova_scores

Array = np.ndarray[Any, Any]
SHAPES = [(9, 3, 64), (14, 2, 32), (4, 4, 128), (6, 2, 256)]
TOKENS = 61


def draw(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 50])
def test_scores_are_the_independent_ones(shape: tuple[int, int, int], rows: int, attention_oracles: ModuleType) -> None:
    heads, kv_heads, width = shape
    query, keys = 2 * draw(heads, width, seed=1), draw(kv_heads, rows, width, seed=2)
    found = tova_scores(query, keys)
    assert found.dtype == np.float32
    assert found == pytest.approx(attention_oracles.tova_scores(query, keys), rel=1e-4)
    assert found.sum() == pytest.approx(1.0)


def test_weights_are_averaged_not_logits() -> None:
    """Two heads that look at one row each, one of them with a much larger logit: both rows get a half."""
    query = np.zeros((2, 4), np.float32)
    query[0, 0], query[1, 1] = 2000, 100
    keys = np.zeros((1, 6, 4), np.float32)
    keys[0, 1, 0], keys[0, 4, 1] = 1, 1
    assert tova_scores(query, keys) == pytest.approx([0, 0.5, 0, 0, 0.5, 0])


def test_the_last_row_goes_when_it_looks_away_from_itself() -> None:
    query, keys = np.ones((4, 8), np.float32), draw(2, 20, 8, seed=3)
    keys[:, -1] = -10
    (kept,) = top_rows(tova_scores(query, keys)[None], 19)
    assert kept.tolist() == list(range(19))


@pytest.mark.parametrize("where", ["query", "keys"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(where: str, bad: float) -> None:
    arrays = {"query": draw(4, 8, seed=1), "keys": draw(2, 20, 8, seed=2)}
    arrays[where][1, 3] = bad
    with pytest.raises(ModelError, match="^tova: a (key|score) is not finite"):
        tova_scores(**arrays)


class Case:
    """A model and a prefix that it has read."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any], tokens: int = TOKENS, seed: int = 6) -> None:
        self.ids = [int(token) for token in np.random.default_rng(seed).integers(0, 300, tokens)]
        self.model, self.drain = model, drain
        self.subject = Subject(drain(model.prefill(self.ids)), model, self.ids, None)

    def keep(self, count: int, **given: Any) -> list[list[list[int]]]:
        keep = self.drain(Tova().rank(self.subject, registry.check_parameters(Tova(), given)))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2), ("qwen3", 4, 1)], ids=lambda it: it[0])
def case(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Case:
    kind, heads, kv_heads = request.param
    model = tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, layers=2)
    return Case(dataclasses.replace(model, prefill_chunk=20), drain)


@pytest.mark.parametrize("force_last", [False, True])
@pytest.mark.parametrize("count", [1, 2, 20, 60, 61, 100])
def test_the_method_keeps_what_the_rule_keeps_after_one_reading(
    case: Case,
    asked: Any,
    attention_oracles: ModuleType,
    count: int,
    force_last: bool,  # noqa: FBT001
) -> None:
    expected = []
    for seen in asked(case.model.model, case.ids):
        scores = attention_oracles.tova_scores(seen.queries[:, -1], seen.keys)
        rows = attention_oracles.tova_rows(scores, count, force_last=force_last).tolist()
        expected.append([rows] * len(seen.keys))
    assert case.keep(count, force_last=force_last) == expected


def test_the_last_row_survives_only_when_it_is_forced_to(case: Case) -> None:
    """With a handful of rows the faithful rule drops it somewhere; the variant never does."""
    free = [
        rows[-1] for seed in range(4) for heads in Case(case.model, case.drain, seed=seed).keep(3) for rows in heads
    ]
    assert min(free) < TOKENS - 1
    assert {rows[-1] for heads in case.keep(3, force_last=True) for rows in heads} == {TOKENS - 1}


@pytest.mark.parametrize("force_last", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17])
def test_short_prefixes_around_the_budget(case: Case, tokens: int, force_last: bool) -> None:  # noqa: FBT001
    kept = Case(case.model, case.drain, tokens).keep(16, force_last=force_last)
    for rows in (rows for heads in kept for rows in heads):
        assert len(rows) == min(tokens, 16)
        assert rows == sorted(set(rows))
        assert rows[-1] < tokens


def test_the_cache_stays_as_it_is(case: Case) -> None:
    before = [np.array(array) for array in case.subject.cache.arrays]
    case.keep(7)
    assert all(np.array_equal(np.array(a), b) for a, b in zip(case.subject.cache.arrays, before, strict=True))


def test_wrong_parameters_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="^force_last: "):
        registry.check_parameters(Tova(), {"force_last": 2})
    with pytest.raises(InvalidRequestError, match="^window: method tova has no such parameter"):
        registry.check_parameters(Tova(), {"window": 8})
