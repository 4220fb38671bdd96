"""Removed rows: a cache without them is the full cache with them masked out, at true positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import finish
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseBranch, DenseLayer
from kvferry.engine.generate import forward
from kvferry.engine.prefill import prefill

TOKENS = 48
TOLERANCE = 1e-5
VOCABULARY = 380
CASES = {
    "llama-9-3": ("llama", 9, 3),
    "qwen2-14-2": ("qwen2", 14, 2),
    "qwen3-4-1": ("qwen3", 4, 1),
}
LAYERS = 3
Kept = list[np.ndarray[Any, Any]]


class Case:
    """A model, a prefix that it has read, and randomness for the rest."""

    def __init__(
        self, model: Any, kv_heads: int, ids: list[int], prefix: PrefixCache, masked_logits: Callable[..., Any]
    ) -> None:
        self.masked_logits = masked_logits
        self.model = model
        self.kv_heads = kv_heads
        self.ids = ids
        self.prefix = prefix
        self.rng = np.random.default_rng(11)

    def question(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, VOCABULARY, count)]

    def random_rows(self, counts: Sequence[int]) -> Kept:
        """Draw sorted positions, other ones for every layer and KV head."""
        return [
            np.stack([np.sort(self.rng.permutation(TOKENS)[:count]) for _ in range(self.kv_heads)]) for count in counts
        ]


@pytest.fixture(scope="module", params=sorted(CASES))
def read(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> tuple[Any, int, list[int], PrefixCache]:
    model_type, heads, kv_heads = CASES[request.param]
    config = {
        "model_type": model_type,
        "hidden_size": heads * 16,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    model = random_model(config, seed=7)
    ids = [int(token) for token in np.random.default_rng(12).integers(0, VOCABULARY, TOKENS)]
    return model, kv_heads, ids, finish(prefill(model, ids, 20))


@pytest.fixture
def case(read: tuple[Any, int, list[int], PrefixCache], masked_logits: Callable[..., Any]) -> Case:
    return Case(*read, masked_logits)


def oracle(case: Case, question: Sequence[int], kept: Kept) -> np.ndarray[Any, Any]:
    """What the model says on mlx-lm's full cache, the rows that are not kept masked out."""
    logits: np.ndarray[Any, Any] = case.masked_logits(case.model, case.ids, question, kept)
    return logits


def distance(logits: mx.array, expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(np.array(logits) - expected).max() / np.abs(expected).max())


def select(prefix: PrefixCache, kept: Kept) -> PrefixCache:
    return prefix.select([mx.array(rows.astype(np.int32)) for rows in kept])


@pytest.mark.parametrize("fresh", [1, 7])
@pytest.mark.parametrize("counts", [(16, 16, 16), (40, 9, 23), (1, 47, 5), (48, 12, 48)])
def test_selected_rows_equal_masked_rows(case: Case, counts: tuple[int, ...], fresh: int) -> None:
    kept, question = case.random_rows(counts), case.question(fresh)
    selected = select(case.prefix, kept)
    assert [layer.rows for layer in selected.layers] == list(counts)
    assert selected.offset == TOKENS
    logits = forward(case.model, question, selected.branch(fresh))
    assert distance(logits, oracle(case, question, kept)) <= TOLERANCE


def test_the_oracle_tells_removed_rows_from_kept_ones(case: Case) -> None:
    question = case.question(3)
    everything = [np.tile(np.arange(TOKENS), (case.kv_heads, 1)) for _ in range(LAYERS)]
    full = forward(case.model, question, case.prefix.branch(3))
    assert distance(full, oracle(case, question, everything)) <= TOLERANCE
    assert distance(full, oracle(case, question, case.random_rows((24, 24, 24)))) > 1e-2


@pytest.mark.parametrize("fresh", [1, 7])
def test_a_second_selection_on_top_of_the_first(case: Case, fresh: int) -> None:
    first, question = case.random_rows((30, 20, 25)), case.question(fresh)
    again = [np.stack([np.sort(case.rng.permutation(head)[:11]) for head in rows]) for rows in first]
    logits = forward(case.model, question, select(select(case.prefix, first), again).branch(fresh))
    assert distance(logits, oracle(case, question, again)) <= TOLERANCE


def test_the_order_of_retained_rows_does_not_matter(case: Case) -> None:
    kept, question = case.random_rows((16, 20, 9)), case.question(5)
    layers = []
    for layer in select(case.prefix, kept).layers:
        order = mx.array(case.rng.permutation(layer.rows))
        layers.append(
            DenseLayer(layer.keys[:, :, order], layer.values[:, :, order], mx.take(layer.positions, order, axis=1))
        )
    logits = forward(case.model, question, PrefixCache(tuple(layers), TOKENS).branch(5))
    assert distance(logits, oracle(case, question, kept)) <= TOLERANCE


def test_answering_goes_on_at_true_positions(case: Case) -> None:
    kept, tokens = case.random_rows((16, 20, 9)), case.question(6)
    branch = select(case.prefix, kept).branch(2)
    steps = [forward(case.model, [token], branch)[0] for token in tokens]
    assert distance(mx.stack(steps), oracle(case, tokens, kept)) <= TOLERANCE
    assert {layer.offset for layer in branch} == {TOKENS + 6}


class RowsForOffset(DenseBranch):
    """The classic mistake: the next position is the number of rows."""

    @property
    def offset(self) -> int:
        return self.rows


def padded_with_zeros(layer: DenseLayer, offset: int) -> KVCache:
    """The other one: mlx-lm's cache told the true offset, so that its buffer grows by zero rows."""
    cache = KVCache()
    cache.keys, cache.values, cache.offset = layer.keys, layer.values, offset
    return cache


@pytest.mark.parametrize("fresh", [1, 7])
def test_known_wrong_caches_fail_the_oracle(case: Case, fresh: int) -> None:
    kept, question = case.random_rows((16, 16, 16)), case.question(fresh)
    selected, expected = select(case.prefix, kept), oracle(case, question, kept)
    shifted: list[Any] = [RowsForOffset(layer, TOKENS, fresh) for layer in selected.layers]
    padded: list[Any] = [padded_with_zeros(layer, TOKENS) for layer in selected.layers]
    assert distance(forward(case.model, question, shifted), expected) > 1e-2
    assert distance(forward(case.model, question, padded), expected) > 1e-2


def test_selected_layers_hold_the_rows_of_their_positions(case: Case) -> None:
    kept = case.random_rows((16, 5, 30))
    for layer, full, rows in zip(select(case.prefix, kept).layers, case.prefix.layers, kept, strict=True):
        for head in range(case.kv_heads):
            assert np.array_equal(np.array(layer.keys)[0, head], np.array(full.keys)[0, head, rows[head]])
            assert np.array_equal(np.array(layer.values)[0, head], np.array(full.values)[0, head, rows[head]])
        assert layer.positions is not None
        assert layer.positions.dtype == mx.int32
        assert np.array_equal(np.array(layer.positions), rows)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([3, 5, TOKENS], "names a row that the cache does not hold"),
        ([-1, 3, 5], "names a row that the cache does not hold"),
        ([3, 5, 5], "not strictly ascending"),
        ([5, 3, 7], "not strictly ascending"),
    ],
)
@pytest.mark.parametrize("on_top", [False, True])
def test_impossible_positions_are_refused(case: Case, rows: list[int], reason: str, on_top: bool) -> None:  # noqa: FBT001
    prefix = case.prefix
    if on_top:
        prefix = select(prefix, [np.tile(np.arange(40), (case.kv_heads, 1))] * LAYERS)
    good = [[3, 5, 7]] * case.kv_heads
    kept = [np.array(item) for item in (good, [*good[1:], rows], good)]
    with pytest.raises(InvalidRequestError, match=rf"positions\[1\]: {reason}"):
        select(prefix, kept)


def test_a_row_removed_before_cannot_come_back(case: Case) -> None:
    first = select(case.prefix, [np.tile(np.array([3, 5, 9]), (case.kv_heads, 1))] * LAYERS)
    with pytest.raises(InvalidRequestError, match=r"positions\[0\]: names a row that the cache does not hold"):
        select(first, [np.tile(np.array([3, 4]), (case.kv_heads, 1))] * LAYERS)


def test_positions_of_another_shape_are_refused(case: Case) -> None:
    heads = case.kv_heads
    for shape in ((heads + 1, 4), (2 * heads, 4), (4,), (1, heads, 4), ()):
        wanted = np.broadcast_to(np.arange(4), shape) if shape else np.array(3)
        with pytest.raises(InvalidRequestError, match=rf"positions\[0\]: shape .*, expected \({heads}, rows\)"):
            select(case.prefix, [wanted] * LAYERS)


def test_selecting_for_the_wrong_number_of_layers_is_an_error(case: Case) -> None:
    with pytest.raises(ValueError, match="shorter"):
        select(case.prefix, case.random_rows((4, 4)))


def test_rows_without_positions_must_be_the_whole_prefix(case: Case) -> None:
    with pytest.raises(InvalidRequestError, match=r"layers\[0\].rows: 48 without positions, but the prefix has 49"):
        PrefixCache(case.prefix.layers, TOKENS + 1)
