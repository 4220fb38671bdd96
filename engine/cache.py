"""The cache of a prefix: every layer's kept rows, where they stood, and the logical length.

``PrefixCache`` is what is stored: it never changes. Questions run on branches of it. Retained rows stand before fresh
rows, so the mask "causal", which MLX aligns to the lower right, is right for any selection, also when layers keep
different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.layers import Branch, Layer
from kvferry.engine.ragged import RaggedLayer, heads_of

Rows = Sequence[mx.array]
"""The positions that one layer keeps, per KV head: an array [Hk, R'], or one ascending array a head."""


@dataclass(frozen=True)
class PrefixCache:
    """A prefix's cache in every layer. ``offset`` is the logical length T: the position of the next token."""

    layers: tuple[Layer, ...]
    offset: int

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.positions is None and set(layer.row_counts) != {self.offset}:
                raise InvalidRequestError(
                    f"layers[{index}].rows: {layer.rows} without positions, but the prefix has {self.offset} tokens",
                    field=f"layers[{index}].rows",
                    value=layer.rows,
                    expected=self.offset,
                )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that holds rows, to evaluate."""
        return [array for layer in self.layers for array in layer.arrays]

    @property
    def row_counts(self) -> list[int]:
        """Rows of every KV head of every layer."""
        return [rows for layer in self.layers for rows in layer.row_counts]

    def select(self, positions: Sequence[Rows]) -> PrefixCache:
        """Keep only some rows.

        Args:
            positions: for each layer and KV head int32 [R'], strictly ascending: true positions, each held by this
                cache. Heads of a layer that keep different numbers make it ragged.

        Returns:
            A new cache with the same logical length.

        Raises:
            InvalidRequestError: when positions are of another shape, not ascending, or not held.
        """
        pairs = enumerate(zip(self.layers, positions, strict=True))
        return PrefixCache(
            tuple(_select(layer, wanted, f"positions[{index}]") for index, (layer, wanted) in pairs), self.offset
        )

    def branch(self, fresh_tokens: int) -> list[Branch]:
        """Return per-layer caches for one question.

        Args:
            fresh_tokens: room for question and answer, so that the prefix is copied at most once.
        """
        return [layer.branch(self.offset, fresh_tokens) for layer in self.layers]


def frozen(branches: Sequence[Branch]) -> PrefixCache:
    """Return branches as a cache: what a second selection, after an answer, starts from."""
    cache = PrefixCache(tuple(branch.frozen() for branch in branches), branches[0].offset)
    mx.eval(cache.arrays)
    return cache


def _select(layer: Layer, wanted: Rows, field: str) -> Layer:
    heads = _per_head(wanted, layer.kv_heads, field)
    if len({int(head.size) for head in heads}) > 1:
        layer = RaggedLayer(heads_of(layer))
    return layer.select(heads, field)


def _per_head(wanted: Rows, kv_heads: int, field: str) -> list[mx.array]:
    whole = wanted.shape if isinstance(wanted, mx.array) else (len(wanted), "rows")
    heads = list(wanted) if whole else []
    if len(heads) != kv_heads or any(head.ndim != 1 for head in heads):
        raise InvalidRequestError(f"{field}: shape {whole}, expected ({kv_heads}, rows)", field=field)
    if any(head.size == 0 for head in heads):
        raise InvalidRequestError(f"{field}: a head keeps no row", field=field)
    return heads
