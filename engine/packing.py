"""Packed tensors: codes of a few bits in groups, each with a scale and a bias, as ``mx.quantized_matmul`` reads them.

A value is ``scale * code + bias``. Codes of one row stand in uint32 words, least significant bit first, without
padding. Groups lie along the head dimension ("token": every row has its own) or along the rows ("channel": every
channel has its own, over ``group`` rows). Sources: ``mx.quantize`` for the affine rule; KIVI, arXiv 2402.02750, for
keys by channel.

Symbols: Hk KV heads, R rows, D head dimension, b bits, g group size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.limits import PACKED_GROUPS as GROUPS
from kvferry.core.limits import PACKED_WIDTHS as WIDTHS

Axis = Literal["token", "channel"]
Rule = Literal["affine", "minmax"]
_WORD_BITS = 32


@dataclass(frozen=True)
class Packed:
    """A packed tensor [1, Hk, R, D].

    Attributes:
        codes: uint32; "token": [1, Hk, R, D * b / 32], "channel": [1, Hk, D, R * b / 32].
        scales, biases: the cache's dtype; "token": [1, Hk, R, D / g], "channel": [1, Hk, D, R / g].
        bits, group: b and g.
        axis: along what the groups lie.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group: int
    axis: Axis = "token"

    @property
    def rows(self) -> int:
        """R."""
        if self.axis == "token":
            return int(self.codes.shape[2])
        return int(self.scales.shape[3]) * self.group

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.codes.nbytes + self.scales.nbytes + self.biases.nbytes)

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Codes, scales and biases."""
        return self.codes, self.scales, self.biases

    def head(self, index: int) -> Packed:
        """Return one KV head."""
        codes, scales, biases = (part[:, index : index + 1] for part in self.arrays)
        return Packed(codes, scales, biases, self.bits, self.group, self.axis)

    def take(self, rows: mx.array) -> Packed:
        """Return only some rows, int32 [Hk, R'].

        Raises:
            InvalidRequestError: for groups by channel, which mix rows.
        """
        if self.axis == "channel":
            raise InvalidRequestError("axis: rows cannot be taken out of groups by channel; select before packing")
        index = rows[None, :, :, None]
        parts = [mx.contiguous(mx.take_along_axis(part, index, axis=2)) for part in self.arrays]
        return Packed(parts[0], parts[1], parts[2], self.bits, self.group)

    def scores(self, queries: mx.array) -> mx.array:
        """Return queries [1, Hk, M, D] against the rows: [1, Hk, M, R]."""
        return mx.quantized_matmul(
            queries, *self.arrays, transpose=self.axis == "token", group_size=self.group, bits=self.bits
        )

    def weighted(self, weights: mx.array) -> mx.array:
        """Return weights [1, Hk, M, R] times the rows: [1, Hk, M, D].

        Raises:
            ModelError: for groups by channel.
        """
        if self.axis == "channel":
            raise ModelError("axis: values are packed by token")
        return mx.quantized_matmul(weights, *self.arrays, transpose=False, group_size=self.group, bits=self.bits)


def legal_groups(dimension: int) -> tuple[int, ...]:
    """Return the group sizes that MLX can pack a dimension with, largest first."""
    return tuple(group for group in reversed(GROUPS) if dimension % group == 0)


def choose_group(field: str, dimension: int, bits: int, wanted: int | None) -> int:
    """Return a legal group size: the one asked for, else 64, or 32 for 2 bits, else the nearest that fits.

    Raises:
        InvalidRequestError: when the one asked for, or every one, does not fit the dimension.
    """
    legal = legal_groups(dimension)
    if wanted is not None and wanted in legal:
        return wanted
    if wanted is not None or not legal:
        shown = ", ".join(str(group) for group in legal) or "none"
        raise InvalidRequestError(
            f"{field}: {wanted or 'any'} does not divide the head dimension {dimension}; legal group sizes: {shown}",
            field=field,
            value=wanted or 0,
            dimension=dimension,
        )
    preferred = 32 if bits == min(WIDTHS) else 64
    return preferred if preferred in legal else legal[-1]


def pack(rows: mx.array, bits: int, group: int, axis: Axis = "token", rule: Rule = "affine") -> Packed:
    """Pack finite rows [1, Hk, R, D].

    Args:
        rows: what to pack. By channel R must be a multiple of ``group``.
        bits: code width, one of ``WIDTHS``.
        group: a legal group size.
        axis: along what the groups lie.
        rule: "affine" is ``mx.quantize``'s; "minmax" puts the smallest value at code 0 and the largest at the last.

    Raises:
        ModelError: when a value is not finite. MLX would turn NaN into finite numbers.
        InvalidRequestError: when bits or group do not fit.
    """
    if not mx.all(mx.isfinite(rows)).item():
        raise ModelError("rows: hold numbers that are not finite; they cannot be packed")
    across = rows.shape[2] if axis == "channel" else rows.shape[3]
    if bits not in WIDTHS or group not in GROUPS or across % group:
        raise InvalidRequestError(
            f"group: {across} numbers by {axis} cannot be packed in groups of {group} with {bits} bits",
            field="group",
            value=group,
        )
    plain = mx.contiguous(rows.swapaxes(2, 3) if axis == "channel" else rows)
    if rule == "affine":
        codes, scales, biases = mx.quantize(plain, group_size=group, bits=bits)
    else:
        codes, scales, biases = _minmax(plain, bits, group)
    mx.eval(codes, scales, biases)
    return Packed(codes, scales, biases, bits, group, axis)


def unpack(packed: Packed) -> mx.array:
    """Return the values that a packed tensor stands for, [1, Hk, R, D]. For checks; attention never needs them."""
    plain: mx.array = mx.dequantize(*packed.arrays, group_size=packed.group, bits=packed.bits)
    return plain.swapaxes(2, 3) if packed.axis == "channel" else plain


def _minmax(plain: mx.array, bits: int, group: int) -> tuple[mx.array, mx.array, mx.array]:
    *leading, width = plain.shape
    groups = plain.astype(mx.float32).reshape(*leading, width // group, group)
    low, high = mx.min(groups, axis=-1, keepdims=True), mx.max(groups, axis=-1, keepdims=True)
    last = 2**bits - 1
    # As it will be stored: codes that fit a finer step would not be the nearest.
    step = ((high - low) / last).astype(plain.dtype).astype(mx.float32)
    codes = mx.round((groups - low) / mx.where(step > 0, step, 1.0))
    codes = mx.clip(codes, 0, last).astype(mx.uint32).reshape(*leading, width)
    return (
        _words(codes, bits),
        step.squeeze(-1).astype(plain.dtype),
        low.squeeze(-1).astype(plain.dtype),
    )


def _words(codes: mx.array, bits: int) -> mx.array:
    """Join codes [..., n] to uint32 words [..., n * bits / 32], least significant bit first."""
    *leading, width = codes.shape
    # One bit an element: widths that do not divide 32 straddle words.
    stream = (codes[..., None] >> mx.arange(bits, dtype=mx.uint32)) & 1
    words = stream.reshape(*leading, math.prod((width, bits)) // _WORD_BITS, _WORD_BITS)
    return mx.sum(words << mx.arange(_WORD_BITS, dtype=mx.uint32), axis=-1).astype(mx.uint32)
