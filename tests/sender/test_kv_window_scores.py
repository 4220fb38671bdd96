"""Scores from a window of queries: attention to the prefix, reduced and pooled; and the probes that make the window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import ContextOverflowError, InvalidRequestError, ModelError
from kvferry.core.progress import finish
from kvferry.engine import prompt
from kvferry.engine.model import LoadedModel
from kvferry.engine.selection import top_rows
from kvferry.sender import registry
from kvferry.sender.kv import probes, window_scores
from kvferry.sender.kv.selecting import Subject
from kvferry.sender.kv.snapkv import SnapKV
from kvferry.sender.kv.window_scores import (
    BlindWindowParameters,
    WindowScoreParameters,
    pool,
    score_at_end,
    score_behind,
    score_blind,
    window_votes,
)

Array = np.ndarray[Any, Any]
# Query heads, KV heads, head dimension.
SHAPES = [(9, 3, 64), (14, 2, 32), (4, 4, 128), (6, 2, 256)]
QUESTION = "Who keeps the keys of the south warehouse?"


def draw(heads: int, rows: int, width: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((heads, rows, width)).astype(np.float32)


def scores_of(queries: Array, keys: Array, window_keys: Array, **given: Any) -> Array:
    made: Array = finish(window_scores.window_scores(queries, keys, window_keys, WindowScoreParameters(**given)))
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (40, 1), (5, 7), (40, 13)])
def test_votes_are_attention_to_the_prefix_summed_over_the_window(
    shape: tuple[int, int, int], rows: int, tokens: int, attention_oracles: ModuleType
) -> None:
    heads, kv_heads, width = shape
    queries, keys = 2 * draw(heads, tokens, width, 1), draw(kv_heads, rows + tokens, width, 2)
    expected = attention_oracles.causal_attention(queries, keys)[:, :, :rows].sum(axis=1)
    found = finish(window_votes(queries, keys[:, :rows], keys[:, rows:]))
    assert np.abs(found - expected).max() < 1e-5 * expected.max()
    # What goes to the window itself is missing from the sum, because it was in the denominator.
    assert (found.sum(axis=1) < tokens).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["group-pool", "pool-group"])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize(("group", "over"), [("mean", "mean"), ("max", "sum")])
def test_scores_are_the_independent_ones(
    shape: tuple[int, int, int], order: str, pooling: str, group: str, over: str, attention_oracles: ModuleType
) -> None:
    heads, kv_heads, width = shape
    queries, keys = 2 * draw(heads, 9, width, 3), draw(kv_heads, 39, width, 4)
    given = {"kernel": 5, "pooling": pooling, "group": group, "over": over, "order": order}
    expected = attention_oracles.snapkv_scores(queries, keys[:, :30], keys[:, 30:], **given)
    found = scores_of(
        queries,
        keys[:, :30],
        keys[:, 30:],
        kernel=5,
        pooling=pooling,
        group_reduction=group,
        query_reduction=over,
        reduction_order=order,
    )
    assert found.dtype == np.float32
    assert found.shape == (kv_heads, 30)
    assert np.abs(found - expected).max() < 1e-5 * expected.max()


def test_the_defaults_are_those_of_b5(attention_oracles: ModuleType) -> None:
    queries, keys = 3 * draw(9, 8, 64, 5), draw(3, 68, 64, 6)
    expected = attention_oracles.snapkv_scores(queries, keys[:, :60], keys[:, 60:])
    assert scores_of(queries, keys[:, :60], keys[:, 60:]) == pytest.approx(expected, rel=1e-4)


def test_the_order_of_reductions_matters_to_the_maximum_only() -> None:
    queries, keys, own = 3 * draw(9, 8, 64, 7), draw(3, 60, 64, 8), draw(3, 8, 64, 9)
    ways = {
        pooling: [
            scores_of(queries, keys, own, pooling=pooling, reduction_order=order)
            for order in ("group-pool", "pool-group")
        ]
        for pooling in ("avg", "max")
    }
    assert ways["avg"][0] == pytest.approx(ways["avg"][1], rel=1e-4)
    assert np.abs(ways["max"][0] - ways["max"][1]).max() > 0.1 * ways["max"][0].max()


@pytest.mark.parametrize(("weights", "block"), [(1, 1), (9 * 41 * 4, 4), (9 * 41 * 8, 8)])
def test_queries_come_in_blocks_that_memory_holds(weights: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = 2 * draw(9, 11, 64, 1), draw(3, 41, 64, 2)
    whole = finish(window_votes(queries, keys[:, :30], keys[:, 30:]))
    monkeypatch.setattr(window_scores, "_WEIGHTS_AT_ONCE", weights)
    told: list[int] = []
    found = finish(window_votes(queries, keys[:, :30], keys[:, 30:]), told.append)
    assert found == pytest.approx(whole, rel=1e-4)
    # Other work gets its turn after every block.
    assert told == list(range(block, 11, block))


def test_pooling_by_hand() -> None:
    scores = np.array([[6.0, 0.0, 3.0, 0.0, 0.0, 0.0, 9.0]], dtype=np.float32)
    # Zeros beyond the ends count in the divisor: (0 + 6 + 0) / 3.
    assert pool(scores, 3, "avg").tolist() == [[2.0, 3.0, 1.0, 1.0, 0.0, 3.0, 3.0]]
    assert pool(scores, 3, "max").tolist() == [[6.0, 6.0, 3.0, 3.0, 0.0, 9.0, 9.0]]
    # Nothing beyond the ends is larger than a negative score.
    assert pool(-scores - 1, 3, "max").tolist() == [[-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]]
    assert pool(-scores[:, :1], 7, "max").tolist() == [[-6.0]]
    assert pool(scores, 1, "avg").tolist() == scores.tolist()


@pytest.mark.parametrize("place", [10, 31, 60])
def test_a_planted_row_survives_with_its_neighbours(place: int) -> None:
    queries, keys, own = 0.1 * draw(9, 8, 64, 1), 0.1 * draw(3, 64, 64, 2), 0.1 * draw(3, 8, 64, 3)
    # Query head 4 belongs to KV head 1.
    queries[4, 5] *= 100
    keys[1, place] = queries[4, 5]
    kept = top_rows(scores_of(queries, keys, own), 7)
    assert kept[1].tolist() == list(range(place - 3, place + 4))
    assert kept[0].tolist() != kept[1].tolist()


def test_a_query_head_votes_in_its_own_group_only() -> None:
    queries, keys, own = draw(9, 8, 64, 1), draw(3, 64, 64, 2), draw(3, 8, 64, 3)
    louder = queries.copy()
    louder[4] *= 5
    before, after = scores_of(queries, keys, own), scores_of(louder, keys, own)
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert np.abs(before[1] - after[1]).max() > 0.1 * before[1].max()


def test_equal_keys_get_equal_scores_and_the_lower_rows_are_kept() -> None:
    """Keys of zeros: any other product is rounded differently at the edge of a block of the matrix."""
    scores = scores_of(draw(9, 8, 64, 1), np.zeros((3, 50, 64), np.float32), draw(3, 8, 64, 3))
    assert all(len(set(head.tolist())) == 1 for head in scores)
    assert [rows.tolist() for rows in top_rows(scores, 5)] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("where", ["queries", "keys", "window"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(where: str, bad: float) -> None:
    arrays = {name: draw(2, 20, 16, seed) for seed, name in enumerate(("queries", "keys", "window"))}
    arrays[where][1, 9, 3] = bad
    with pytest.raises(ModelError, match="^window scores: a (key|score) is not finite"):
        scores_of(*arrays.values())


def test_an_infinite_key_is_refused_although_its_weight_is_finite() -> None:
    queries, keys = np.full((1, 1, 4), -1, np.float32), np.ones((1, 3, 4), np.float32)
    keys[0, 1, 2] = np.inf
    assert np.isfinite(finish(window_votes(queries, keys, np.ones((1, 1, 4), np.float32)))).all()
    with pytest.raises(ModelError, match="^window scores: a key is not finite"):
        scores_of(queries, keys, np.ones((1, 1, 4), np.float32))


def test_what_overflows_is_refused_without_a_warning() -> None:
    queries, keys, own = (1e30 * draw(2, 5, 16, seed) for seed in range(3))
    with pytest.raises(ModelError, match="^window scores: a score is not finite"):
        scores_of(queries, keys, own)


# --- Probes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2), ("qwen3", 4, 1)], ids=lambda it: it[0])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    kind, heads, kv_heads = request.param
    return dataclasses.replace(
        tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, layers=2), prefill_chunk=20
    )


@pytest.fixture
def subject(model: LoadedModel, drain: Callable[..., Any]) -> Subject:
    ids = [int(token) for token in np.random.default_rng(6).integers(0, 300, 61)]
    return Subject(drain(model.prefill(ids)), model, ids, QUESTION)


def test_the_instruction_has_32_tokens_of_its_own_text(model: LoadedModel) -> None:
    ids = probes.instruction_ids(model)
    assert len(ids) == probes.INSTRUCTION_TOKENS == 32
    assert prompt.LOOKING_INSTRUCTION.startswith(model.tokenizer.decode(ids))
    assert probes.instruction_ids(model) == ids


@pytest.mark.parametrize("pieces", [1, 5, 31, 32, 33])
def test_the_instruction_has_32_tokens_under_any_tokenizer(model: LoadedModel, pieces: int) -> None:
    class Coarse:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert text == prompt.LOOKING_INSTRUCTION
            assert not add_special_tokens
            return list(range(pieces))

    ids = probes.instruction_ids(dataclasses.replace(model, tokenizer=Coarse()))
    assert ids == [number % pieces for number in range(32)]


def test_the_question_is_what_the_receiver_will_run(subject: Subject) -> None:
    assert probes.question_ids(subject, "B5-aware") == subject.model.prompt.fresh(QUESTION)


@pytest.mark.parametrize("question", [None, ""])
def test_an_aware_method_needs_the_question(subject: Subject, question: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="^question: method B5-aware needs the question"):
        probes.question_ids(dataclasses.replace(subject, question=question), "B5-aware")


@pytest.mark.parametrize("tokens", [1, 9, 45])
def test_a_probe_asks_what_it_would_ask_in_one_reading(subject: Subject, asked: Any, tokens: int) -> None:
    probe = list(range(5, 5 + tokens))
    whole = asked(subject.model.model, subject.ids + probe)
    for seen, expected in zip(finish(probes.behind(subject, probe)), whole, strict=True):
        assert np.array(seen.queries) == pytest.approx(expected.queries[:, -tokens:], abs=1e-4)
        assert np.array(seen.keys) == pytest.approx(expected.keys[:, -tokens:], abs=1e-4)


@pytest.mark.parametrize("tokens", [1, 8, 60])
def test_the_end_of_the_prefix_asks_what_it_asked_when_it_was_read(subject: Subject, asked: Any, tokens: int) -> None:
    whole = asked(subject.model.model, subject.ids)
    for seen, expected in zip(finish(probes.at_end(subject, tokens)), whole, strict=True):
        assert np.array(seen.queries) == pytest.approx(expected.queries[:, -tokens:], abs=1e-4)
        assert np.array(seen.keys) == pytest.approx(expected.keys[:, -tokens:], abs=1e-4)


def test_a_probe_leaves_the_cache_as_it_is(subject: Subject, drain: Callable[..., Any]) -> None:
    before = [np.array(array) for array in subject.cache.arrays]
    for window in ("instruction", "prompt"):
        drain(score_blind(subject, BlindWindowParameters(window=window, window_tokens=8)))  # type: ignore[arg-type]
    drain(score_behind(subject, subject.model.prompt.fresh(QUESTION), WindowScoreParameters()))
    assert all(np.array_equal(np.array(array), old) for array, old in zip(subject.cache.arrays, before, strict=True))
    assert {layer.positions is None for layer in subject.layers} == {True}
    assert subject.cache.offset == len(subject.ids)


def test_a_probe_that_does_not_fit_the_context_is_refused(subject: Subject) -> None:
    room = subject.model.profile.context_length - subject.rows
    with pytest.raises(ContextOverflowError, match=f"61 prefix \\+ {room + 1} question"):
        next(probes.behind(subject, [1] * (room + 1)))


def test_a_probe_behind_protects_nothing_and_the_published_window_itself(
    subject: Subject, drain: Callable[..., Any]
) -> None:
    behind = drain(score_behind(subject, [3, 4, 5], WindowScoreParameters()))
    assert not behind.protected.any()
    assert {layer.shape for layer in behind.layers} == {(subject.layers[0].kv_heads, 61)}
    at_end = drain(score_at_end(subject, 8, WindowScoreParameters()))
    assert np.flatnonzero(at_end.protected).tolist() == list(range(53, 61))
    assert {layer.shape for layer in at_end.layers} == {(subject.layers[0].kv_heads, 61)}


def test_progress_goes_by_layers(subject: Subject) -> None:
    steps = list(score_blind(subject, BlindWindowParameters()))
    # The probe's 32 tokens are run in two pieces of at most 20: the turn between them is no progress.
    assert [(step.stage, step.done, step.total) for step in steps] == [("method", done, 2) for done in (0, 0, 1, 2)]


def test_scores_of_half_precision_rows_are_computed_in_single(
    random_model: Callable[..., Any], attention_oracles: ModuleType, drain: Callable[..., Any], model: LoadedModel
) -> None:
    """A cache in bfloat16 has scores that do not tie where they differ."""
    config = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 380,
    }
    from kvferry.engine import attention

    half = random_model(config, seed=3, dtype="bfloat16")
    attention.install(half)
    loaded = dataclasses.replace(model, model=half)
    ids = [int(token) for token in np.random.default_rng(8).integers(0, 300, 200)]
    subject = Subject(drain(loaded.prefill(ids)), loaded, ids, None)
    assert subject.layers[0].keys.dtype == mx.bfloat16
    (scores,) = drain(score_behind(subject, [3, 4, 5], WindowScoreParameters(kernel=1))).layers
    (seen,) = finish(probes.behind(subject, [3, 4, 5]))
    keys = np.array(subject.layers[0].keys[0].astype(mx.float32))
    expected = attention_oracles.snapkv_scores(np.array(seen.queries), keys, np.array(seen.keys), kernel=1)
    assert scores == pytest.approx(expected, rel=1e-4)
    assert all(len(set(head.tolist())) > 190 for head in scores)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"kernel": 4}, "kernel"),
        ({"kernel": 0}, "kernel"),
        ({"kernel": 1025}, "kernel"),
        ({"pooling": "min"}, "pooling"),
        ({"query_reduction": "max"}, "query_reduction"),
        ({"group_reduction": "sum"}, "group_reduction"),
        ({"reduction_order": "pool"}, "reduction_order"),
        ({"window": "question"}, "window"),
        ({"window_tokens": 0}, "window_tokens"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(SnapKV(), given)
