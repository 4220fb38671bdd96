"""L2Norm: the lowest norms stay, measured in fp32, and layers that are skipped keep everything."""

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
from kvferry.engine.selection import to_scores, top_rows
from kvferry.sender import registry
from kvferry.sender.kv.l2norm import L2Norm, norm_scores, skipped_layers
from kvferry.sender.kv.selecting import Subject

SHAPES = [(3, 70, 64), (2, 33, 32), (3, 50, 128), (2, 21, 256)]


def rows_of(keys: mx.array, count: int) -> list[list[int]]:
    return [rows.tolist() for rows in top_rows(to_scores("l2norm", norm_scores(keys)), count)]


def draw(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rows_are_those_of_the_formula(shape: tuple[int, int, int], selector_oracles: ModuleType) -> None:
    keys = draw(shape)
    scores = selector_oracles.l2norm_scores(keys)
    assert np.abs(np.array(norm_scores(mx.array(keys))) - scores).max() < 1e-5
    for count in (1, 7, shape[1] - 1, shape[1]):
        assert rows_of(mx.array(keys), count) == [selector_oracles.keep(head, count).tolist() for head in scores]


def test_a_short_key_stays_and_a_long_one_goes() -> None:
    keys = draw((1, 20, 64))
    keys[0, 7] *= 0.1
    keys[0, 12] *= 10
    assert rows_of(mx.array(keys), 1) == [[7]]
    assert set(range(20)) - set(rows_of(mx.array(keys), 19)[0]) == {12}


def test_bf16_keys_are_measured_in_fp32(selector_oracles: ModuleType) -> None:
    """Norms rounded to bf16 tie by the dozen, and ties keep other rows."""
    keys = mx.array(draw((3, 400, 64))).astype(mx.bfloat16)
    exact = selector_oracles.l2norm_scores(np.array(keys.astype(mx.float32)))
    expected = [selector_oracles.keep(head, 100).tolist() for head in exact]
    assert rows_of(keys, 100) == expected
    rounded = -mx.linalg.norm(keys, axis=-1)
    assert len(set(np.array(rounded.astype(mx.float32))[0].tolist())) < 200
    assert [rows.tolist() for rows in top_rows(to_scores("bf16", rounded), 100)] != expected


def test_rotation_does_not_matter(selector_oracles: ModuleType) -> None:
    plain = draw((2, 40, 32))
    turned = selector_oracles.rotate(plain, np.arange(40)).astype(np.float32)
    assert rows_of(mx.array(plain), 11) == rows_of(mx.array(turned), 11)


def test_equal_norms_go_to_the_lower_rows() -> None:
    keys = np.zeros((2, 30, 32), dtype=np.float32)
    keys[:, np.arange(30), np.arange(30)] = 2.0
    assert rows_of(mx.array(keys), 4) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_norm_that_is_not_finite_is_refused(bad: float) -> None:
    keys = draw((2, 30, 32))
    keys[1, 5, 3] = bad
    with pytest.raises(ModelError, match="^l2norm: a score is not finite"):
        rows_of(mx.array(keys), 4)


@pytest.fixture(scope="module")
def subject(tiny_model: Callable[..., LoadedModel]) -> Subject:
    """Four layers of two heads; what the model is does not matter."""
    layers = tuple(
        DenseLayer(mx.array(draw((1, 2, 40, 16), seed)), mx.array(draw((1, 2, 40, 16), seed + 9))) for seed in range(4)
    )
    return Subject(PrefixCache(layers, 40), tiny_model("llama"), list(range(40)), None)


def counts(subject: Subject, drain: Callable[..., Any], count: int, **given: Any) -> list[list[int]]:
    keep = drain(L2Norm().rank(subject, registry.check_parameters(L2Norm(), given)))
    return [[len(rows) for rows in heads] for heads in keep(count)]


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ({}, set()),
        ({"skip_layers": 0}, set()),
        ({"skip_layers": 2}, {0, 1}),
        ({"skip_layers": 4}, {0, 1, 2, 3}),
        ({"skip_layers": "0,3"}, {0, 3}),
        ({"skip_layers": "2,"}, {2}),
        ({"skip_layers": "1,1,1"}, {1}),
        ({"prune_after": 40}, set()),
        ({"prune_after": 41}, {0, 1, 2, 3}),
    ],
)
def test_layers_that_keep_every_row(
    subject: Subject, drain: Callable[..., Any], given: dict[str, Any], full: set[int]
) -> None:
    assert counts(subject, drain, 13, **given) == [[40, 40] if layer in full else [13, 13] for layer in range(4)]


@pytest.mark.parametrize("wrong", [5, "0,4", "99,", 10**6])
def test_layers_that_are_not_there_are_refused(subject: Subject, drain: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^skip_layers: {wrong!r} speaks of layer .* the model has 0 to 3"):
        counts(subject, drain, 13, skip_layers=wrong)


@pytest.mark.parametrize("wrong", [-1, "", "3", "a,", "1,,2", ",1", 0.5, True])
def test_other_ways_to_write_layers_are_refused_by_name(wrong: Any) -> None:
    """A text without a comma could mean a layer or how many."""
    with pytest.raises(InvalidRequestError, match="^skip_layers: "):
        registry.check_parameters(L2Norm(), {"skip_layers": wrong})


def test_skipped_layers_are_a_set() -> None:
    assert skipped_layers(0, 4) == frozenset()
    assert skipped_layers("3,0", 4) == {0, 3}


def test_a_budget_holds_at_any_length_by_default(subject: Subject, drain: Callable[..., Any]) -> None:
    assert counts(subject, drain, 1) == [[1, 1]] * 4
