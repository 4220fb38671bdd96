"""Affine quantisation as ``mx.quantize`` does it on the CPU, its packing, and KIVI.

Arithmetic is float32, one rounding an operation, because codes are compared exactly. bfloat16 values are held in
float32 arrays.
"""

import numpy as np


def rounded(values, dtype):
    """Values to the nearest of "float32", "float16" or "bfloat16" (ties to even), held in float32."""
    values = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        even = (bits >> 16) & 1
        return ((bits + 0x7FFF + even) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
    raise ValueError(dtype)


def affine_group(group, bits):
    """Codes, scale and bias of one group [g]; the scale may be negative, 0.0 and the larger edge are exact."""
    n = np.float32(2**bits - 1)
    low, high = np.float32(min(group)), np.float32(max(group))
    scale = max((high - low) / n, np.float32(1e-7))
    if abs(low) > abs(high):
        edge = low
    else:
        edge, scale = high, -scale
    steps = np.rint(edge / scale)
    if steps != 0:
        scale, bias = edge / steps, edge
    else:
        bias = np.float32(0)
    codes = [np.clip(np.rint((w - bias) / scale), 0, n) for w in group]
    return np.array(codes, dtype=np.uint8), np.float32(scale), np.float32(bias)


def affine_encode(array, bits, group, dtype="float32"):
    """Codes uint8 [..., D], scales and biases [..., D/g] of groups along the last axis.

    The codes come from scale and bias before these are rounded to ``dtype``, that of the input. Non-finite: refused.
    """
    array = np.asarray(array, dtype=np.float32)
    D = array.shape[-1]
    if not np.isfinite(array).all():
        raise ValueError("a value is not finite")
    if D % group:
        raise ValueError(f"{D} does not divide by {group}")
    codes = np.empty(array.shape, dtype=np.uint8)
    scales = np.empty((*array.shape[:-1], D // group), dtype=np.float32)
    biases = np.empty_like(scales)
    for at in np.ndindex(*scales.shape):
        part = slice(at[-1] * group, (at[-1] + 1) * group)
        codes[at[:-1]][part], scales[at], biases[at] = affine_group(array[at[:-1]][part], bits)
    return codes, rounded(scales, dtype), rounded(biases, dtype)


def affine_decode(codes, scales, biases, group):
    """w' = scale * code + bias, float32; scales and biases as stored, codes unpacked."""
    scales, biases = (np.repeat(np.asarray(x, dtype=np.float32), group, axis=-1) for x in (scales, biases))
    return scales * np.asarray(codes, dtype=np.float32) + biases


def pack(codes, bits):
    """Codes [..., D] to uint32 [..., D * bits / 32]: one little-endian stream a row, least significant bit first."""
    codes = np.asarray(codes, dtype=np.uint8)
    if codes.shape[-1] * bits % 32:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill words")
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def unpack(words, bits):
    """The codes uint8 [..., D] of uint32 words [..., D * bits / 32]."""
    words = np.ascontiguousarray(words, dtype="<u4")
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(*words.shape[:-1], words.shape[-1] * 32 // bits, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]


def affine_bytes(kv_heads, rows, dim, bits, group, scale_bytes=2):
    """Bytes of one tensor of a layer: Hk * T * (D * bits / 8 + 2 * scale_bytes * D / g)."""
    return kv_heads * rows * (dim * bits // 8 + 2 * scale_bytes * dim // group)


def ratio(bits, group):
    """16 / (bits + 32 / g), against 16 bits an element. Of K and V together: the mean of the two denominators."""
    return 16 / (bits + 32 / group)


def kivi_group(group, bits):
    """KIVI: scale = (max - min) / (2^b - 1), zero = min, code = round(clamp). A constant group has scale 0, code 0."""
    n = np.float32(2**bits - 1)
    low, high = np.float32(min(group)), np.float32(max(group))
    scale = (high - low) / n
    if scale == 0:
        return np.zeros(len(group), dtype=np.uint8), scale, low
    codes = [np.rint(np.clip((w - low) / scale, 0, n)) for w in group]
    return np.array(codes, dtype=np.uint8), scale, low


def kivi_tails(length, residual, appended=0):
    """Full-precision rows of (keys, values) after a prefill of T rows and ``appended`` single ones.

    Prefill: keys the last T mod R, values the last R. Then keys are quantised when their tail is R long, of the values
    the one oldest row at a time.
    """
    keys, values = length % residual, min(length, residual)
    for _ in range(appended):
        keys = (keys + 1) % residual
        values = min(values + 1, residual)
    return keys, values


def kivi_keys(keys, bits, group, residual, encoder=kivi_group):
    """Keys [T, D], per channel: codes [T - t, D], scales and zeros [(T - t) / g, D], tail [t, D], t = T mod R.

    A group is g consecutive rows of one channel. ``encoder`` is ``affine_group`` where ``mx.quantize`` encodes them.
    """
    keys = np.asarray(keys, dtype=np.float32)
    if residual % group:
        raise ValueError(f"{residual} does not divide by {group}")
    T, D = keys.shape
    done = T - kivi_tails(T, residual)[0]
    codes = np.empty((done, D), dtype=np.uint8)
    scales = np.empty((done // group, D), dtype=np.float32)
    zeros = np.empty_like(scales)
    for block in range(done // group):
        part = slice(block * group, (block + 1) * group)
        for channel in range(D):
            codes[part, channel], scales[block, channel], zeros[block, channel] = encoder(keys[part, channel], bits)
    return codes, scales, zeros, keys[done:]


def kivi_values(values, bits, group, residual, encoder=kivi_group):
    """Values [T, D], per token: codes [T - t, D], scales and zeros [T - t, D / g], tail [t, D], t = min(T, R)."""
    values = np.asarray(values, dtype=np.float32)
    T, D = values.shape
    if D % group:
        raise ValueError(f"{D} does not divide by {group}")
    done = T - kivi_tails(T, residual)[1]
    codes = np.empty((done, D), dtype=np.uint8)
    scales = np.empty((done, D // group), dtype=np.float32)
    zeros = np.empty_like(scales)
    for t in range(done):
        for block in range(D // group):
            part = slice(block * group, (block + 1) * group)
            codes[t, part], scales[t, block], zeros[t, block] = encoder(values[t, part], bits)
    return codes, scales, zeros, values[done:]


def kivi_restored_keys(codes, scales, zeros, tail):
    """Keys [T, D] as attention sees them."""
    group = len(codes) // len(scales) if len(scales) else 1
    scales, zeros = np.repeat(scales, group, axis=0), np.repeat(zeros, group, axis=0)
    return np.concatenate([scales * codes.astype(np.float32) + zeros, tail])


def kivi_restored_values(codes, scales, zeros, tail):
    """Values [T, D] as attention sees them."""
    group = codes.shape[1] // scales.shape[1]
    return np.concatenate([affine_decode(codes, scales, zeros, group), tail])
