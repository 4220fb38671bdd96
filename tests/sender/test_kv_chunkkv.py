"""ChunkKV: whole chunks, ranked once for all heads of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.kv import probes
from kvferry.sender.kv.chunkkv import ChunkKV, chunk_scores, chunkkv_rows
from kvferry.sender.kv.selecting import Subject

Array = np.ndarray[Any, Any]
TOKENS = 151


def draw(kv_heads: int, rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((kv_heads, rows)).astype(np.float32)


@pytest.mark.parametrize("rows", [19, 20, 21, 40, 55])
@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_chunk_scores_are_the_independent_ones(rows: int, chunk: int, selector_oracles: ModuleType) -> None:
    scores = draw(3, rows, 1)
    expected = selector_oracles.chunkkv_chunk_scores(scores, chunk)
    assert chunk_scores(scores, chunk) == pytest.approx(expected, abs=1e-6)


def test_chunk_scores_by_hand() -> None:
    scores = np.array([[1, 2, 3, 4, 5, 6, 10], [0, 0, 3, 0, 0, 0, 1]], dtype=np.float32)
    assert chunk_scores(scores, 3).tolist() == [3.0, 5.0, 11.0]


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 130),
    chunk=st.integers(1, 30),
    share=st.floats(0.01, 1.0),
    levels=st.sampled_from([2, 5, 1000]),
)
def test_rows_are_the_best_whole_chunks_within_the_budget(
    selector_oracles: ModuleType, seed: int, rows: int, chunk: int, share: float, levels: int
) -> None:
    if rows < chunk:
        return
    count = max(int(rows * share), 1)
    # Few levels make chunks tie. Multiples of 1/8 add up without rounding.
    scores = (np.random.default_rng(seed).integers(0, levels, (3, rows)) / 8).astype(np.float32)
    if count < chunk and count < rows:
        with pytest.raises(InvalidRequestError, match=f"^budget: {count} rows, which hold no chunk of {chunk}"):
            chunkkv_rows(scores, count, chunk)
        return
    kept = chunkkv_rows(scores, count, chunk)
    # The published count, of exact numbers; it may pass the budget where the last chunk is short.
    published = selector_oracles.chunkkv_count(rows, 1 - Fraction(count, rows), chunk)
    expected = selector_oracles.chunkkv_rows(scores, published, chunk)
    if len(expected) > count:
        expected = selector_oracles.chunkkv_rows(scores, published - 1, chunk)
    assert kept.tolist() == expected.tolist()
    assert kept.dtype == np.int32
    assert 1 <= len(kept) <= count
    for start in range(0, rows, chunk):
        members = set(range(start, min(start + chunk, rows)))
        assert members & set(kept.tolist()) in (set(), members)


def test_a_short_last_chunk_competes_with_its_own_mean() -> None:
    scores = np.zeros((2, 45), np.float32)
    scores[:, 42:] = 1
    assert chunkkv_rows(scores, 25, 20).tolist() == list(range(40, 45))
    scores[:, :20] = 2
    assert chunkkv_rows(scores, 25, 20).tolist() == list(range(20))


def test_one_ranking_for_all_heads_takes_their_sum() -> None:
    scores = np.zeros((3, 60), np.float32)
    scores[0, :20], scores[1:, 20:40] = 1.5, 1.0
    assert chunkkv_rows(scores, 20, 20).tolist() == list(range(20, 40))


def test_equal_chunks_go_by_their_place() -> None:
    assert chunkkv_rows(np.ones((2, 61), np.float32), 44, 20).tolist() == list(range(40))


@pytest.mark.parametrize(("count", "kept"), [(104, 100), (120, 120), (121, 121)])
def test_chunks_that_hold_more_than_the_budget_lose_the_worst(count: int, kept: int) -> None:
    """7 chunks of 121 rows, the last of a single one: 104 rows are 6 chunks of 7, and these may hold 120 rows."""
    scores = np.tile(np.arange(121, 0, -1, dtype=np.float32), (2, 1))
    assert chunkkv_rows(scores, count, 20).tolist() == list(range(kept))


class Case:
    """A model and a prefix that it has read."""

    def __init__(self, model: LoadedModel, drain: Callable[..., Any], tokens: int = TOKENS) -> None:
        self.ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, tokens)]
        self.model, self.drain, self.tokens = model, drain, tokens
        self.subject = Subject(drain(model.prefill(self.ids)), model, self.ids, None)

    def keep(self, count: int, **given: Any) -> list[list[list[int]]]:
        keep = self.drain(ChunkKV().rank(self.subject, registry.check_parameters(ChunkKV(), given)))
        return [[rows.tolist() for rows in heads] for heads in keep(count)]

    def scores(self, scorer: str, asked: Any, attention: ModuleType, selector: ModuleType) -> list[Any]:
        """By the formulas, from a plain reading."""
        read = asked(self.model.model, self.ids + probes.instruction_ids(self.model))
        if scorer == "snapkv":
            return [
                attention.snapkv_scores(
                    seen.queries[:, self.tokens :], seen.keys[:, : self.tokens], seen.keys[:, self.tokens :]
                )
                for seen in read
            ]
        rule = selector.l2norm_scores if scorer == "l2norm" else selector.keydiff_scores
        return [np.stack([rule(head) for head in seen.keys[:, : self.tokens]]) for seen in read]


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2)], ids=lambda it: it[0])
def case(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Case:
    kind, heads, kv_heads = request.param
    return Case(tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, layers=3), drain)


@pytest.mark.parametrize("scorer", ["snapkv", "l2norm", "keydiff"])
@pytest.mark.parametrize("count", [20, 64, 150, 151])
def test_the_method_keeps_what_the_rule_says(
    case: Case, asked: Any, attention_oracles: ModuleType, selector_oracles: ModuleType, scorer: str, count: int
) -> None:
    chunks = selector_oracles.chunkkv_count(TOKENS, 1 - Fraction(count, TOKENS))
    expected = []
    for scores in case.scores(scorer, asked, attention_oracles, selector_oracles):
        rows = selector_oracles.chunkkv_rows(scores, chunks)
        assert len(rows) <= count
        expected.append([rows.tolist()] * len(scores))
    assert case.keep(count, scorer=scorer) == expected


def test_layers_have_winners_of_their_own(case: Case) -> None:
    kept = [heads[0] for heads in case.keep(40)]
    assert any(rows != kept[0] for rows in kept[1:])


@pytest.mark.parametrize("scorer", ["snapkv", "l2norm", "keydiff"])
def test_without_a_complete_chunk_the_scorer_decides_for_each_head(
    case: Case, asked: Any, attention_oracles: ModuleType, selector_oracles: ModuleType, scorer: str
) -> None:
    short = Case(case.model, case.drain, 19)
    expected = [
        [selector_oracles.keep(head, 7).tolist() for head in layer]
        for layer in short.scores(scorer, asked, attention_oracles, selector_oracles)
    ]
    assert short.keep(7, scorer=scorer) == expected
    assert any(heads[0] != heads[1] for heads in expected)


@pytest.mark.parametrize("tokens", [1, 2, 19, 20, 21, 31, 32, 33])
def test_short_prefixes_around_chunk_and_budget(case: Case, tokens: int) -> None:
    kept = Case(case.model, case.drain, tokens).keep(32)
    for rows in (rows for heads in kept for rows in heads):
        assert 1 <= len(rows) <= min(tokens, 32)
        assert rows == sorted(set(rows))
        assert rows[-1] < tokens
        assert tokens > 32 or len(rows) == tokens


def test_a_budget_below_a_chunk_is_refused(case: Case) -> None:
    with pytest.raises(InvalidRequestError, match="^budget: 19 rows, which hold no chunk of 20"):
        case.keep(19)
    assert len(case.keep(19, chunk=5)[0][0]) == 15


def test_the_cut_of_the_reading_does_not_matter(case: Case) -> None:
    other = Case(dataclasses.replace(case.model, prefill_chunk=43), case.drain)
    assert other.keep(64) == case.keep(64)


@pytest.mark.parametrize(
    ("options", "field"), [({"chunk": 0}, "chunk"), ({"scorer": "h2o"}, "scorer"), ({"window": "prompt"}, "window")]
)
def test_wrong_parameters_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(ChunkKV(), options)
