"""A layer whose rows are packed, and a question's view of it: packed rows are attended as they are, never expanded.

Rows stand in order: packed ones first, then a dense tail (KIVI's residual window; often empty), then fresh rows. Keys
and values may be packed to different lengths. Symbols as in ``kvferry.engine.layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.attention import causal_softmax, grouped
from kvferry.engine.layers import AttendingBranch, GrowingRows, row_indices
from kvferry.engine.packing import Packed


@dataclass(frozen=True)
class PackedTensor:
    """Keys or values of a layer: packed rows, then dense ones [1, Hk, n, D]. ``packed`` None: there are none."""

    packed: Packed | None
    tail: mx.array

    @property
    def packed_rows(self) -> int:
        """How many rows are packed."""
        return 0 if self.packed is None else self.packed.rows

    @property
    def rows(self) -> int:
        """R."""
        return self.packed_rows + int(self.tail.shape[2])

    @property
    def arrays(self) -> list[mx.array]:
        """Every array."""
        return [self.tail] if self.packed is None else [*self.packed.arrays, self.tail]

    def head(self, index: int) -> PackedTensor:
        """Return one KV head."""
        packed = None if self.packed is None else self.packed.head(index)
        return PackedTensor(packed, self.tail[:, index : index + 1])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(int(array.nbytes) for array in self.arrays)


@dataclass(frozen=True)
class PackedLayer:
    """One layer's kept rows, packed.

    Attributes:
        keys, values: the same number of rows each.
        positions: int32 [Hk, R], ascending along R; None when the rows are 0..R-1 for every head.
    """

    keys: PackedTensor
    values: PackedTensor
    positions: mx.array | None = None

    @property
    def kv_heads(self) -> int:
        """Hk."""
        return int(self.keys.tail.shape[1])

    @property
    def rows(self) -> int:
        """R."""
        return self.keys.rows

    @property
    def row_counts(self) -> tuple[int, ...]:
        """R for every KV head."""
        return (self.rows,) * self.kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes held by rows and positions."""
        positions = 0 if self.positions is None else int(self.positions.nbytes)
        return self.keys.nbytes + self.values.nbytes + positions

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that holds rows."""
        return self.keys.arrays + self.values.arrays

    def head(self, index: int) -> PackedLayer:
        """Return one KV head as a layer of its own."""
        positions = None if self.positions is None else self.positions[index : index + 1]
        return PackedLayer(self.keys.head(index), self.values.head(index), positions)

    def select(self, wanted: Sequence[mx.array], field: str) -> PackedLayer:
        """Keep only some rows, the same number for every head; see ``PrefixCache.select``.

        Raises:
            InvalidRequestError: when rows cannot be taken out, or are not held.
        """
        positions = mx.stack(list(wanted)).astype(mx.int32)
        index = row_indices(positions, self.positions, self.rows, field)
        return PackedLayer(_take(self.keys, index, field), _take(self.values, index, field), positions)

    def branch(self, offset: int, fresh_tokens: int) -> PackedBranch:
        """Return a view for one question."""
        return PackedBranch(self, offset, fresh_tokens)


def _take(tensor: PackedTensor, index: mx.array, field: str) -> PackedTensor:
    if tensor.packed is None:
        dense = mx.take_along_axis(tensor.tail, index[None, :, :, None], axis=2)
        return PackedTensor(None, mx.contiguous(dense))
    if tensor.tail.shape[2]:
        raise InvalidRequestError(
            f"{field}: rows cannot be taken out of {tensor.packed_rows} packed ones with {tensor.tail.shape[2]} dense "
            "ones behind them",
            field=field,
        )
    return PackedTensor(tensor.packed.take(index), tensor.tail)


class PackedBranch(AttendingBranch):
    """A question's view of a packed layer. Only the dense tail is copied; the packed rows are shared."""

    def __init__(self, prefix: PackedLayer, offset: int, fresh_tokens: int) -> None:
        super().__init__(prefix.rows, offset)
        self._prefix = prefix
        self._keys = GrowingRows(prefix.keys.tail, fresh_tokens)
        self._values = GrowingRows(prefix.values.tail, fresh_tokens)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append fresh rows, [1, Hk, N, D]. Returns the dense rows; ``attend`` knows the packed ones."""
        self._owe()
        self._keys.append(keys)
        self._values.append(values)
        self._fresh += int(keys.shape[2])
        return self._keys.rows, self._values.rows

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attend packed rows and dense ones under one softmax; see ``kvferry.engine.attention``."""
        self._owed = False
        tokens, keys, values = int(queries.shape[2]), self._keys.rows, self._values.rows
        # A product, not in place: the caller still owns its queries.
        stacked = grouped(queries * scale, self._prefix.kv_heads)
        packed_keys, packed_values = self._prefix.keys.packed, self._prefix.values.packed
        scores = [] if packed_keys is None else [packed_keys.scores(stacked)]
        scores.append(stacked @ keys.swapaxes(2, 3))
        weights = causal_softmax(mx.concatenate(scores, axis=-1), tokens)
        split = self._prefix.values.packed_rows
        output = weights[..., split:] @ values
        if packed_values is not None:
            output = output + packed_values.weighted(weights[..., :split])
        return output.reshape(queries.shape[0], queries.shape[1], tokens, values.shape[3])

    def frozen(self) -> PackedLayer:
        """Return a layer that holds the fresh rows as well, dense behind the packed ones."""
        return PackedLayer(
            PackedTensor(self._prefix.keys.packed, mx.contiguous(self._keys.rows)),
            PackedTensor(self._prefix.values.packed, mx.contiguous(self._values.rows)),
            self._with_fresh_positions(self._prefix.positions, self._prefix.kv_heads),
        )

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays to evaluate."""
        return self._keys.rows, self._values.rows

    @property
    def nbytes(self) -> int:
        """Bytes that the branch holds beside the stored prefix."""
        return self._keys.nbytes + self._values.nbytes

    def _forget(self, count: int) -> None:
        self._keys.forget(count)
        self._values.forget(count)
