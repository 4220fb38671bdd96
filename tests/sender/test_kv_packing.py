"""B2 and KIVI: every row, packed. The codes are those of the formulas, and what cannot be packed is not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from loading import load

from kvferry.core.compat import LayerGeometry
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.engine.packed import PackedLayer
from kvferry.receiver import reconstruct
from kvferry.sender import registry
from kvferry.sender.kv import parameters

TEXT = "The access code of the north warehouse is 4417. The ferry carries eleven crates of paper at dawn. " * 4


oracles = load("oracles/quantisation_oracles.py")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", heads=4, kv_heads=2, head_dim=64)


@pytest.fixture
def shop(workshop: Callable[..., Any], model: LoadedModel) -> Any:
    return workshop(model, chunk_bytes=4096)


@pytest.fixture
def made(shop: Any, drain: Callable[..., Any]) -> Callable[..., tuple[PrefixCache, Any]]:
    """Return a factory: the dense cache of TEXT, and what a method makes of it."""

    def make(method: str, **given: Any) -> tuple[PrefixCache, Any]:
        found, reading = registry.find(method), shop.reading(TEXT)
        material = drain(found.make(reading, registry.check_parameters(found, given)))
        return drain(reading.prefill()), material

    return make


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every attempt to read the document fail the test."""
    for name in ("prefill", "read", "forward"):
        monkeypatch.setattr(LoadedModel, name, lambda *_: pytest.fail("the model ran"))


def layers(dense: PrefixCache, packed: PrefixCache) -> list[tuple[DenseLayer, PackedLayer]]:
    pairs = list(zip(dense.layers, packed.layers, strict=True))
    assert all(isinstance(one, DenseLayer) and isinstance(other, PackedLayer) for one, other in pairs)
    return pairs  # type: ignore[return-value]


# B2


@pytest.mark.parametrize(
    ("given", "keys", "values"),
    [
        ({}, (8, 64), (8, 64)),
        ({"bits": 4}, (4, 64), (4, 64)),
        ({"bits": 2}, (2, 32), (2, 32)),
        ({"bits": 3, "group": 32}, (3, 32), (3, 32)),
        ({"value_bits": 4}, (8, 64), (4, 64)),
        ({"key_bits": 6, "value_bits": 5, "value_group": 32}, (6, 64), (5, 32)),
        ({"key_bits": 2, "value_bits": 8, "key_group": 64}, (2, 64), (8, 64)),
    ],
)
def test_every_row_is_packed_as_asked(
    made: Callable[..., Any], given: dict[str, Any], keys: tuple[int, int], values: tuple[int, int]
) -> None:
    dense, material = made("B2", **given)
    assert material.cache.offset == dense.offset
    encoding = material.encoding
    assert (encoding.key_bits, encoding.key_group) == keys
    assert (encoding.value_bits, encoding.value_group) == values
    assert (encoding.key_axis, encoding.entropy, encoding.zstd) == ("token", None, None)
    for plain, packed in layers(dense, material.cache):
        assert packed.positions is None
        for rows, part, (bits, group) in ((plain.keys, packed.keys, keys), (plain.values, packed.values, values)):
            assert part.tail.shape[2] == 0
            codes, scales, biases = oracles.affine_encode(np.array(rows), bits, group)
            assert np.array_equal(oracles.unpack(np.array(part.packed.codes), bits), codes)
            assert np.array_equal(np.array(part.packed.scales), scales)
            assert np.array_equal(np.array(part.packed.biases), biases)


def test_bytes_on_the_wire_and_in_memory(shop: Any, model: LoadedModel) -> None:
    """K8V4: the formula of 8 bits for K and that of 4 for V, here with four bytes a scale."""
    stored = shop.make("B2", TEXT, value_bits=4).stored
    tokens = stored.manifest.prefix.tokens
    rows = 2 * oracles.affine_bytes(2, tokens, 64, 8, 64, 4) + 2 * oracles.affine_bytes(2, tokens, 64, 4, 64, 4)
    header = stored.payload_path.read_bytes()[:8]
    assert stored.manifest.payload.length == 8 + int.from_bytes(header, "little") + 4 * tokens + rows
    cache = reconstruct.prefix_cache(stored.manifest, stored.sections)
    assert cache.nbytes == rows
    assert stored.manifest.parity.bound == 0.0


@pytest.mark.parametrize(("method", "given"), [("B2", {"bits": 4}), ("B2", {"bits": 3}), ("kivi", {"residual": 32})])
def test_answers_are_the_same_on_either_side(
    shop: Any, model: LoadedModel, drain: Callable[..., Any], method: str, given: dict[str, Any]
) -> None:
    found = registry.find(method)
    here = drain(found.make(shop.reading(TEXT), registry.check_parameters(found, given))).cache
    stored = shop.make(method, TEXT, **given).stored
    there = reconstruct.prefix_cache(stored.manifest, stored.sections)
    fresh = model.prompt.fresh("Who keeps the keys?")
    one, other = (np.array(model.forward(fresh, cache.branch(len(fresh)))) for cache in (here, there))
    assert np.array_equal(one, other)


def test_more_bits_are_nearer(made: Callable[..., Any], model: LoadedModel) -> None:
    fresh = model.prompt.fresh("Who keeps the keys?")
    errors = []
    for bits in (8, 6, 5, 4, 3, 2):
        dense, material = made("B2", bits=bits, group=32)
        expected, actual = (model.forward(fresh, cache.branch(len(fresh))) for cache in (dense, material.cache))
        errors.append(float(mx.abs(actual - expected).mean().item()))  # type: ignore[arg-type]
    assert errors == sorted(errors)
    assert 0 < errors[0] < errors[-1] / 10


# KIVI


@pytest.mark.parametrize("residual", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_packs_what_its_prefill_packs(made: Callable[..., Any], residual: int, bits: int) -> None:
    dense, material = made("kivi", bits=bits, residual=residual)
    tails = oracles.kivi_tails(dense.offset, residual)
    assert dense.offset > 128
    assert all(tails)
    encoding = material.encoding
    assert (encoding.key_axis, encoding.key_group, encoding.value_group) == ("channel", 32, 32)
    assert encoding.key_bits == encoding.value_bits == bits
    for plain, packed in layers(dense, material.cache):
        assert (packed.keys.tail.shape[2], packed.values.tail.shape[2]) == tails
        for head in range(2):
            keys, values = np.array(plain.keys)[0, head], np.array(plain.values)[0, head]
            codes, scales, zeros, tail = oracles.kivi_keys(keys, bits, 32, residual)
            assert np.array_equal(oracles.unpack(np.array(packed.keys.packed.codes)[0, head], bits), codes.T)
            assert np.array_equal(np.array(packed.keys.packed.scales)[0, head], scales.T)
            assert np.array_equal(np.array(packed.keys.packed.biases)[0, head], zeros.T)
            assert np.array_equal(np.array(packed.keys.tail)[0, head], tail)
            codes, scales, zeros, tail = oracles.kivi_values(values, bits, 32, residual)
            assert np.array_equal(oracles.unpack(np.array(packed.values.packed.codes)[0, head], bits), codes)
            assert np.array_equal(np.array(packed.values.packed.scales)[0, head], scales)
            assert np.array_equal(np.array(packed.values.tail)[0, head], tail)


def test_a_prefix_below_the_residual_stays_dense(shop: Any, model: LoadedModel) -> None:
    stored = shop.make("kivi", "Gate 7.", residual=4096).stored
    layout = stored.manifest.layout
    assert {(layer.packed_keys, layer.packed_values) for layer in layout} == {(0, 0)}
    assert stored.manifest.encoding.key_bits == 2
    cache = reconstruct.prefix_cache(stored.manifest, stored.sections)
    assert all(isinstance(layer, DenseLayer) for layer in cache.layers)
    dense = shop.make("B1", "Gate 7.").stored
    assert cache.nbytes == reconstruct.prefix_cache(dense.manifest, dense.sections).nbytes


def test_keys_and_values_of_kivi_have_bits_of_their_own(made: Callable[..., Any]) -> None:
    _, material = made("kivi", value_bits=8, key_group=64, residual=64)
    encoding = material.encoding
    assert (encoding.key_bits, encoding.value_bits) == (2, 8)
    assert (encoding.key_group, encoding.value_group) == (64, 32)


# Refusals, before anything is read


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("B2", {"group": 128}, "key_group: 128 does not divide the head dimension 64; legal group sizes: 64, 32"),
        ("B2", {"value_bits": 4, "value_group": 128}, "value_group: 128 does not divide"),
        (
            "B3",
            {"quantiser": "kivi"},
            "bits: the quantiser kivi packs keys and values; key_bits is None, value_bits None",
        ),
        (
            "B3",
            {"quantiser": "kivi", "key_bits": 2},
            "bits: the quantiser kivi packs .* key_bits is 2, value_bits None",
        ),
        ("B3", {"group": 64}, "group: 64, but no bits are given"),
        ("kivi", {"residual": 100}, "residual: 100 is no multiple of the key group 32"),
        ("kivi", {"residual": 96, "key_group": 64}, "residual: 96 is no multiple of the key group 64"),
        ("kivi", {"value_group": 128}, "value_group: 128 does not divide the head dimension 64"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(
    shop: Any, unread: None, method: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{said}") as caught:
        shop.make(method, TEXT, **given)
    assert caught.value.fields["field"] == said.partition(":")[0]
    assert shop.store.ids() == []


@pytest.mark.parametrize(("method", "field"), [("B2", "key_group"), ("kivi", "value_group")])
@pytest.mark.parametrize("width", [16, 48, 80])
def test_head_dimensions_without_a_legal_group_are_refused(
    workshop: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    unread: None,
    method: str,
    field: str,
    width: int,
) -> None:
    shop = workshop(tiny_model("llama", head_dim=width))
    with pytest.raises(InvalidRequestError, match=f"^{field}: any does not divide the head dimension {width}"):
        shop.make(method, TEXT)


@pytest.mark.parametrize(
    ("given", "field"),
    [({"bits": 7}, "bits"), ({"key_bits": 0}, "key_bits"), ({"group": 48}, "group"), ({"budget": 4}, "budget")],
)
@pytest.mark.parametrize("method", ["B2", "kivi"])
def test_wrong_parameters_are_refused_by_name(method: str, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(registry.find(method), given)


@pytest.mark.parametrize("method", ["B2", "kivi"])
def test_a_model_that_cannot_attend_packed_rows_is_not_read(
    workshop: Callable[..., Any], model: LoadedModel, unread: None, method: str
) -> None:
    soft = replace(model, profile=replace(model.profile, attention="its scores are capped"))
    with pytest.raises(ModelError, match="cannot attend what method .* makes, every rows.*: its scores are capped"):
        workshop(soft).make(method, TEXT)


def test_a_cache_that_is_not_finite_is_not_packed(
    workshop: Callable[..., Any], tiny_model_dir: Callable[..., Any], tmp_path: Any
) -> None:
    import shutil

    from kvferry.engine.model import load as load_model

    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir("llama", head_dim=32), path)
    broken = load_model(str(path))
    value = broken.model.layers[1].self_attn.v_proj
    value.weight = mx.concatenate([value.weight[:1] * float("inf"), value.weight[1:]])
    for method in ("B2", "kivi"):
        with pytest.raises(ModelError, match="not finite"):
            workshop(broken).make(method, TEXT)


def test_the_head_dimensions_of_all_layers_count(model: LoadedModel) -> None:
    shapes = [LayerGeometry("KVCache", 2, keys, values, "F32") for keys, values in ((128, 64), (96, 64), (64, 192))]
    profile = replace(model.profile, layers=tuple(shapes))
    assert parameters.head_dims(profile) == (32, 64)
    scheme = parameters.affine(parameters.WidthParameters(bits=8), *parameters.head_dims(profile))
    assert scheme is not None
    assert scheme.keys is not None
    assert scheme.values is not None
    assert (scheme.keys.group, scheme.values.group) == (32, 64)
