"""Rows at positions of their own: rotated, un-rotated and moved, against the textbook and the modules themselves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from kvferry.engine.rope import NO_ROTATION, Rotation, describe

WIDTH, HEADS, ROWS = 16, 3, 11
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "type": "longrope",
    "long_factor": [2.0, 1.5] * 4,
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 1024,
}


def module(name: str) -> Any:
    made = {
        "plain": lambda: nn.RoPE(WIDTH, base=1e4),
        "traditional": lambda: nn.RoPE(WIDTH, traditional=True, base=1e4),
        "partial": lambda: nn.RoPE(8, base=1e6),
        "partial-traditional": lambda: nn.RoPE(4, traditional=True, base=1e4),
        "linear": lambda: nn.RoPE(WIDTH, base=1e4, scale=0.25),
        "llama3": lambda: initialize_rope(
            WIDTH, 1e4, traditional=False, scaling_config=LLAMA3, max_position_embeddings=256
        ),
        "yarn": lambda: initialize_rope(
            WIDTH, 1e4, traditional=False, scaling_config=YARN, max_position_embeddings=256
        ),
        "yarn-partial": lambda: initialize_rope(
            8, 1e4, traditional=True, scaling_config=YARN, max_position_embeddings=256
        ),
        "longrope": lambda: initialize_rope(
            WIDTH, 1e4, traditional=False, scaling_config=LONGROPE, max_position_embeddings=2048
        ),
    }
    return made[name]()


NAMES = [
    "plain",
    "traditional",
    "partial",
    "partial-traditional",
    "linear",
    "llama3",
    "yarn",
    "yarn-partial",
    "longrope",
]
each = pytest.mark.parametrize("name", NAMES)


def described(name: str) -> Rotation:
    rotation = describe(module(name))
    assert rotation is not None
    return rotation


def textbook(plain: np.ndarray[Any, Any], rotation: Rotation, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rotate [Hk, R, D] at [Hk, R], in float64: every pair turns by its angle and grows by the magnitude, once."""
    rope = rotation.rope
    pairs = np.arange(0, rope.dims, 2) / rope.dims
    wavelengths = np.array(rotation.freqs, np.float64) if rotation.freqs is not None else rope.base**pairs  # type: ignore[operator]
    angles = positions[..., None] * rope.scale / wavelengths
    half = rope.dims // 2
    first, second = (
        (slice(0, rope.dims, 2), slice(1, rope.dims, 2)) if rope.traditional else (slice(half), slice(half, rope.dims))
    )
    turned = plain.astype(np.float64).copy()
    a, b = plain[..., first] * rope.mscale, plain[..., second] * rope.mscale
    turned[..., first] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return turned


def draw(high: int = 500) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((HEADS, ROWS, WIDTH)), rng.integers(0, high, (HEADS, ROWS))


def floats(array: np.ndarray[Any, Any]) -> mx.array:
    return mx.array(array.astype(np.float32))


def ints(array: np.ndarray[Any, Any]) -> mx.array:
    return mx.array(array.astype(np.int32))


def apart(found: mx.array, expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(np.array(found) - expected).max())


@each
def test_rows_are_rotated_at_their_own_positions(name: str) -> None:
    rotation, (plain, positions) = described(name), draw()
    expected = textbook(plain, rotation, positions)
    assert np.abs(expected - plain).max() > 0.5
    assert apart(rotation.rotate_at(floats(plain), ints(positions)), expected) < 2e-4


@each
def test_rotating_is_what_the_module_does(name: str) -> None:
    """Not our formula: the module itself, one row at a time."""
    rotation, rope, (plain, positions) = described(name), module(name), draw()
    found = np.array(rotation.rotate_at(floats(plain), ints(positions)))
    for head in range(HEADS):
        for row in range(ROWS):
            # A copy, because some modules scale what they are given in place.
            single = rope(floats(plain[head, row])[None, None, None], offset=int(positions[head, row]))
            assert np.abs(np.array(single)[0, 0, 0] - found[head, row]).max() < 1e-5


@each
def test_rows_are_rotated_back_from_their_own_positions(name: str) -> None:
    rotation, (plain, positions) = described(name), draw()
    back = rotation.unrotate_at(floats(textbook(plain, rotation, positions)), ints(positions))
    assert apart(back, plain) < 2e-4


@each
def test_rows_in_order_are_rotated_back_alike(name: str) -> None:
    rotation, (turned, _) = described(name), draw()
    positions = np.tile(np.arange(40, 40 + ROWS), (HEADS, 1))
    one = rotation.unrotate(floats(turned)[None], 40)[0]
    assert apart(rotation.unrotate_at(floats(turned), ints(positions)), np.array(one)) < 1e-6


@each
@pytest.mark.parametrize("direction", [-1, 1])
def test_moved_rows_stand_where_they_would_have_been_written(name: str, direction: int) -> None:
    """The magnitude of YaRN and longrope stays what it was: moving rows does not apply it again."""
    rotation, (plain, here) = described(name), draw()
    there = np.maximum(here + direction * np.random.default_rng(6).integers(0, 300, here.shape), 0)
    moved = rotation.shift(floats(textbook(plain, rotation, here)), ints(there - here))
    assert apart(moved, textbook(plain, rotation, there)) < 2e-4


@pytest.mark.parametrize("name", ["yarn", "yarn-partial", "longrope"])
def test_these_have_a_magnitude_that_could_be_applied_twice(name: str) -> None:
    assert described(name).rope.mscale > 1.04


@each
def test_a_move_keeps_lengths_and_what_does_not_rotate(name: str) -> None:
    rotation, (rows, positions) = described(name), draw()
    given = floats(rows)
    moved = rotation.shift(given, ints(positions))
    assert np.allclose(np.linalg.norm(np.array(moved), axis=-1), np.linalg.norm(np.array(given), axis=-1), rtol=1e-5)
    dims = rotation.rope.dims
    assert np.array_equal(np.array(moved)[..., dims:], np.array(given)[..., dims:])
    assert dims == WIDTH or "partial" in name


@each
def test_no_move_is_no_change(name: str) -> None:
    rows = floats(draw()[0])
    moved = described(name).shift(rows, mx.zeros((HEADS, ROWS), dtype=mx.int32))
    assert apart(moved, np.array(rows)) < 1e-6


def test_half_precision_moves_in_fp32_and_is_rounded_once() -> None:
    rotation, (plain, here) = described("plain"), draw()
    rows = floats(textbook(plain, rotation, here)).astype(mx.bfloat16)
    moved = rotation.shift(rows, ints(-here))
    assert moved.dtype == mx.bfloat16
    exact = textbook(np.array(rows.astype(mx.float32)), rotation, -here)
    # bf16 keeps 8 bits: one rounding is off by at most 2^-9 of the number.
    assert (np.abs(np.array(moved.astype(mx.float32)) - exact) <= np.abs(exact) * 2.0**-8 + 2e-4).all()


def test_a_layer_without_rotation_stays_as_it_is() -> None:
    rotation, (rows, positions) = Rotation(NO_ROTATION, None), draw()
    given, where = floats(rows), ints(positions)
    for found in (
        rotation.shift(given, where),
        rotation.rotate_at(given, where),
        rotation.unrotate_at(given, where),
        rotation.unrotate(given[None], 7)[0],
    ):
        assert np.array_equal(np.array(found), np.array(given))
