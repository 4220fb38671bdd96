"""Packing a whole cache by a scheme: how wide keys and values are, in which groups, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.layers import Layer
from kvferry.engine.packed import PackedLayer, PackedTensor
from kvferry.engine.packing import Axis, Rule, pack
from kvferry.engine.ragged import RaggedLayer


@dataclass(frozen=True)
class Width:
    """How one of keys and values is packed: code width in bits, group size, and along what the groups lie."""

    bits: int
    group: int
    axis: Axis = "token"


@dataclass(frozen=True)
class Scheme:
    """How a cache is packed.

    Attributes:
        keys, values: None leaves them dense.
        rule: see ``kvferry.engine.packing.pack``.
        residual: KIVI's R. Keys by channel are packed in whole blocks of R rows and values but for the last R rows;
            0 packs every row.
    """

    keys: Width | None
    values: Width | None
    rule: Rule = "affine"
    residual: int = 0

    def packed_rows(self, part: Literal["keys", "values"], rows: int) -> int:
        """Return how many of a layer's rows are packed."""
        width = self.keys if part == "keys" else self.values
        if width is None:
            return 0
        if not self.residual:
            return rows
        return rows - rows % self.residual if part == "keys" else max(rows - self.residual, 0)


def quantise(cache: PrefixCache, scheme: Scheme) -> PrefixCache:
    """Return a cache whose rows are packed by a scheme.

    Raises:
        InvalidRequestError: when a layer is packed already, or ragged and packed by channel.
        ModelError: when a value is not finite.
    """
    packed = PrefixCache(
        tuple(_layer(layer, scheme, f"layers[{index}]") for index, layer in enumerate(cache.layers)), cache.offset
    )
    mx.eval(packed.arrays)
    return packed


def _layer(layer: Layer, scheme: Scheme, field: str) -> Layer:
    if isinstance(layer, DenseLayer):
        return _pack(layer, scheme)
    if isinstance(layer, RaggedLayer) and not scheme.residual:
        heads = tuple(head for head in layer.heads if isinstance(head, DenseLayer))
        if len(heads) == layer.kv_heads:
            return RaggedLayer(tuple(_pack(head, scheme) for head in heads))
    raise InvalidRequestError(f"{field}: a {type(layer).__name__} cannot be packed by this scheme", field=field)


def _pack(layer: DenseLayer, scheme: Scheme) -> DenseLayer | PackedLayer:
    keys = _tensor(layer.keys, scheme.keys, scheme.packed_rows("keys", layer.rows), scheme.rule)
    values = _tensor(layer.values, scheme.values, scheme.packed_rows("values", layer.rows), scheme.rule)
    if keys.packed is None and values.packed is None:
        return layer
    return PackedLayer(keys, values, layer.positions)


def _tensor(rows: mx.array, width: Width | None, packed_rows: int, rule: Rule) -> PackedTensor:
    if width is None or not packed_rows:
        return PackedTensor(None, rows)
    packed = pack(rows[:, :, :packed_rows], width.bits, width.group, width.axis, rule)
    return PackedTensor(packed, mx.contiguous(rows[:, :, packed_rows:]))
