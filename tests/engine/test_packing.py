"""Codes, scales and biases, to the bit: against NumPy references written from the formulas."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.packing import GROUPS, WIDTHS, Packed, choose_group, legal_groups, pack, unpack

Array = np.ndarray[Any, Any]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
DIMENSIONS = (32, 64, 96, 128, 256)


def rows(heads: int, count: int, width: int, seed: int = 0) -> Array:
    """Rows [1, Hk, R, D] with what is awkward: an outlier channel, groups of one sign, constants, zeros, tiny ones."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((1, heads, count, width)).astype(np.float32)
    found[..., 3] *= 30.0
    for row, special in enumerate((np.abs(found[0, 0]) + 1, -np.abs(found[0, 0]) - 1)):
        found[0, 0, row::8] = special[row::8]
    found[0, 0, 2::8] = 0.0
    found[0, 0, 3::8] = -2.5
    found[0, 0, 4::8] *= 1e-5
    return found


def words_of(packed: Packed) -> Array:
    return np.array(packed.codes)


def as_float(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32))


# Codes


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("width", "group"), [(width, group) for width in DIMENSIONS for group in legal_groups(width)])
def test_affine_codes_are_those_of_the_formula(quantisation_oracles: Any, bits: int, width: int, group: int) -> None:
    given = rows(2, 9, width)
    packed = pack(mx.array(given), bits, group)
    codes, scales, biases = quantisation_oracles.affine_encode(given, bits, group)
    assert np.array_equal(quantisation_oracles.unpack(words_of(packed), bits), codes)
    assert np.array_equal(as_float(packed.scales), scales)
    assert np.array_equal(as_float(packed.biases), biases)
    np.testing.assert_allclose(
        np.array(unpack(packed)), quantisation_oracles.affine_decode(codes, scales, biases, group), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_affine_codes_of_halves(quantisation_oracles: Any, bits: int, dtype: str) -> None:
    """Codes come from a scale that is not yet rounded; what is stored is rounded to the dtype of the rows."""
    given = mx.array(rows(2, 16, 64)).astype(DTYPES[dtype])
    packed = pack(given, bits, 64)
    assert packed.scales.dtype == packed.biases.dtype == DTYPES[dtype]
    codes, scales, biases = quantisation_oracles.affine_encode(as_float(given), bits, 64, dtype)
    assert np.array_equal(quantisation_oracles.unpack(words_of(packed), bits), codes)
    assert np.array_equal(as_float(packed.scales), scales)
    assert np.array_equal(as_float(packed.biases), biases)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group", GROUPS)
def test_codes_by_channel_are_kivis(quantisation_oracles: Any, bits: int, group: int) -> None:
    given = rows(2, 2 * group, 48)
    packed = pack(mx.array(given), bits, group, "channel", "minmax")
    assert words_of(packed).shape == (1, 2, 48, 2 * group * bits // 32)
    assert packed.rows == 2 * group
    restored = np.array(unpack(packed))
    for head in range(2):
        codes, scales, zeros, tail = quantisation_oracles.kivi_keys(given[0, head], bits, group, group)
        assert len(tail) == 0
        assert np.array_equal(quantisation_oracles.unpack(words_of(packed)[0, head], bits), codes.T)
        assert np.array_equal(np.array(packed.scales)[0, head], scales.T)
        assert np.array_equal(np.array(packed.biases)[0, head], zeros.T)
        expected = quantisation_oracles.kivi_restored_keys(codes, scales, zeros, tail)
        np.testing.assert_allclose(restored[0, head], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group", [32, 64])
def test_codes_by_token_are_kivis(quantisation_oracles: Any, bits: int, group: int) -> None:
    given = rows(2, 9, 64)
    packed = pack(mx.array(given), bits, group, "token", "minmax")
    for head in range(2):
        codes, scales, zeros, _ = quantisation_oracles.kivi_values(
            np.concatenate([given[0, head], given[0, head, :1]]), bits, group, 1
        )
        assert np.array_equal(quantisation_oracles.unpack(words_of(packed)[0, head], bits), codes)
        assert np.array_equal(np.array(packed.scales)[0, head], scales)
        assert np.array_equal(np.array(packed.biases)[0, head], zeros)


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_hold_codes_least_significant_bit_first(quantisation_oracles: Any, bits: int) -> None:
    """Whole numbers from 0 to the last code are their own codes under the rule of smallest and largest."""
    last = 2**bits - 1
    codes = np.random.default_rng(bits).integers(0, last, (1, 1, 5, 96), endpoint=True)
    codes[..., ::32], codes[..., 1::32] = 0, last
    packed = pack(mx.array(codes.astype(np.float32)), bits, 32, rule="minmax")
    assert np.array_equal(words_of(packed), quantisation_oracles.pack(codes, bits))
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes[0, 0, 0]))
    assert words_of(packed)[0, 0, 0].astype("<u4").tobytes() == number.to_bytes(96 * bits // 8, "little")
    # The same words, read by MLX.
    assert np.array_equal(np.array(unpack(packed)), codes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_fit_the_step_that_is_stored(quantisation_oracles: Any, bits: int, dtype: str) -> None:
    given = mx.array(np.random.default_rng(3).standard_normal((1, 1, 64, 64)).astype(np.float32)).astype(DTYPES[dtype])
    packed = pack(given, bits, 64, rule="minmax")
    step, low = as_float(packed.scales), as_float(packed.biases)
    codes = quantisation_oracles.unpack(words_of(packed), bits)
    error = np.abs(quantisation_oracles.affine_decode(codes, step, low, 64) - as_float(given))
    # Half a step, but for what lies above the last code because the step was rounded down.
    above = np.maximum(as_float(given).max(axis=-1, keepdims=True) - (low + (2**bits - 1) * step), 0)
    assert (error <= np.maximum(step * 0.501, above)).all()


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("rule", ["affine", "minmax"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_constant_groups_come_back(bits: int, rule: Any, axis: Any) -> None:
    levels = np.array([0.0, 1.0, -1.0, 3.25, -1e4, 1e-20], dtype=np.float32)
    given = np.repeat(np.resize(levels, 64)[:, None], 64, axis=1)[None, None]
    if axis == "channel":
        given = given.swapaxes(2, 3)
    restored = np.array(unpack(pack(mx.array(given), bits, 32, axis, rule)))
    np.testing.assert_allclose(restored, given, rtol=1e-6, atol=3e-5)


def test_one_wide_channel_does_not_cost_the_others_by_channel() -> None:
    """What KIVI is for: groups by token mix all channels, and one of them sets the step for all."""
    rng = np.random.default_rng(5)
    plain = rng.standard_normal((1, 2, 64, 64)).astype(np.float32)
    wide = plain.copy()
    wide[..., 7] *= 30
    others = [channel for channel in range(64) if channel != 7]

    def error(given: Array, axis: Any) -> float:
        restored = np.array(unpack(pack(mx.array(given), 4, 32, axis, "minmax")))
        return float(np.abs(restored - given)[..., others].mean())

    assert error(wide, "channel") == pytest.approx(error(plain, "channel"), rel=1e-6)
    assert error(wide, "token") > 3 * error(plain, "token")


# Refusals


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", ["affine", "minmax"])
@pytest.mark.parametrize("place", [0, 37, -1])
def test_what_is_not_finite_is_refused(bad: float, rule: Any, place: int) -> None:
    given = np.zeros(2 * 32 * 32, dtype=np.float32)
    given[place] = bad
    for axis in ("token", "channel"):
        with pytest.raises(ModelError, match="not finite"):
            pack(mx.array(given.reshape(1, 2, 32, 32)), 4, 32, axis, rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bits", "group", "axis"),
    [(7, 32, "token"), (1, 32, "token"), (4, 48, "token"), (4, 128, "token"), (4, 64, "channel"), (4, 16, "channel")],
)
@pytest.mark.parametrize("rule", ["affine", "minmax"])
def test_groups_and_widths_that_do_not_fit_are_refused(bits: int, group: int, axis: Any, rule: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^group: .* groups of {group} with {bits} bits"):
        pack(mx.zeros((1, 1, 96, 64)), bits, group, axis, rule)


def test_legal_groups() -> None:
    legal = {32: {32}, 64: {32, 64}, 96: {32}, 128: {32, 64, 128}, 192: {32, 64}, 256: {32, 64, 128}, 576: {32, 64}}
    assert {width: set(legal_groups(width)) for width in legal} == legal
    assert legal_groups(48) == legal_groups(80) == legal_groups(8) == ()
    for width in range(8, 300, 8):
        for group in GROUPS:
            # MLX itself is the judge.
            try:
                mx.eval(mx.quantize(mx.zeros((1, width)), group_size=group, bits=4))
                fits = True
            except ValueError:
                fits = False
            assert (group in legal_groups(width)) == fits


@pytest.mark.parametrize(
    ("width", "bits", "wanted", "group"),
    [
        (64, 8, None, 64),
        (128, 8, None, 64),
        (64, 2, None, 32),
        (96, 8, None, 32),
        (32, 4, None, 32),
        (576, 4, None, 64),
        (128, 4, 128, 128),
        (64, 4, 32, 32),
    ],
)
def test_a_group_is_found(width: int, bits: int, wanted: int | None, group: int) -> None:
    assert choose_group("key_group", width, bits, wanted) == group


@pytest.mark.parametrize(
    ("width", "wanted", "said"),
    [
        (80, None, "any does not divide the head dimension 80; legal group sizes: none"),
        (80, 32, "32 does not divide the head dimension 80; legal group sizes: none"),
        (96, 64, "64 does not divide the head dimension 96; legal group sizes: 32"),
        (64, 128, "128 does not divide the head dimension 64; legal group sizes: 64, 32"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_with_those_that_do(width: int, wanted: int | None, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^value_group: {said}$") as caught:
        choose_group("value_group", width, 4, wanted)
    assert caught.value.fields["field"] == "value_group"
    assert caught.value.fields["dimension"] == width


# Rows and products


@pytest.mark.parametrize("bits", WIDTHS)
def test_taking_rows_and_packing_commute(bits: int) -> None:
    given = mx.array(rows(3, 20, 64))
    wanted = mx.array([[0, 3, 7, 19], [1, 2, 3, 4], [5, 9, 11, 18]], dtype=mx.int32)
    after = pack(given, bits, 32).take(wanted)
    before = pack(mx.take_along_axis(given, wanted[None, :, :, None], axis=2), bits, 32)
    for one, other in zip(after.arrays, before.arrays, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(np.array(one), np.array(other))
    assert after.rows == 4


def test_rows_cannot_be_taken_out_of_groups_by_channel() -> None:
    packed = pack(mx.array(rows(2, 32, 64)), 4, 32, "channel", "minmax")
    with pytest.raises(InvalidRequestError, match="^axis: "):
        packed.take(mx.array([[0], [1]], dtype=mx.int32))
    with pytest.raises(ModelError, match="^axis: "):
        packed.weighted(mx.zeros((1, 2, 1, 32)))


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_products_are_those_of_the_values_that_codes_stand_for(bits: int, axis: Any) -> None:
    rng = np.random.default_rng(bits)
    packed = pack(mx.array(rng.standard_normal((1, 3, 64, 96)).astype(np.float32)), bits, 32, axis, "minmax")
    plain = np.array(unpack(packed)).astype(np.float64)
    queries = rng.standard_normal((1, 3, 6, 96)).astype(np.float32)
    np.testing.assert_allclose(
        np.array(packed.scores(mx.array(queries))), queries @ plain.swapaxes(2, 3), rtol=0, atol=1e-4
    )
    if axis == "token":
        weights = rng.random((1, 3, 6, 64)).astype(np.float32)
        np.testing.assert_allclose(np.array(packed.weighted(mx.array(weights))), weights @ plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bits", WIDTHS)
def test_a_head_is_its_part_of_all(bits: int, heads: int) -> None:
    given = mx.array(rows(heads, 32, 64))
    for axis in ("token", "channel"):
        packed = pack(given, bits, 32, axis, "minmax")  # type: ignore[arg-type]
        for head in range(heads):
            assert np.array_equal(np.array(unpack(packed.head(head))), np.array(unpack(packed))[:, head : head + 1])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("bits", WIDTHS)
def test_bytes_follow_the_formula(quantisation_oracles: Any, bits: int, dtype: str) -> None:
    size = DTYPES[dtype].size
    for width in DIMENSIONS:
        for group in legal_groups(width):
            packed = pack(mx.array(rows(3, 7, width)).astype(DTYPES[dtype]), bits, group)
            expected = quantisation_oracles.affine_bytes(3, 7, width, bits, group, size)
            assert packed.nbytes == sum(array.nbytes for array in packed.arrays) == expected
