"""MLX arrays to wire bytes and back, bit for bit. bf16 travels as its 16-bit words, since numpy has no bf16."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import numpy as np

from kvferry.core.errors import ModelError
from kvferry.core.manifest import Dtype

_WIRE_NAMES: dict[mx.Dtype, Dtype] = {
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.uint8: "U8",
}
_NUMPY_TYPES: dict[Dtype, str] = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "I32": "<i4", "U32": "<u4", "U8": "u1"}


def dtype_name(array: mx.array) -> Dtype:
    """Return the wire name of an array's dtype.

    Raises:
        ModelError: when the wire has no such dtype.
    """
    name = _WIRE_NAMES.get(array.dtype)
    if name is None:
        raise ModelError(f"dtype: {array.dtype} does not travel; the wire knows {', '.join(_NUMPY_TYPES)}")
    return name


def scalar(array: mx.array) -> float:
    """Return a one-element array's value."""
    return float(cast(float, array.item()))


def to_bytes(array: mx.array) -> memoryview:
    """Return an array's elements in C order, little-endian. Evaluates the array."""
    plain = mx.contiguous(array)
    if plain.dtype == mx.bfloat16:
        plain = plain.view(mx.uint16)
    # numpy shares MLX's memory here; the copy into order happens in mx.contiguous, once.
    flat = np.ascontiguousarray(np.array(plain, copy=False)).reshape(-1)
    return flat.view(np.uint8).data


def from_bytes(data: bytes | memoryview, dtype: Dtype, shape: tuple[int, ...]) -> mx.array:
    """Return the array that ``to_bytes`` wrote. Copies, so ``data`` may be released."""
    array = mx.array(np.frombuffer(data, dtype=_NUMPY_TYPES[dtype]).reshape(shape))
    return array.view(mx.bfloat16) if dtype == "BF16" else array
