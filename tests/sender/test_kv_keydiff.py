"""KeyDiff: the keys least like their mean direction stay, all at once or block by block."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.kv.keydiff import KeyDiff, directions, keydiff_rows, keydiff_scores
from kvferry.sender.kv.selecting import Subject

SHAPES = [(3, 60, 64), (2, 45, 32), (3, 30, 128), (2, 25, 256)]


def draw(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Keys with a drift, as real ones have: otherwise the anchor is nothing but noise."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 0.7 * rng.standard_normal(shape[-1])).astype(np.float32)


def kept(keys: np.ndarray[Any, Any], count: int, block: int = 0) -> list[list[int]]:
    return [rows.tolist() for rows in keydiff_rows(directions(mx.array(keys)), count, block)]


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_those_of_the_formula(shape: tuple[int, int, int], selector_oracles: ModuleType) -> None:
    keys = draw(shape)
    found = keydiff_scores(directions(mx.array(keys)))
    assert found.dtype == np.float32
    for head in range(shape[0]):
        assert np.abs(found[head] - selector_oracles.keydiff_scores(keys[head])).max() < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 5, 20, 24])
def test_all_at_once_the_best_scores_stay(
    shape: tuple[int, int, int], count: int, selector_oracles: ModuleType
) -> None:
    keys = draw(shape)
    expected = [selector_oracles.keep(selector_oracles.keydiff_scores(head), count).tolist() for head in keys]
    assert kept(keys, count) == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1, 4, 16, 1000])
@pytest.mark.parametrize("count", [3, 6, 20])
def test_in_blocks_the_rule_is_that_of_the_paper(
    shape: tuple[int, int, int], count: int, block: int, selector_oracles: ModuleType
) -> None:
    keys = draw(shape, 1)
    expected = [selector_oracles.keydiff_blockwise_rows(head, count, block).tolist() for head in keys]
    assert kept(keys, count, block) == expected


def test_blocks_and_one_go_differ() -> None:
    """First comes one direction, then another for good: in blocks, what came first is rare by the time it is judged."""
    rng = np.random.default_rng(2)
    keys = np.zeros((1, 64, 32), dtype=np.float32)
    keys[0, :, 0] = 1.0
    keys[0, 32:] = 0
    keys[0, 32:, 1] = 1.0
    keys += 0.05 * rng.standard_normal(keys.shape).astype(np.float32)
    assert kept(keys, 16) != kept(keys, 16, 8)
    # A block that holds everything is one go.
    assert kept(keys, 16) == kept(keys, 16, 64)


def test_an_outlier_among_equal_keys_stays() -> None:
    keys = np.ones((2, 40, 64), dtype=np.float32)
    keys[0, 23] = [1.0, -1.0] * 32
    keys[1, 9] = -1.0
    for block in (0, 7, 16):
        found = kept(keys, 3, block)
        assert 23 in found[0]
        assert 9 in found[1]


def test_equal_keys_go_to_the_lower_rows() -> None:
    keys = np.tile(draw((1, 1, 37)), (3, 53, 1))
    assert kept(keys, 5) == [[0, 1, 2, 3, 4]] * 3
    assert kept(keys, 5, 16) == [[0, 1, 2, 3, 4]] * 3


def test_the_length_of_a_key_does_not_matter() -> None:
    keys = draw((3, 50, 64))
    scaled = keys * np.exp2(np.random.default_rng(3).integers(-8, 8, (3, 50, 1))).astype(np.float32)
    assert kept(keys, 12) == kept(scaled, 12)
    assert kept(keys, 12, 16) == kept(scaled, 12, 16)


def test_a_zero_key_has_no_direction(selector_oracles: ModuleType) -> None:
    keys = draw((1, 20, 32))
    keys[0, 4] = 0
    found = keydiff_scores(directions(mx.array(keys)))
    assert found[0, 4] == 0
    assert np.abs(found[0] - selector_oracles.keydiff_scores(keys[0])).max() < 1e-6
    assert (keydiff_scores(directions(mx.zeros((2, 5, 32)))) == 0).all()


def test_opposite_keys_have_no_mean() -> None:
    keys = np.zeros((1, 4, 32), dtype=np.float32)
    keys[0, :, 0] = [1, -1, 1, -1]
    assert kept(keys, 2) == [[0, 1]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_key_without_a_finite_length_is_refused(bad: float) -> None:
    keys = draw((2, 30, 32))
    keys[1, 5, 3] = bad
    with pytest.raises(ModelError, match="^keydiff: a score is not finite"):
        kept(keys, 4)


@pytest.mark.parametrize("block", [0, 128, 8])
def test_the_method_uses_every_layers_own_keys(
    tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any], selector_oracles: ModuleType, block: int
) -> None:
    keys = [draw((1, 2, 40, 16), seed) for seed in range(3)]
    cache = PrefixCache(tuple(DenseLayer(mx.array(each), mx.array(each)) for each in keys), 40)
    subject = Subject(cache, tiny_model("llama"), list(range(40)), None)
    keep = drain(KeyDiff().rank(subject, registry.check_parameters(KeyDiff(), {"block": block})))
    for count in (3, 11, 40):
        expected = [
            [selector_oracles.keydiff_blockwise_rows(head, count, block or 40).tolist() for head in each[0]]
            for each in keys
        ]
        assert [[rows.tolist() for rows in heads] for heads in keep(count)] == expected


def test_the_default_is_the_papers_block() -> None:
    assert registry.check_parameters(KeyDiff(), {}).block == 128  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="^block: "):
        registry.check_parameters(KeyDiff(), {"block": -1})
