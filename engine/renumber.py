"""Renumbering: kept rows take the positions 0..R-1, and their keys are rotated to them.

As in StreamingLLM (arXiv 2309.17453), where a row's position is its place in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.layers import Layer
from kvferry.engine.rope import Rotation


def renumber(cache: PrefixCache, rotations: Sequence[Rotation]) -> PrefixCache:
    """Return a cache whose rows stand at 0..R-1 and whose logical length is R.

    Raises:
        InvalidRequestError: when layers or heads keep different numbers of rows, or rows are packed.
    """
    counts = set(cache.row_counts)
    if len(counts) != 1:
        raise InvalidRequestError(
            f"rows: heads keep from {min(counts)} to {max(counts)} rows; only equal numbers can be renumbered",
            field="rows",
            value=max(counts),
        )
    layers = tuple(_renumbered(layer, rotation) for layer, rotation in zip(cache.layers, rotations, strict=True))
    moved = PrefixCache(layers, counts.pop())
    mx.eval(moved.arrays)
    return moved


def _renumbered(layer: Layer, rotation: Rotation) -> DenseLayer:
    if not isinstance(layer, DenseLayer):
        raise InvalidRequestError(f"layers: a {type(layer).__name__} cannot be renumbered", field="layers")
    if layer.positions is None:
        return layer
    change = mx.arange(layer.rows, dtype=mx.int32)[None, :] - layer.positions
    return DenseLayer(rotation.shift(layer.keys[0], change)[None], layer.values)
