"""Arrays to wire bytes and back, bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import ModelError
from kvferry.engine.tensors import dtype_name, from_bytes, to_bytes

DTYPES = {
    "F16": (mx.float16, "<u2"),
    "BF16": (mx.bfloat16, "<u2"),
    "F32": (mx.float32, "<u4"),
    "I32": (mx.int32, "<u4"),
    "U32": (mx.uint32, "<u4"),
    "U8": (mx.uint8, "u1"),
}
# Signalling and quiet NaNs with payloads, infinities, both zeros, the smallest subnormal, one.
ODD_WORDS = {
    "F16": [0x7C01, 0x7E55, 0xFC01, 0x7C00, 0xFC00, 0x8000, 0x0000, 0x0001, 0x3C00, 0x7BFF],
    "BF16": [0x7F81, 0x7FD5, 0xFF81, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x3F80, 0x7F7F],
    "F32": [0x7F800001, 0x7FC12345, 0xFF800001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x3F800000, 0x7F7FFFFF],
    "I32": [0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0, 1],
    "U32": [0x80000000, 0xFFFFFFFF, 0x01020304, 0, 1],
    "U8": [0, 1, 127, 128, 255],
}


def array_of_words(name: str, words: Any) -> mx.array:
    """Make an array of a dtype from its bit patterns."""
    dtype, word = DTYPES[name]
    return mx.array(np.array(words, dtype=word)).view(dtype)


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.itemsize]))


@pytest.mark.parametrize("name", DTYPES)
def test_odd_bit_patterns_survive(name: str) -> None:
    words = ODD_WORDS[name]
    array = array_of_words(name, words)
    assert dtype_name(array) == name
    wire = bytes(to_bytes(array))
    assert wire == b"".join(word.to_bytes(array.itemsize, "little") for word in words)
    back = from_bytes(wire, dtype_name(array), (len(words),))
    assert back.dtype == DTYPES[name][0]
    assert bits(back).tolist() == words


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_of_a_random_tensor_survives(name: str) -> None:
    word = DTYPES[name][1]
    shape = (1, 3, 50, 16)
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2 ** (8 * np.dtype(word).itemsize), shape, dtype=np.uint64).astype(word)
    array = array_of_words(name, words)
    back = from_bytes(to_bytes(array), dtype_name(array), shape)
    assert back.shape == shape
    assert np.array_equal(bits(back), words)


@pytest.mark.parametrize("name", DTYPES)
def test_strided_input_is_put_in_order(name: str) -> None:
    words = np.arange(2 * 3 * 8 * 4).reshape(2, 3, 8, 4) % 251
    array = array_of_words(name, words)
    views = {
        "transposed": (array.transpose(0, 2, 1, 3), words.transpose(0, 2, 1, 3)),
        "padded": (array[:, :, :5], words[:, :, :5]),
        "every other": (array[:, :, ::2], words[:, :, ::2]),
        "broadcast": (mx.broadcast_to(array[:1], (2, 3, 8, 4)), np.broadcast_to(words[:1], words.shape)),
    }
    for label, (view, expected) in views.items():
        mx.eval(view)
        back = from_bytes(to_bytes(view), dtype_name(view), tuple(view.shape))
        assert np.array_equal(bits(back), expected), label


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1, 3, 0, 16), ()])
def test_empty_arrays_and_scalars(name: str, shape: tuple[int, ...]) -> None:
    array = mx.ones(shape, dtype=DTYPES[name][0])
    wire = to_bytes(array)
    assert len(wire) == wire.nbytes == array.nbytes
    back = from_bytes(wire, dtype_name(array), shape)
    assert (back.dtype, back.shape) == (array.dtype, shape)
    assert np.array_equal(bits(back), bits(array))


def test_values_are_what_the_bytes_say() -> None:
    assert bytes(to_bytes(mx.array([1.5, -2.0], dtype=mx.float32))) == struct.pack("<2f", 1.5, -2.0)
    assert bytes(to_bytes(mx.array([1.5, -2.0], dtype=mx.float16))) == struct.pack("<2e", 1.5, -2.0)
    # bf16 is the upper half of fp32.
    assert bytes(to_bytes(mx.array([1.5, -2.0], dtype=mx.bfloat16))) == bytes.fromhex("c03f00c0")
    assert from_bytes(bytes.fromhex("c03f00c0"), "BF16", (2,)).tolist() == [1.5, -2.0]


def test_the_result_holds_a_copy() -> None:
    data = bytearray(struct.pack("<3f", 1, 2, 3))
    array = from_bytes(memoryview(data), "F32", (3,))
    data[:] = bytes(12)
    assert array.tolist() == [1, 2, 3]


def test_bytes_stay_when_the_array_goes() -> None:
    array = mx.arange(1000, dtype=mx.int32) + 1
    wire = to_bytes(array)
    del array
    mx.clear_cache()
    mx.eval(mx.zeros(1000, dtype=mx.int32))
    assert struct.unpack("<1000i", wire) == tuple(range(1, 1001))


@pytest.mark.parametrize("dtype", [mx.bool_, mx.float64, mx.int64, mx.uint16, mx.complex64])
def test_other_dtypes_do_not_travel(dtype: mx.Dtype) -> None:
    with mx.stream(mx.cpu), pytest.raises(ModelError, match=f"{dtype} does not travel; the wire knows F16, BF16"):
        dtype_name(mx.zeros(2, dtype=dtype))


def test_a_wrong_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="reshape"):
        from_bytes(bytes(12), "F32", (2,))
    with pytest.raises(ValueError, match="multiple"):
        from_bytes(bytes(11), "F32", (2,))
