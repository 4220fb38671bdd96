"""Heads of one layer that keep different numbers of rows: the full cache with every head's own rows masked out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import finish
from kvferry.engine.cache import PrefixCache, frozen
from kvferry.engine.dense import DenseLayer
from kvferry.engine.generate import forward
from kvferry.engine.packed import PackedLayer, PackedTensor
from kvferry.engine.packing import unpack
from kvferry.engine.prefill import prefill
from kvferry.engine.quantise import Scheme, Width, quantise
from kvferry.engine.ragged import RaggedLayer, heads_of

TOKENS, LAYERS, VOCABULARY = 48, 3, 380
TOLERANCE = 1e-5
CASES = {"llama-9-3": ("llama", 9, 3), "qwen2-14-2": ("qwen2", 14, 2), "qwen3-4-2": ("qwen3", 4, 2)}
FRESH = [17, 3, 200, 41, 8, 300, 5]
Kept = list[list[np.ndarray[Any, Any]]]


class Case:
    """A model with attention of our own, and a prefix that it has read."""

    def __init__(self, model: Any, kv_heads: int, ids: list[int], prefix: PrefixCache) -> None:
        self.model, self.kv_heads, self.ids, self.prefix = model, kv_heads, ids, prefix
        self.rng = np.random.default_rng(11)

    def rows(self, lowest: int = 1) -> Kept:
        """Draw rows for every layer and head; no two heads of a layer keep equally many."""
        kept = []
        for _ in range(LAYERS):
            counts = self.rng.choice(np.arange(lowest, TOKENS), self.kv_heads, replace=False)
            kept.append([np.sort(self.rng.permutation(TOKENS)[:count]).astype(np.int32) for count in counts])
        return kept

    def ask(self, cache: PrefixCache, ids: list[int]) -> mx.array:
        return forward(self.model, ids, cache.branch(len(ids)))


@pytest.fixture(scope="module", params=sorted(CASES))
def read(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> tuple[Any, int, list[int], PrefixCache]:
    from kvferry.engine.attention import install

    model_type, heads, kv_heads = CASES[request.param]
    model = random_model(
        {
            "model_type": model_type,
            "hidden_size": heads * 32,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        seed=7,
    )
    assert install(model) == ""
    ids = [int(token) for token in np.random.default_rng(12).integers(0, VOCABULARY, TOKENS)]
    return model, kv_heads, ids, finish(prefill(model, ids, 20))


@pytest.fixture
def case(read: tuple[Any, int, list[int], PrefixCache]) -> Case:
    return Case(*read)


def select(cache: PrefixCache, kept: Kept) -> PrefixCache:
    return cache.select([[mx.array(rows) for rows in heads] for heads in kept])


def distance(actual: mx.array, expected: Any) -> float:
    expected = np.array(expected)
    return float(np.abs(np.array(actual) - expected).max() / np.abs(expected).max())


def positions(cache: PrefixCache) -> Kept:
    return [
        [np.array(head.positions)[0] if head.positions is not None else np.arange(head.rows) for head in layer.heads]
        for layer in cache.layers
        if isinstance(layer, RaggedLayer)
    ]


def same(one: Kept, other: Kept) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("fresh", [1, 7])
def test_ragged_rows_equal_masked_rows(case: Case, masked_logits: Any, fresh: int) -> None:
    for _ in range(3):
        kept = case.rows()
        ragged = select(case.prefix, kept)
        assert all(isinstance(layer, RaggedLayer) for layer in ragged.layers)
        assert ragged.row_counts == [len(rows) for heads in kept for rows in heads]
        assert ragged.offset == TOKENS
        expected = masked_logits(case.model, case.ids, FRESH[:fresh], kept)
        assert distance(case.ask(ragged, FRESH[:fresh]), expected) <= TOLERANCE
        # Another head's rows would not do.
        swapped = [heads[::-1] for heads in kept]
        assert distance(case.ask(select(case.prefix, swapped), FRESH[:fresh]), expected) > 1e-2


def test_a_head_that_keeps_everything_and_one_that_keeps_a_row(case: Case, masked_logits: Any) -> None:
    everything, first = np.arange(TOKENS, dtype=np.int32), np.array([0], dtype=np.int32)
    kept = [[everything, *[first] * (case.kv_heads - 1)] for _ in range(LAYERS)]
    expected = masked_logits(case.model, case.ids, FRESH, kept)
    assert distance(case.ask(select(case.prefix, kept), FRESH), expected) <= TOLERANCE


def test_heads_without_positions_beside_heads_with_them(case: Case, masked_logits: Any) -> None:
    """The same, of heads that were never taken apart by ``select``: rows 0..T-1 need no positions."""
    layers = []
    for layer in case.prefix.layers:
        heads = [head for head in heads_of(layer) if isinstance(head, DenseLayer)]
        layers.append(RaggedLayer((heads[0], *(head.select([mx.array([0, 7])], "rows") for head in heads[1:]))))
    cache = PrefixCache(tuple(layers), TOKENS)
    everything, two = np.arange(TOKENS), np.array([0, 7])
    kept = [[everything, *[two] * (case.kv_heads - 1)] for _ in range(LAYERS)]
    assert np.array_equal(np.array(cache.layers[0].positions)[0], np.concatenate(kept[0]))
    assert distance(case.ask(cache, FRESH), masked_logits(case.model, case.ids, FRESH, kept)) <= TOLERANCE


def test_one_pass_is_token_by_token(case: Case) -> None:
    ragged = select(case.prefix, case.rows())
    branches = ragged.branch(2)
    steps = [forward(case.model, [token], branches)[0] for token in FRESH]
    assert distance(mx.stack(steps), case.ask(ragged, FRESH)) <= TOLERANCE
    assert {branch.offset for branch in branches} == {TOKENS + len(FRESH)}


@pytest.mark.parametrize("fresh", [1, 7])
def test_a_second_eviction_after_an_answer(case: Case, masked_logits: Any, fresh: int) -> None:
    """Fresh rows join at their true positions; then every head drops some of old and new."""
    kept = case.rows(lowest=4)
    answered = [9, 100, 33, 2]
    branches = select(case.prefix, kept).branch(2)
    mx.eval(forward(case.model, answered, branches))
    longer = frozen(branches)
    assert longer.offset == TOKENS + 4
    held = [[np.concatenate([rows, np.arange(TOKENS, TOKENS + 4)]) for rows in heads] for heads in kept]
    assert same(positions(longer), held)
    expected = forward(case.model, FRESH[:fresh], branches)
    assert distance(case.ask(longer, FRESH[:fresh]), expected) <= TOLERANCE

    again = [[np.sort(case.rng.permutation(rows)[: 2 + case.rng.integers(3)]) for rows in heads] for heads in held]
    smaller = select(longer, again)
    assert same(positions(smaller), again)
    assert smaller.offset == TOKENS + 4
    # No mask says this: what the four tokens gave saw the first selection.
    assert distance(case.ask(smaller, FRESH[:fresh]), taken_out(case, longer, again, FRESH[:fresh])) <= TOLERANCE


def taken_out(case: Case, longer: PrefixCache, kept: Kept, fresh: list[int]) -> mx.array:
    """Answer from the rows in ``kept``, taken out of every head with NumPy."""
    layers = []
    for layer, wanted in zip(longer.layers, kept, strict=True):
        assert isinstance(layer, RaggedLayer)
        heads = []
        for head, rows in zip(layer.heads, wanted, strict=True):
            assert isinstance(head, DenseLayer)
            index = [list(np.array(head.positions)[0]).index(row) for row in rows]
            keys, values = (mx.array(np.array(part)[:, :, index]) for part in (head.keys, head.values))
            heads.append(DenseLayer(keys, values, mx.array(rows[None].astype(np.int32))))
        layers.append(RaggedLayer(tuple(heads)))
    return case.ask(PrefixCache(tuple(layers), longer.offset), fresh)


def test_trimmed_rows_are_gone(case: Case) -> None:
    ragged = select(case.prefix, case.rows())
    branches, untouched = ragged.branch(8), ragged.branch(8)
    mx.eval(forward(case.model, [3, 1, 4], branches), forward(case.model, [1, 5], branches))
    assert {branch.trim(5) for branch in branches} == {5}
    assert np.array_equal(
        np.array(forward(case.model, FRESH, branches)), np.array(forward(case.model, FRESH, untouched))
    )
    with pytest.raises(InvalidRequestError, match="trim: 8 rows, but the branch has 7 fresh ones"):
        branches[0].trim(8)
    assert branches[0].offset == TOKENS + 7


def test_questions_do_not_see_each_other(case: Case) -> None:
    ragged = select(case.prefix, case.rows())
    before = [np.array(array) for array in ragged.arrays]
    one, other = ragged.branch(4), ragged.branch(4)
    first = np.array(forward(case.model, [3, 1], one))
    mx.eval(forward(case.model, FRESH, other))
    mx.eval(forward(case.model, [6], copy.deepcopy(one)))
    assert np.array_equal(np.array(case.ask(ragged, [3, 1])), first)
    again = ragged.branch(4)
    mx.eval(forward(case.model, [3, 1], again))
    assert np.array_equal(np.array(forward(case.model, [5], one)), np.array(forward(case.model, [5], again)))
    assert all(np.array_equal(np.array(array), old) for array, old in zip(ragged.arrays, before, strict=True))


# Ragged and packed


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(Width(8, 32), Width(4, 32)),
        Scheme(None, Width(4, 32)),
        Scheme(Width(3, 32), None),
        Scheme(Width(2, 32), Width(2, 32), "minmax"),
    ],
    ids=["K8V4", "K dense V4", "K3 V dense", "minmax"],
)
def test_packed_heads_are_what_their_codes_stand_for(case: Case, scheme: Scheme) -> None:
    packed = quantise(select(case.prefix, case.rows()), scheme)
    plain = PrefixCache(
        tuple(
            RaggedLayer(tuple(expanded(head) for head in layer.heads if isinstance(head, PackedLayer)))
            for layer in packed.layers
            if isinstance(layer, RaggedLayer)
        ),
        TOKENS,
    )
    assert plain.row_counts == packed.row_counts
    for fresh in (FRESH[:1], FRESH):
        assert distance(case.ask(packed, fresh), case.ask(plain, fresh)) <= 1e-4
    branches = packed.branch(2)
    mx.eval(forward(case.model, FRESH, branches))
    longer = frozen(branches)
    assert longer.offset == TOKENS + len(FRESH)
    assert distance(case.ask(longer, [1, 2]), forward(case.model, [1, 2], branches)) <= TOLERANCE


def expanded(layer: PackedLayer) -> DenseLayer:
    def rows(tensor: PackedTensor) -> mx.array:
        return tensor.tail if tensor.packed is None else unpack(tensor.packed)

    return DenseLayer(rows(layer.keys), rows(layer.values), layer.positions)


def test_blocks_of_rows_across_heads_are_refused(case: Case) -> None:
    kivi = Scheme(Width(2, 32, "channel"), Width(2, 32), "minmax", 32)
    with pytest.raises(InvalidRequestError, match=r"^layers\[0\]: a RaggedLayer cannot be packed"):
        quantise(select(case.prefix, case.rows()), kivi)


# What is refused, and bytes


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([3, 5, TOKENS], "names a row that the cache does not hold"),
        ([5, 3, 7], "not strictly ascending"),
        ([3, 5, 5], "not strictly ascending"),
        ([], "a head keeps no row"),
    ],
)
def test_impossible_rows_are_refused(case: Case, rows: list[int], reason: str) -> None:
    kept = case.rows()
    kept[1][-1] = np.array(rows, dtype=np.int32)
    kept[1][0] = np.array([1, 2, 3, 4], dtype=np.int32)
    with pytest.raises(InvalidRequestError, match=rf"^positions\[1\].*: {reason}"):
        select(case.prefix, kept)


def test_too_few_heads_are_refused(case: Case) -> None:
    kept = case.rows()
    kept[2] = kept[2][:-1]
    with pytest.raises(InvalidRequestError, match=rf"^positions\[2\]: .* expected \({case.kv_heads}, rows\)"):
        select(case.prefix, kept)


def test_only_known_layers_are_taken_apart() -> None:
    with pytest.raises(ModelError, match="^layer: int cannot be taken apart"):
        heads_of(3)  # type: ignore[arg-type]


def test_bytes_are_what_the_allocator_holds(held_bytes: Any) -> None:
    rng = np.random.default_rng(0)
    layer = DenseLayer(*(mx.array(rng.standard_normal((1, 4, 2048, 64)).astype(np.float32)) for _ in range(2)))
    mx.eval(layer.arrays)
    counts = (100, 700, 1500, 2048)
    rows = [[mx.array(np.sort(rng.permutation(2048)[:count]).astype(np.int32)) for count in counts]]
    mx.eval(rows)

    def work() -> PrefixCache:
        cache = PrefixCache((layer,), 2048).select(rows)
        mx.eval(cache.arrays, [head.positions for item in cache.layers for head in item.heads])  # type: ignore[attr-defined]
        return cache

    cache, held = held_bytes(work)
    assert cache.nbytes == sum(counts) * (2 * 64 * 4 + 4)
    # Positions are the caller's own arrays where a head's were int32 already.
    assert held == pytest.approx(cache.nbytes, rel=0.02)
