"""A layer whose KV heads keep different numbers of rows, without padding: each head is a layer of its own.

Attention runs once a head, so no mask and no padded row is needed. Symbols as in ``kvferry.engine.layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvferry.core.errors import ModelError
from kvferry.engine.attention import attend_dense
from kvferry.engine.dense import DenseBranch, DenseLayer
from kvferry.engine.layers import AttendingBranch, Layer
from kvferry.engine.packed import PackedBranch, PackedLayer


@dataclass(frozen=True)
class RaggedLayer:
    """One layer's kept rows, head by head; each of ``heads`` has one KV head."""

    heads: tuple[DenseLayer | PackedLayer, ...]

    @property
    def kv_heads(self) -> int:
        """Hk."""
        return len(self.heads)

    @property
    def rows(self) -> int:
        """Rows of the head that keeps most."""
        return max(self.row_counts)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of every KV head."""
        return tuple(head.rows for head in self.heads)

    @property
    def positions(self) -> mx.array | None:
        """Positions of all heads, joined: int32 [1, sum of rows]; None when every head's rows are 0..R-1."""
        if all(head.positions is None for head in self.heads):
            return None
        return mx.concatenate([_positions(head) for head in self.heads], axis=1)

    @property
    def nbytes(self) -> int:
        """Bytes held by rows and positions."""
        return sum(head.nbytes for head in self.heads)

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that holds rows."""
        return [array for head in self.heads for array in head.arrays]

    def select(self, wanted: Sequence[mx.array], field: str) -> RaggedLayer:
        """Keep only some rows of every head; see ``PrefixCache.select``.

        Raises:
            InvalidRequestError: when positions are not ascending, or not held.
        """
        pairs = enumerate(zip(self.heads, wanted, strict=True))
        return RaggedLayer(tuple(head.select([rows], f"{field}[{number}]") for number, (head, rows) in pairs))

    def branch(self, offset: int, fresh_tokens: int) -> RaggedBranch:
        """Return a view for one question."""
        return RaggedBranch(self, offset, fresh_tokens)


class RaggedBranch(AttendingBranch):
    """A question's view of a ragged layer: one branch a head."""

    def __init__(self, prefix: RaggedLayer, offset: int, fresh_tokens: int) -> None:
        super().__init__(prefix.rows, offset)
        self._heads = [_branch(head, offset, fresh_tokens) for head in prefix.heads]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append fresh rows, [1, Hk, N, D]. Returns them; ``attend`` knows the others."""
        self._owe()
        for number, head in enumerate(self._heads):
            head.update_and_fetch(keys[:, number : number + 1], values[:, number : number + 1])
        self._fresh += int(keys.shape[2])
        return keys, values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attend head by head; see ``kvferry.engine.attention``."""
        self._owed = False
        groups = mx.split(queries, len(self._heads), axis=1)
        outputs = [head.attend(group, scale) for head, group in zip(self._heads, groups, strict=True)]
        return mx.concatenate(outputs, axis=1)

    def frozen(self) -> RaggedLayer:
        """Return a layer that holds the fresh rows as well."""
        return RaggedLayer(tuple(head.frozen() for head in self._heads))

    @property
    def state(self) -> list[Any]:
        """The arrays to evaluate."""
        return [head.state for head in self._heads]

    @property
    def nbytes(self) -> int:
        """Bytes that the branch holds beside the stored prefix."""
        return sum(head.nbytes for head in self._heads)

    def _forget(self, count: int) -> None:
        for head in self._heads:
            head.trim(count)


def _positions(head: DenseLayer | PackedLayer) -> mx.array:
    return mx.arange(head.rows, dtype=mx.int32)[None] if head.positions is None else head.positions


class _DenseHead(DenseBranch):
    """One dense head, attended on its own."""

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """See ``kvferry.engine.attention``."""
        return attend_dense(queries, *self.keys_and_values(), scale)


def _branch(head: DenseLayer | PackedLayer, offset: int, fresh_tokens: int) -> _DenseHead | PackedBranch:
    if isinstance(head, PackedLayer):
        return head.branch(offset, fresh_tokens)
    return _DenseHead(head, offset, fresh_tokens)


def heads_of(layer: Layer) -> tuple[DenseLayer | PackedLayer, ...]:
    """Return a layer's KV heads as layers of their own.

    Raises:
        ModelError: for a layer of a kind that is not known here.
    """
    if isinstance(layer, RaggedLayer):
        return layer.heads
    if isinstance(layer, DenseLayer | PackedLayer):
        return tuple(layer.head(number) for number in range(layer.kv_heads))
    raise ModelError(f"layer: {type(layer).__name__} cannot be taken apart into heads")
