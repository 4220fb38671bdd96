"""How large a payload will be, from the rows that are kept and how they are packed, before anything is packed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.core import container, layout
from kvferry.core.compat import Profile
from kvferry.core.layout import Expected
from kvferry.core.manifest import DTYPE_BYTES, Dtype, Encoding, LayerLayout
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.quantise import Scheme
from kvferry.engine.selection import Positions
from kvferry.engine.tensors import dtype_name
from kvferry.sender.kv import parameters

Kind = Literal["contiguous", "renumbered", "explicit", "shared"]


@dataclass(frozen=True)
class _Sized:
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    length: int


def payload_bytes(
    cache: PrefixCache, kept: Sequence[Sequence[Positions]], packing: Scheme | None, *, renumbered: bool
) -> int:
    """Return the bytes of the payload that holds these rows of a dense cache.

    Args:
        cache: of dense layers.
        kept: for every layer and KV head, the rows.
        packing: how they are packed, or None.
        renumbered: whether kept rows take the positions 0..R-1.
    """
    encoding = parameters.encoding(packing)
    return total([_ids(cache.offset), *_sections(cache, kept, packing, encoding, renumbered=renumbered)])


def planned_bytes(profile: Profile, tokens: int, rows: int, packing: Scheme | None) -> int:
    """Return the bytes of the payload before there is a cache: as many rows of every KV head, each where it stood.

    Args:
        profile: of the model that will read the prefix.
        tokens: of the prefix.
        rows: that a KV head keeps; heads that do not keep them all choose for themselves.
        packing: how they are packed, or None.
    """
    encoding = parameters.encoding(packing)
    kind: Kind = "contiguous" if rows == tokens else "explicit"
    expected = [_ids(tokens)]
    for index, layer in enumerate(profile.layers):
        planned = LayerLayout(
            cache_class="KVCache",
            kv_heads=layer.kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            dtype=layer.dtype,  # type: ignore[arg-type]  # a cache holds no integers
            rows=rows,
            head_rows=None,
            offset=tokens,
            positions=kind,
            packed_keys=packing.packed_rows("keys", rows) if packing else 0,
            packed_values=packing.packed_rows("values", rows) if packing else 0,
        )
        expected += layout.layer_sections(index, planned, encoding)
    return total(expected)


def total(expected: Sequence[Expected]) -> int:
    """Return the bytes of a payload of these sections, header included; none is compressed."""
    sized = [_Sized(*item, math.prod(item.shape) * DTYPE_BYTES[item.dtype]) for item in expected]
    return len(container.header(sized)) + sum(item.length for item in sized)


def _ids(tokens: int) -> Expected:
    return Expected(container.IDS, "U32", (tokens,))


def _sections(
    cache: PrefixCache,
    kept: Sequence[Sequence[Positions]],
    packing: Scheme | None,
    encoding: Encoding,
    *,
    renumbered: bool,
) -> Iterator[Expected]:
    # A layer that keeps every row beside others that do not has positions as well.
    whole = all(len(rows) == cache.offset for heads in kept for rows in heads)
    for index, (layer, heads) in enumerate(zip(cache.layers, kept, strict=True)):
        if isinstance(layer, DenseLayer):
            kind = "contiguous" if whole else "renumbered" if renumbered else _positions(heads)
            yield from layout.layer_sections(index, _layout(layer, heads, packing, cache.offset, kind), encoding)


def _layout(
    layer: DenseLayer, heads: Sequence[Positions], packing: Scheme | None, tokens: int, kind: Kind
) -> LayerLayout:
    counts = tuple(len(rows) for rows in heads)
    most, ragged = max(counts), len(set(counts)) > 1
    return LayerLayout(
        cache_class="KVCache",
        kv_heads=layer.kv_heads,
        key_dim=layer.keys.shape[3],
        value_dim=layer.values.shape[3],
        dtype=dtype_name(layer.keys),  # type: ignore[arg-type]  # a cache holds no integers
        rows=most,
        head_rows=counts if ragged else None,
        offset=tokens,
        positions=kind,
        packed_keys=packing.packed_rows("keys", most) if packing else 0,
        packed_values=packing.packed_rows("values", most) if packing else 0,
    )


def _positions(heads: Sequence[Positions]) -> Kind:
    return "shared" if all(np.array_equal(rows, heads[0]) for rows in heads) else "explicit"
