"""Kept rows move to 0..R-1: keys are those of rows that always stood there."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.quantise import Scheme, Width, quantise
from kvferry.engine.renumber import renumber
from kvferry.engine.rope import NO_ROTATION, Rotation, describe

TOKENS, HEADS, WIDTH = 60, 3, 32
SETTINGS: list[dict[str, Any]] = [{}, {"traditional": True}, {"dims": 8}]


def rotation(dims: int = WIDTH, *, traditional: bool = False) -> Rotation:
    found = describe(nn.RoPE(dims, traditional=traditional, base=1e4))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain() -> np.ndarray[Any, Any]:
    """Keys before rotation, [layers, Hk, T, D]."""
    return np.random.default_rng(3).standard_normal((len(SETTINGS), HEADS, TOKENS, WIDTH))


@pytest.fixture(scope="module")
def values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(4).standard_normal((len(SETTINGS), HEADS, TOKENS, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def cache(plain: np.ndarray[Any, Any], values: np.ndarray[Any, Any], selector_oracles: ModuleType) -> PrefixCache:
    layers = []
    for settings, keys, held in zip(SETTINGS, plain, values, strict=True):
        turned = selector_oracles.rotate(keys, np.arange(TOKENS), 1e4, **settings).astype(np.float32)
        layers.append(DenseLayer(mx.array(turned)[None], mx.array(held)[None]))
    return PrefixCache(tuple(layers), TOKENS)


@pytest.fixture(scope="module")
def rotations() -> list[Rotation]:
    return [rotation(**settings) for settings in SETTINGS]


@pytest.fixture(scope="module")
def kept() -> list[np.ndarray[Any, Any]]:
    """Other rows for every layer and head, as many of each: [Hk, 14] a layer."""
    rng = np.random.default_rng(8)
    return [np.stack([np.sort(rng.permutation(TOKENS)[:14]) for _ in range(HEADS)]) for _ in SETTINGS]


def select(cache: PrefixCache, kept: Sequence[np.ndarray[Any, Any]]) -> PrefixCache:
    return cache.select([mx.array(rows.astype(np.int32)) for rows in kept])


def test_keys_are_those_of_rows_that_stood_there(
    cache: PrefixCache,
    rotations: list[Rotation],
    kept: list[np.ndarray[Any, Any]],
    plain: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    selector_oracles: ModuleType,
) -> None:
    moved = renumber(select(cache, kept), rotations)
    assert moved.offset == 14
    for index, settings in enumerate(SETTINGS):
        layer = moved.layers[index]
        assert isinstance(layer, DenseLayer)
        assert layer.positions is None
        for head, rows in enumerate(kept[index]):
            expected = selector_oracles.renumbered_keys(plain[index, head], rows, 1e4, **settings)
            assert np.abs(np.array(layer.keys[0, head]) - expected).max() < 1e-4
            assert np.array_equal(np.array(layer.values[0, head]), values[index, head, rows])
        before = select(cache, kept).layers[index].arrays[0]
        assert np.abs(np.array(layer.keys) - np.array(before)).max() > 0.1


def test_a_second_renumbering_starts_from_the_first(
    cache: PrefixCache,
    rotations: list[Rotation],
    kept: list[np.ndarray[Any, Any]],
    plain: np.ndarray[Any, Any],
    selector_oracles: ModuleType,
) -> None:
    first = renumber(select(cache, kept), rotations)
    again = [np.tile(np.array([0, 1, 5, 9, 13]), (HEADS, 1))] * len(SETTINGS)
    moved = renumber(select(first, again), rotations)
    assert moved.offset == 5
    for index, settings in enumerate(SETTINGS):
        for head, rows in enumerate(kept[index]):
            expected = selector_oracles.renumbered_keys(plain[index, head], rows[[0, 1, 5, 9, 13]], 1e4, **settings)
            assert np.abs(np.array(moved.layers[index].arrays[0][0, head]) - expected).max() < 1e-4


def test_a_whole_prefix_stays_bit_for_bit(cache: PrefixCache, rotations: list[Rotation]) -> None:
    same = renumber(cache, rotations)
    assert same.offset == TOKENS
    pairs = zip(same.arrays, cache.arrays, strict=True)
    assert all(np.array_equal(np.array(one), np.array(two)) for one, two in pairs)


def test_the_cache_it_came_from_stays(
    cache: PrefixCache, rotations: list[Rotation], kept: list[np.ndarray[Any, Any]]
) -> None:
    selected = select(cache, kept)
    before = [np.array(array) for array in selected.arrays]
    renumber(selected, rotations)
    assert all(np.array_equal(np.array(now), old) for now, old in zip(selected.arrays, before, strict=True))
    assert selected.offset == TOKENS


def test_a_layer_without_rotation_keeps_its_keys(cache: PrefixCache, kept: list[np.ndarray[Any, Any]]) -> None:
    selected = select(cache, kept)
    moved = renumber(selected, [Rotation(NO_ROTATION, None)] * len(SETTINGS))
    assert all(np.array_equal(np.array(a), np.array(b)) for a, b in zip(moved.arrays, selected.arrays, strict=True))
    assert moved.offset == 14


@pytest.mark.parametrize("where", ["layers", "heads"])
def test_different_numbers_of_rows_are_refused_with_both(
    cache: PrefixCache, rotations: list[Rotation], kept: list[np.ndarray[Any, Any]], where: str
) -> None:
    heads: list[list[np.ndarray[Any, Any]]] = [list(rows) for rows in kept]
    heads[1] = [rows[:9] for rows in heads[1]] if where == "layers" else [heads[1][0][:9], *heads[1][1:]]
    selected = cache.select([[mx.array(rows.astype(np.int32)) for rows in layer] for layer in heads])
    with pytest.raises(InvalidRequestError, match=r"^rows: heads keep from 9 to 14 rows"):
        renumber(selected, rotations)


def test_packed_rows_are_refused_by_name(
    cache: PrefixCache, rotations: list[Rotation], kept: list[np.ndarray[Any, Any]]
) -> None:
    packed = quantise(select(cache, kept), Scheme(Width(8, 32), Width(8, 32)))
    with pytest.raises(InvalidRequestError, match=r"^layers: a PackedLayer cannot be renumbered"):
        renumber(packed, rotations)


def test_a_rotation_is_needed_for_every_layer(
    cache: PrefixCache, rotations: list[Rotation], kept: list[np.ndarray[Any, Any]]
) -> None:
    with pytest.raises(ValueError, match="shorter"):
        renumber(select(cache, kept), rotations[:-1])
