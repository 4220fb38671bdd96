from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def test_a_group_by_hand(quantisation_oracles: Any) -> None:
    # 2 bits, -1..2: the edge is 2, s = -1, q0 = -2, bias 2: codes (w - 2) / -1.
    codes, scale, bias = quantisation_oracles.affine_group(np.float32([-1, 0, 1, 2]), 2)
    assert (codes.tolist(), scale, bias) == ([3, 2, 1, 0], -1, 2)
    # -2..1: the edge is -2, s = 1.
    codes, scale, bias = quantisation_oracles.affine_group(np.float32([-2, 0, 0.4, 1]), 2)
    assert (codes.tolist(), scale, bias) == ([0, 2, 2, 3], 1, -2)
    # 0.5..0.8: s = -0.1, q0 = -8, so s = -0.8 / 8 and the code of 0.5 is 3.
    codes, scale, bias = quantisation_oracles.affine_group(np.float32([0.5, 0.8]), 2)
    assert codes.tolist() == [3, 0]
    assert (scale, bias) == (pytest.approx(-0.1), pytest.approx(0.8))


def test_a_constant_group_has_the_smallest_scale(quantisation_oracles: Any) -> None:
    codes, scale, bias = quantisation_oracles.affine_group(np.float32([0, 0]), 4)
    assert (codes.tolist(), abs(scale), bias) == ([0, 0], np.float32(1e-7), 0)
    # Smaller still: the edge is less than half a step from 0.
    codes, scale, bias = quantisation_oracles.affine_group(np.float32([3e-8, -1e-8]), 4)
    assert (codes.tolist(), abs(scale), bias) == ([0, 0], np.float32(1e-7), 0)
    codes, scale, bias = quantisation_oracles.affine_group(np.float32([3, 3]), 4)
    assert abs(scale) == pytest.approx(1e-7, rel=1e-6)
    assert scale * codes[0] + bias == 3


def test_zero_and_the_larger_edge_are_exact(quantisation_oracles: Any) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((20, 32)).astype(np.float32)
    w[:, 7] = 0
    codes, scales, biases = quantisation_oracles.affine_encode(w, 4, 32)
    back = quantisation_oracles.affine_decode(codes, scales, biases, 32)
    assert np.abs(back[:, 7]).max() < 1e-6
    edge = np.abs(w).argmax(axis=1)
    assert np.array_equal(back[range(20), edge], w[range(20), edge])
    assert (scales < 0).any()
    assert (scales > 0).any()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("group", "dim"), [(32, 96), (64, 128), (128, 128)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_encoder_and_the_packing_are_those_of_mlx(
    quantisation_oracles: Any, bits: int, group: int, dim: int, dtype: str
) -> None:
    w = np.random.default_rng(bits).standard_normal((6, dim)).astype(np.float32)
    w[0] = -np.abs(w[0])
    w[1] = np.abs(w[1])
    w[2] = 1.5
    w[3] *= 1e-8
    w = quantisation_oracles.rounded(w, dtype)
    # On the CPU: the rule is that of its encoder.
    words, *rest = mx.quantize(mx.array(w).astype(DTYPES[dtype]), group, bits, stream=mx.cpu)
    codes, scales, biases = quantisation_oracles.affine_encode(w, bits, group, dtype)
    assert np.array_equal(quantisation_oracles.pack(codes, bits), np.array(words))
    assert np.array_equal(quantisation_oracles.unpack(np.array(words), bits), codes)
    for ours, theirs in zip((scales, biases), rest, strict=True):
        assert np.array_equal(ours, np.array(theirs.astype(mx.float32)))
    back = mx.dequantize(words, *rest, group, bits, stream=mx.cpu).astype(mx.float32)
    tolerance = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    assert np.abs(quantisation_oracles.affine_decode(codes, scales, biases, group) - np.array(back)).max() < tolerance


def test_bits_lie_in_the_stream_lowest_first(quantisation_oracles: Any) -> None:
    codes = np.zeros(32, dtype=np.uint8)
    codes[:3] = [0b001, 0b110, 0b101]
    codes[10] = 0b111
    # 3 bits: code 10 takes bits 30 to 32 and straddles two words.
    words = quantisation_oracles.pack(codes, 3)
    assert words.tolist() == [0b101_110_001 | 0b11 << 30, 1, 0]
    assert quantisation_oracles.unpack(words, 3).tolist() == codes.tolist()
    assert quantisation_oracles.pack(np.uint8([0x12, 0x34, 0x56, 0x78]), 8).tolist() == [0x78563412]
    with pytest.raises(ValueError, match="do not fill"):
        quantisation_oracles.pack(np.zeros(10, dtype=np.uint8), 3)


def test_gathering_commutes_with_per_token_groups_only(quantisation_oracles: Any) -> None:
    w = np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)
    rows = [0, 3, 4, 11]
    whole = quantisation_oracles.affine_encode(w, 8, 32)
    for before, after in zip(whole, quantisation_oracles.affine_encode(w[rows], 8, 32), strict=True):
        assert np.array_equal(before[rows], after)
    per_channel = quantisation_oracles.kivi_keys(w, 8, 4, 4)[0]
    assert not np.array_equal(per_channel[rows], quantisation_oracles.kivi_keys(w[rows], 8, 4, 4)[0])


def test_what_cannot_be_quantised_is_refused(quantisation_oracles: Any) -> None:
    for odd in (np.nan, np.inf):
        with pytest.raises(ValueError, match="finite"):
            quantisation_oracles.affine_encode(np.float32([odd] * 32), 4, 32)
    with pytest.raises(ValueError, match="48 does not divide by 32"):
        quantisation_oracles.affine_encode(np.zeros(48, dtype=np.float32), 4, 32)


def test_bfloat16_rounds_half_to_even(quantisation_oracles: Any) -> None:
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.14159])
    ours = quantisation_oracles.rounded(values, "bfloat16")
    assert ours[:3].tolist() == [1, 1 + 2**-6, 1 + 2**-7]
    assert np.array_equal(ours, np.array(mx.array(values).astype(mx.bfloat16).astype(mx.float32)))


@pytest.mark.parametrize(
    ("bits", "group", "expected"),
    [
        (8, 64, 1.88),
        (6, 64, 2.46),
        (5, 64, 2.91),
        (4, 64, 3.56),
        (4, 32, 3.2),
        (3, 64, 4.57),
        (2, 64, 6.4),
        (2, 32, 5.33),
    ],
)
def test_ratios_and_bytes(quantisation_oracles: Any, bits: int, group: int, expected: float) -> None:
    assert quantisation_oracles.ratio(bits, group) == pytest.approx(expected, abs=0.005)
    size = quantisation_oracles.affine_bytes(3, 10, 128, bits, group)
    assert size == 3 * 10 * (128 * bits / 8 + 4 * 128 / group)
    assert 3 * 10 * 128 * 2 / size == pytest.approx(expected, abs=0.005)
    words, scales, biases = mx.quantize(mx.zeros((3, 10, 128), mx.bfloat16), group, bits)
    assert size == words.nbytes + scales.nbytes + biases.nbytes


@pytest.mark.parametrize(
    ("length", "appended", "tails"),
    [
        (31, 0, (31, 31)),
        (32, 0, (0, 32)),
        (33, 0, (1, 32)),
        (64, 0, (0, 32)),
        (5, 0, (5, 5)),
        (31, 1, (0, 32)),
        (32, 1, (1, 32)),
        (5, 26, (31, 31)),
        (5, 27, (0, 32)),
        (5, 28, (1, 32)),
    ],
)
def test_kivi_tails(quantisation_oracles: Any, length: int, appended: int, tails: tuple[int, int]) -> None:
    assert quantisation_oracles.kivi_tails(length, 32, appended) == tails
    x = np.random.default_rng(2).standard_normal((length + appended, 8)).astype(np.float32)
    *_, keys = quantisation_oracles.kivi_keys(x, 2, 8, 32)
    *_, values = quantisation_oracles.kivi_values(x, 2, 8, 32)
    assert np.array_equal(keys, x[len(x) - tails[0] :])
    assert np.array_equal(values, x[len(x) - tails[1] :])


def test_a_kivi_group_by_hand(quantisation_oracles: Any) -> None:
    codes, scale, zero = quantisation_oracles.kivi_group(np.float32([1, 4, 2.4, 2.6]), 2)
    assert (codes.tolist(), scale, zero) == ([0, 3, 1, 2], 1, 1)
    codes, scale, zero = quantisation_oracles.kivi_group(np.float32([5, 5]), 2)
    assert (codes.tolist(), scale, zero) == ([0, 0], 0, 5)


def test_keys_are_grouped_by_channel_and_values_by_token(quantisation_oracles: Any) -> None:
    keys = np.float32([[0, 10], [3, 10], [1, 40], [2, 20], [9, 9]])
    codes, scales, zeros, tail = quantisation_oracles.kivi_keys(keys, 2, 2, 4)
    assert codes.tolist() == [[0, 0], [3, 0], [0, 3], [3, 0]]
    assert scales.tolist() == [[1, 0], [pytest.approx(1 / 3), pytest.approx(20 / 3)]]
    assert zeros.tolist() == [[0, 10], [1, 20]]
    assert tail.tolist() == [[9, 9]]
    values = np.float32([[0, 3, 5, 5], [1, 1, 1, 1]])
    codes, scales, zeros, tail = quantisation_oracles.kivi_values(values, 2, 2, 1)
    assert (codes.tolist(), scales.tolist(), zeros.tolist()) == ([[0, 3, 0, 0]], [[1, 0]], [[0, 5]])
    assert tail.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("encoder", ["kivi_group", "affine_group"])
def test_an_outlier_channel_harms_values_and_not_keys(quantisation_oracles: Any, encoder: str) -> None:
    x = np.random.default_rng(3).standard_normal((64, 32)).astype(np.float32)
    big = x.copy()
    big[:, 5] *= 30
    others = np.arange(32) != 5
    options = {"bits": 2, "group": 32, "residual": 32, "encoder": getattr(quantisation_oracles, encoder)}

    def errors(kind: str, array: Any) -> Any:
        encoded = getattr(quantisation_oracles, f"kivi_{kind}")(array, **options)
        return np.abs(getattr(quantisation_oracles, f"kivi_restored_{kind}")(*encoded) - array)[:, others]

    assert np.array_equal(errors("keys", big), errors("keys", x))
    assert errors("values", big).max() > 2 * errors("values", x).max()


def test_keys_appended_one_by_one_make_the_same_blocks(quantisation_oracles: Any) -> None:
    keys = np.random.default_rng(4).standard_normal((70, 8)).astype(np.float32)
    whole, scales, _, tail = quantisation_oracles.kivi_keys(keys, 4, 8, 16)
    blocks, pending = [], []
    for key in keys:
        pending.append(key)
        if len(pending) == 16:
            blocks.append(quantisation_oracles.kivi_keys(np.array(pending), 4, 8, 16)[:2])
            pending = []
    assert np.array_equal(np.concatenate([codes for codes, _ in blocks]), whole)
    assert np.array_equal(np.concatenate([steps for _, steps in blocks]), scales)
    assert np.array_equal(tail, pending)


def test_kivi_groups_must_fit(quantisation_oracles: Any) -> None:
    x = np.zeros((40, 40), dtype=np.float32)
    with pytest.raises(ValueError, match="48 does not divide by 32"):
        quantisation_oracles.kivi_keys(x, 2, 32, 48)
    with pytest.raises(ValueError, match="40 does not divide by 32"):
        quantisation_oracles.kivi_values(x, 2, 32, 32)
