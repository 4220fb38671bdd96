"""Packed layers: attention on codes is attention on what the codes stand for, and the prefix is shared, not copied.

The reference for attention is float64 loops on unpacked rows; that for a whole model is the same model on a dense cache
of the unpacked rows.
"""

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
from kvferry.engine.model import LoadedModel
from kvferry.engine.packed import PackedBranch, PackedLayer, PackedTensor
from kvferry.engine.packing import pack, unpack
from kvferry.engine.quantise import Scheme, Width, quantise
from kvferry.engine.ragged import RaggedLayer

Array = np.ndarray[Any, Any]
TOLERANCE = 1e-4
KIVI = Scheme(Width(2, 32, "channel"), Width(2, 32), "minmax", 64)
SCHEMES = {
    "K8V8": Scheme(Width(8, 32), Width(8, 32)),
    "K8V4": Scheme(Width(8, 32), Width(4, 32)),
    "K3V6": Scheme(Width(3, 32), Width(6, 32)),
    "K5V2": Scheme(Width(5, 32), Width(2, 32)),
    "K dense V4": Scheme(None, Width(4, 32)),
    "K4 V dense": Scheme(Width(4, 32), None),
    "minmax": Scheme(Width(4, 32), Width(4, 32), "minmax"),
    "KIVI": KIVI,
    "KIVI 4": Scheme(Width(4, 64, "channel"), Width(4, 32), "minmax", 64),
}
by_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def dense_layer(rng: np.random.Generator, heads: int, rows: int, key_dim: int, value_dim: int) -> DenseLayer:
    return DenseLayer(normal(rng, 1, heads, rows, key_dim), normal(rng, 1, heads, rows, value_dim))


def packed_layer(layer: DenseLayer, scheme: Scheme) -> PackedLayer:
    packed = quantise(PrefixCache((layer,), layer.rows), scheme).layers[0]
    assert isinstance(packed, PackedLayer)
    return packed


def restored(tensor: PackedTensor) -> mx.array:
    return tensor.tail if tensor.packed is None else mx.concatenate([unpack(tensor.packed), tensor.tail], axis=2)


def expanded(layer: PackedLayer) -> DenseLayer:
    return DenseLayer(restored(layer.keys), restored(layer.values), layer.positions)


def attention(oracles: Any, queries: Array, keys: Array, values: Array) -> Array:
    """Attention [H, N, Dv] of the last N rows' queries, causal."""
    weights = oracles.causal_attention(queries, keys)
    group = len(queries) // len(keys)
    return np.stack([weights[head] @ values[head // group].astype(np.float64) for head in range(len(queries))])


def check_attention(oracles: Any, layer: PackedLayer, heads: int, fresh: list[int], seed: int = 1) -> None:
    """Feed fresh tokens, so many at a time, and compare every step's attention with the reference."""
    rng = np.random.default_rng(seed)
    plain = expanded(layer)
    keys, values = np.array(plain.keys)[0], np.array(plain.values)[0]
    kv_heads, width = layer.kv_heads, keys.shape[2]
    branch = layer.branch(layer.rows, sum(fresh))
    for count in fresh:
        new_keys, new_values = (normal(rng, 1, kv_heads, count, part.shape[2]) for part in (keys, values))
        queries = normal(rng, 1, heads, count, width)
        keys = np.concatenate([keys, np.array(new_keys)[0]], axis=1)
        values = np.concatenate([values, np.array(new_values)[0]], axis=1)
        branch.update_and_fetch(new_keys, new_values)
        before = np.array(queries)
        found = branch.attend(queries, width**-0.5)
        mx.eval(found, queries)
        # mlx-lm's own function for packed caches scales the caller's queries.
        assert np.array_equal(np.array(queries), before)
        assert found.shape == (1, heads, count, values.shape[2])
        np.testing.assert_allclose(
            np.array(found)[0], attention(oracles, before[0], keys, values), rtol=0, atol=TOLERANCE
        )


# Attention


@by_scheme
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (2, 2)])
@pytest.mark.parametrize("fresh", [[1], [7], [7, 1, 1, 3]], ids=str)
def test_packed_rows_are_attended_as_what_they_stand_for(
    attention_oracles: Any, scheme: Scheme, heads: int, kv_heads: int, fresh: list[int]
) -> None:
    layer = dense_layer(np.random.default_rng(heads), kv_heads, 150, 64, 64)
    check_attention(attention_oracles, packed_layer(layer, scheme), heads, fresh)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_head_dimension_and_width(attention_oracles: Any, width: int, bits: int) -> None:
    layer = dense_layer(np.random.default_rng(width), 2, 33, width, width)
    check_attention(attention_oracles, packed_layer(layer, Scheme(Width(bits, 32), Width(bits, 32))), 4, [3, 1])


@pytest.mark.parametrize(("key_group", "value_group"), [(32, 128), (64, 32), (128, 64)])
def test_groups_of_their_own(attention_oracles: Any, key_group: int, value_group: int) -> None:
    layer = dense_layer(np.random.default_rng(4), 2, 40, 128, 128)
    packed = packed_layer(layer, Scheme(Width(4, key_group), Width(8, value_group)))
    check_attention(attention_oracles, packed, 6, [5, 1])


def test_keys_and_values_of_other_dimensions(attention_oracles: Any) -> None:
    layer = dense_layer(np.random.default_rng(4), 2, 40, 96, 64)
    check_attention(attention_oracles, packed_layer(layer, Scheme(Width(4, 32), Width(6, 64))), 6, [5, 1])


@pytest.mark.parametrize("rows", [63, 64, 65, 127, 128, 129, 200])
def test_every_tail(attention_oracles: Any, quantisation_oracles: Any, rows: int) -> None:
    """KIVI leaves the last T mod R keys and the last R values dense; with nothing packed the layer stays as it is."""
    layer = dense_layer(np.random.default_rng(rows), 2, rows, 64, 64)
    made = quantise(PrefixCache((layer,), rows), KIVI).layers[0]
    keys, values = quantisation_oracles.kivi_tails(rows, 64)
    if rows < 64:
        assert made is layer
        return
    assert isinstance(made, PackedLayer)
    assert (made.keys.tail.shape[2], made.values.tail.shape[2]) == (keys, values)
    assert (made.keys.packed_rows, made.values.packed_rows) == (rows - keys, rows - values)
    check_attention(attention_oracles, made, 4, [2, 1])


def test_kivi_packs_what_the_formula_packs(quantisation_oracles: Any) -> None:
    layer = dense_layer(np.random.default_rng(8), 2, 150, 64, 64)
    made = packed_layer(layer, KIVI)
    keys, values = np.array(restored(made.keys))[0], np.array(restored(made.values))[0]
    for head in range(2):
        expected = quantisation_oracles.kivi_restored_keys(
            *quantisation_oracles.kivi_keys(np.array(layer.keys)[0, head], 2, 32, 64)
        )
        np.testing.assert_allclose(keys[head], expected, rtol=1e-6, atol=1e-6)
        expected = quantisation_oracles.kivi_restored_values(
            *quantisation_oracles.kivi_values(np.array(layer.values)[0, head], 2, 32, 64)
        )
        np.testing.assert_allclose(values[head], expected, rtol=1e-6, atol=1e-6)


def test_keys_by_channel_grow_block_by_block() -> None:
    """What is packed of a longer prefix begins with what is packed of a shorter one."""
    layer = dense_layer(np.random.default_rng(8), 2, 192, 64, 64)
    short = DenseLayer(layer.keys[:, :, :130], layer.values[:, :, :130])
    one, two = packed_layer(layer, KIVI).keys.packed, packed_layer(short, KIVI).keys.packed
    assert one is not None
    assert two is not None
    assert np.array_equal(np.array(unpack(one))[:, :, :128], np.array(unpack(two)))


@by_scheme
def test_one_pass_is_token_by_token(scheme: Scheme) -> None:
    layer = packed_layer(dense_layer(np.random.default_rng(2), 3, 140, 64, 64), scheme)
    rng = np.random.default_rng(3)
    keys, values, queries = normal(rng, 1, 3, 7, 64), normal(rng, 1, 3, 7, 64), normal(rng, 1, 9, 7, 64)
    whole, single = layer.branch(140, 7), layer.branch(140, 2)
    whole.update_and_fetch(keys, values)
    expected = np.array(whole.attend(queries, 0.125))
    for step in range(7):
        one = slice(step, step + 1)
        single.update_and_fetch(keys[:, :, one], values[:, :, one])
        np.testing.assert_allclose(
            np.array(single.attend(queries[:, :, one], 0.125)), expected[:, :, one], rtol=0, atol=1e-5
        )
    assert (single.rows, single.offset) == (whole.rows, whole.offset) == (147, 147)


# A model on packed caches


@pytest.fixture(scope="module", params=[("llama", 9, 3), ("qwen2", 14, 2)], ids=["llama-9-3", "qwen2-14-2"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    kind, heads, kv_heads = request.param
    return tiny_model(kind, heads=heads, kv_heads=kv_heads, head_dim=32, seed=3)


@pytest.fixture(scope="module")
def prefix(model: LoadedModel) -> PrefixCache:
    made: PrefixCache = finish(model.prefill([(7 * step + 3) % 370 for step in range(150)]))
    return made


def distance(actual: mx.array, expected: mx.array) -> float:
    return float(mx.abs(actual - expected).max().item() / mx.abs(expected).max().item())  # type: ignore[operator]


def expand(cache: PrefixCache) -> PrefixCache:
    return PrefixCache(
        tuple(expanded(layer) if isinstance(layer, PackedLayer) else layer for layer in cache.layers), cache.offset
    )


@by_scheme
@pytest.mark.parametrize("fresh", [1, 7])
def test_logits_are_those_of_the_unpacked_cache(
    model: LoadedModel, prefix: PrefixCache, scheme: Scheme, fresh: int
) -> None:
    packed = quantise(prefix, scheme)
    ids = [(11 * step + 5) % 370 for step in range(fresh)]
    expected = model.forward(ids, expand(packed).branch(fresh))
    assert distance(model.forward(ids, packed.branch(fresh)), expected) <= TOLERANCE
    # And packing does something, or this would show nothing.
    assert distance(model.forward(ids, prefix.branch(fresh)), expected) > 1e-6


@by_scheme
def test_a_branch_that_is_frozen_answers_as_the_branch(model: LoadedModel, prefix: PrefixCache, scheme: Scheme) -> None:
    """The second use: what was asked and answered is part of the cache now, dense behind the packed rows."""
    packed = quantise(prefix, scheme)
    branches = packed.branch(4)
    mx.eval(model.forward([3, 1, 4, 1, 5], branches), model.forward([9], branches))
    longer = frozen(branches)
    assert longer.offset == 156
    assert longer.row_counts == [156] * len(longer.row_counts)
    for layer, before in zip(longer.layers, packed.layers, strict=True):
        assert isinstance(layer, PackedLayer)
        assert isinstance(before, PackedLayer)
        assert layer.keys.packed is before.keys.packed
        assert layer.values.packed is before.values.packed
    expected = model.forward([2, 6, 5], branches)
    again = longer.branch(3)
    assert distance(model.forward([2, 6, 5], again), expected) <= 1e-5
    # And once more on top.
    assert distance(model.forward([8], frozen(again).branch(1)), model.forward([8], branches)) <= 1e-5


@by_scheme
def test_trimmed_rows_are_gone(model: LoadedModel, prefix: PrefixCache, scheme: Scheme) -> None:
    packed = quantise(prefix, scheme)
    branches, untouched = packed.branch(16), packed.branch(16)
    mx.eval(model.forward([3, 1, 4], branches), model.forward([1, 5], branches))
    assert {branch.trim(5) for branch in branches} == {5}
    assert {branch.offset for branch in branches} == {150}
    assert np.array_equal(np.array(model.forward([9, 2, 6], branches)), np.array(model.forward([9, 2, 6], untouched)))
    with pytest.raises(InvalidRequestError, match="trim: 4 rows, but the branch has 3 fresh ones"):
        branches[0].trim(4)
    assert branches[0].rows == 153


def test_questions_do_not_see_each_other(model: LoadedModel, prefix: PrefixCache) -> None:
    packed = quantise(prefix, KIVI)
    before = [np.array(array) for array in packed.arrays]
    one, other = packed.branch(4), packed.branch(4)
    first = np.array(model.forward([3, 1], one))
    mx.eval(model.forward([200, 201, 202], other))
    twin = copy.deepcopy(one)
    mx.eval(model.forward([7, 7], twin))
    assert np.array_equal(np.array(model.forward([3, 1], packed.branch(2))), first)
    expected = packed.branch(4)
    mx.eval(model.forward([3, 1], expected))
    assert np.array_equal(np.array(model.forward([5], one)), np.array(model.forward([5], expected)))
    assert all(np.array_equal(np.array(array), old) for array, old in zip(packed.arrays, before, strict=True))


# Rows that are taken out


def test_selecting_packed_rows_is_packing_selected_ones(model: LoadedModel, prefix: PrefixCache) -> None:
    rng = np.random.default_rng(6)
    scheme = SCHEMES["K8V4"]
    wanted = [
        mx.array(np.stack([np.sort(rng.permutation(150)[:40]) for _ in range(layer.kv_heads)]).astype(np.int32))
        for layer in prefix.layers
    ]
    one, other = quantise(prefix, scheme).select(wanted), quantise(prefix.select(wanted), scheme)
    assert all(np.array_equal(np.array(a), np.array(b)) for a, b in zip(one.arrays, other.arrays, strict=True))
    assert np.array_equal(np.array(one.layers[0].positions), np.array(wanted[0]))
    assert np.array_equal(
        np.array(model.forward([3, 1, 4], one.branch(3))), np.array(model.forward([3, 1, 4], other.branch(3)))
    )


@pytest.mark.parametrize("name", ["K8V4", "K dense V4", "K4 V dense"])
def test_heads_of_a_packed_layer_may_keep_different_numbers(model: LoadedModel, prefix: PrefixCache, name: str) -> None:
    rng = np.random.default_rng(6)
    wanted = [
        [mx.array(np.sort(rng.permutation(150)[: 20 + 9 * head]).astype(np.int32)) for head in range(layer.kv_heads)]
        for layer in prefix.layers
    ]
    one, other = quantise(prefix, SCHEMES[name]).select(wanted), quantise(prefix.select(wanted), SCHEMES[name])
    assert all(isinstance(layer, RaggedLayer) for layer in one.layers)
    assert one.row_counts == other.row_counts
    assert np.array_equal(
        np.array(model.forward([3, 1, 4], one.branch(3))), np.array(model.forward([3, 1, 4], other.branch(3)))
    )


def test_dense_keys_beside_packed_values_can_be_selected(prefix: PrefixCache) -> None:
    scheme = SCHEMES["K dense V4"]
    wanted = [mx.array([[1, 2, 149]] * layer.kv_heads, dtype=mx.int32) for layer in prefix.layers]
    one, other = quantise(prefix, scheme).select(wanted), quantise(prefix.select(wanted), scheme)
    assert all(np.array_equal(np.array(a), np.array(b)) for a, b in zip(one.arrays, other.arrays, strict=True))


def test_rows_with_dense_ones_behind_them_are_not_taken_out(model: LoadedModel, prefix: PrefixCache) -> None:
    wanted = [mx.array([[1, 2]] * layer.kv_heads, dtype=mx.int32) for layer in prefix.layers]
    branches = quantise(prefix, SCHEMES["K8V8"]).branch(2)
    mx.eval(model.forward([3, 1], branches))
    with pytest.raises(InvalidRequestError, match=r"^positions\[0\]: .* 150 packed ones with 2 dense ones"):
        frozen(branches).select(wanted)
    with pytest.raises(InvalidRequestError, match=r"^positions\[0\]: "):
        quantise(prefix, KIVI).select(wanted)


def test_rows_that_are_not_held_are_refused(prefix: PrefixCache) -> None:
    packed = quantise(prefix, SCHEMES["K8V8"])
    wanted = [mx.array([[1, 150]] * layer.kv_heads, dtype=mx.int32) for layer in prefix.layers]
    with pytest.raises(InvalidRequestError, match=r"^positions\[0\]: names a row that the cache does not hold"):
        packed.select(wanted)


def test_what_is_packed_is_not_packed_again(prefix: PrefixCache) -> None:
    with pytest.raises(InvalidRequestError, match=r"^layers\[0\]: a PackedLayer cannot be packed"):
        quantise(quantise(prefix, SCHEMES["K8V8"]), SCHEMES["K8V8"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@by_scheme
def test_a_cache_that_is_not_finite_is_not_packed(scheme: Scheme, bad: float) -> None:
    layer = dense_layer(np.random.default_rng(0), 2, 150, 64, 64)
    spoilt = np.array(layer.keys if scheme.keys else layer.values)
    spoilt[0, 1, 5, 9] = bad
    broken = DenseLayer(mx.array(spoilt), layer.values) if scheme.keys else DenseLayer(layer.keys, mx.array(spoilt))
    with pytest.raises(ModelError, match="not finite"):
        quantise(PrefixCache((broken,), 150), scheme)


# Memory


@pytest.fixture
def large() -> DenseLayer:
    """Enough rows that whatever the allocator rounds up does not count."""
    return dense_layer(np.random.default_rng(0), 4, 2048, 64, 64)


@by_scheme
def test_bytes_are_what_the_allocator_holds(large: DenseLayer, scheme: Scheme, held_bytes: Any) -> None:
    cache, held = held_bytes(lambda: quantise(PrefixCache((large,), 2048), scheme))
    # A part that stays dense is the dense layer's own array, and was there before.
    (layer,) = cache.layers
    shared = sum(
        part.nbytes for part, width in ((layer.keys, scheme.keys), (layer.values, scheme.values)) if width is None
    )
    assert cache.nbytes - shared == pytest.approx(held, rel=0.01)
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays)


@pytest.mark.parametrize("name", ["K8V4", "KIVI"])
def test_a_branch_shares_the_packed_rows(large: DenseLayer, name: str, held_bytes: Any) -> None:
    layer = packed_layer(large, SCHEMES[name])
    mx.eval(layer.arrays)

    def ask(count: int) -> list[PackedBranch]:
        branches = [layer.branch(2048, 16) for _ in range(count)]
        rng = np.random.default_rng(0)
        for branch in branches:
            branch.update_and_fetch(normal(rng, 1, 4, 3, 64), normal(rng, 1, 4, 3, 64))
            mx.eval(branch.attend(normal(rng, 1, 8, 3, 64), 0.125))
            mx.eval(branch.state)
        return branches

    branches, held = held_bytes(lambda: ask(10))
    tails = layer.keys.tail.nbytes + layer.values.tail.nbytes
    fresh = 2 * 4 * 16 * 64 * 4
    assert sum(branch.nbytes for branch in branches) == 10 * (tails + fresh)
    assert held == pytest.approx(10 * (tails + fresh), rel=0.05)
    # Expanded, the rows of one branch alone would be:
    assert tails + fresh < large.nbytes / 8


def test_packed_rows_are_not_expanded_while_they_are_attended(large: DenseLayer) -> None:
    layer = packed_layer(large, SCHEMES["K8V4"])
    branch = layer.branch(2048, 1)
    rng = np.random.default_rng(0)
    keys, values, queries = normal(rng, 1, 4, 1, 64), normal(rng, 1, 4, 1, 64), normal(rng, 1, 8, 1, 64)
    mx.eval(keys, values, queries, layer.arrays)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    branch.update_and_fetch(keys, values)
    mx.eval(branch.attend(queries, 0.125))
    # Scores and weights of 8 heads, and copies of theirs: a few hundred KB, where the dense rows take 4 MB.
    assert mx.get_peak_memory() - before < large.nbytes / 8


def test_bytes_of_the_formula() -> None:
    """K8V4 of 2 bytes a scale: Hk x T x (D x bits / 8 + 4 x D / g), for K and for V."""
    rng = np.random.default_rng(0)
    layer = DenseLayer(normal(rng, 1, 3, 50, 64).astype(mx.bfloat16), normal(rng, 1, 3, 50, 64).astype(mx.bfloat16))
    assert packed_layer(layer, Scheme(Width(8, 64), Width(4, 32))).nbytes == 3 * 50 * (
        (64 + 4 * 64 // 64) + (32 + 4 * 64 // 32)
    )
    assert pack(layer.keys, 2, 32).nbytes == 3 * 50 * (16 + 8)
