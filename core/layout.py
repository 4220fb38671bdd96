"""Which sections a layer's cache takes, as its layout and the encoding say.

Symbols: Hk KV heads, R rows, S the sum of every head's rows where they differ, P packed rows, D head dimension, b bits,
g group size. A layer whose heads keep equally many rows leads with [Hk, R], a ragged one with [S], head after head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvferry.core import container
from kvferry.core.errors import ManifestError
from kvferry.core.manifest import Dtype, Encoding, LayerLayout, Manifest

_WORD_BITS = 32


class Expected(NamedTuple):
    """Name, dtype and shape of a section."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """How the keys or the values of a layer are stored. ``bits`` None: dense."""

    name: str
    dim: int
    bits: int | None
    group: int | None
    axis: Literal["token", "channel"]
    packed: int


def sections(manifest: Manifest) -> Iterator[Expected]:
    """Yield the sections of a KV artifact in order.

    Raises:
        ManifestError: when a layer's layout contradicts itself or the encoding.
    """
    if manifest.prefix is not None:
        yield Expected(container.IDS, "U32", (manifest.prefix.tokens,))
    for index, layer in enumerate(manifest.layout or ()):
        check(index, layer, manifest.encoding)
        yield from layer_sections(index, layer, manifest.encoding)


def layer_sections(index: int, layer: LayerLayout, encoding: Encoding) -> Iterator[Expected]:
    """Yield the sections of one layer: positions, keys, values."""
    leading = rows_shape(layer, layer.rows)
    if layer.positions == "explicit":
        yield Expected(container.positions_name(index), "I32", leading)
    if layer.positions == "shared":
        yield Expected(container.positions_name(index), "I32", (layer.rows,))
    for tensor in tensors(index, layer, encoding):
        yield from _tensor_sections(layer, tensor)


def tensors(index: int, layer: LayerLayout, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Return how a layer's keys and values are stored."""
    axis = encoding.key_axis or "token"
    return (
        Tensor(
            container.keys_name(index), layer.key_dim, encoding.key_bits, encoding.key_group, axis, layer.packed_keys
        ),
        Tensor(
            container.values_name(index),
            layer.value_dim,
            encoding.value_bits,
            encoding.value_group,
            "token",
            layer.packed_values,
        ),
    )


def rows_shape(layer: LayerLayout, rows: int) -> tuple[int, ...]:
    """Return the leading dimensions of ``rows`` rows: [Hk, rows], or [S] for a ragged layer."""
    return (layer.kv_heads, rows) if layer.head_rows is None else (sum(layer.head_rows),)


def _tensor_sections(layer: LayerLayout, tensor: Tensor) -> Iterator[Expected]:
    if not tensor.packed or tensor.bits is None or tensor.group is None:
        yield Expected(tensor.name, layer.dtype, (*rows_shape(layer, layer.rows), tensor.dim))
        return
    if tensor.axis == "token":
        leading, width = rows_shape(layer, tensor.packed), tensor.dim
    else:
        leading, width = (layer.kv_heads, tensor.dim), tensor.packed
    yield Expected(f"{tensor.name}.codes", "U32", (*leading, width * tensor.bits // _WORD_BITS))
    yield Expected(f"{tensor.name}.scales", layer.dtype, (*leading, width // tensor.group))
    yield Expected(f"{tensor.name}.biases", layer.dtype, (*leading, width // tensor.group))
    if tensor.packed < layer.rows:
        yield Expected(f"{tensor.name}.tail", layer.dtype, (layer.kv_heads, layer.rows - tensor.packed, tensor.dim))


def check(index: int, layer: LayerLayout, encoding: Encoding) -> None:
    """Refuse a layout that contradicts itself or the encoding.

    Raises:
        ManifestError: naming the field and both values.
    """
    path = f"layout[{index}]"
    if (encoding.key_axis is None) != (encoding.key_bits is None):
        raise _wrong("encoding.key_axis", encoding.key_axis, f"keys of {encoding.key_bits} bits")
    if layer.head_rows is not None:
        _check_ragged(path, layer)
    for part, tensor in zip(("key", "value"), tensors(index, layer, encoding), strict=True):
        if (tensor.bits is None) != (tensor.group is None):
            raise _wrong(f"encoding.{part}_group", tensor.group, f"{part}s of {tensor.bits} bits")
        _check_packed(f"{path}.packed_{part}s", layer, tensor)
        across = tensor.dim if tensor.axis == "token" else tensor.packed
        if tensor.bits and tensor.group and (across % tensor.group or across * tensor.bits % _WORD_BITS):
            expected = f"{across} numbers of {tensor.bits} bits by {tensor.axis}"
            raise _wrong(f"encoding.{part}_group", tensor.group, expected)


def _check_ragged(path: str, layer: LayerLayout) -> None:
    counts = layer.head_rows or ()
    if len(counts) != layer.kv_heads or max(counts, default=0) != layer.rows:
        raise _wrong(f"{path}.head_rows", counts, f"{layer.kv_heads} heads of at most {layer.rows} rows")
    if layer.positions != "explicit":
        raise _wrong(f"{path}.positions", layer.positions, "explicit ones, in a ragged layer")


def _check_packed(field: str, layer: LayerLayout, tensor: Tensor) -> None:
    if tensor.packed > (layer.rows if tensor.bits is not None else 0):
        raise _wrong(field, tensor.packed, f"{layer.rows} rows of {tensor.bits or 'no'} bits")
    if layer.head_rows is not None and tensor.packed and (tensor.packed != layer.rows or tensor.axis == "channel"):
        raise _wrong(field, f"{tensor.packed} by {tensor.axis}", f"all {layer.rows} by token, in a ragged layer")


def _wrong(field: str, value: object, expected: str) -> ManifestError:
    return ManifestError(
        f"{field}: {value}, but the artifact has {expected}", field=field, value=str(value), expected=expected
    )
