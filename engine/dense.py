"""A layer whose rows are dense and whose heads keep equally many. Symbols as in ``kvferry.engine.layers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvferry.engine.layers import Branch, GrowingRows, row_indices


@dataclass(frozen=True)
class DenseLayer:
    """One layer's kept rows.

    Attributes:
        keys: [1, Hk, R, Dk], rotated at their true positions.
        values: [1, Hk, R, Dv].
        positions: int32 [Hk, R], ascending along R; None when the rows are 0..R-1 for every head.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array | None = None

    @property
    def kv_heads(self) -> int:
        """Hk."""
        return int(self.keys.shape[1])

    @property
    def rows(self) -> int:
        """R."""
        return int(self.keys.shape[2])

    @property
    def row_counts(self) -> tuple[int, ...]:
        """R for every KV head."""
        return (self.rows,) * self.kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes held by rows and positions."""
        held = self.keys.nbytes + self.values.nbytes
        return int(held + (self.positions.nbytes if self.positions is not None else 0))

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values."""
        return [self.keys, self.values]

    def head(self, index: int) -> DenseLayer:
        """Return one KV head as a layer of its own."""
        one = slice(index, index + 1)
        return DenseLayer(
            self.keys[:, one], self.values[:, one], None if self.positions is None else self.positions[one]
        )

    def select(self, wanted: Sequence[mx.array], field: str) -> DenseLayer:
        """Keep only some rows, the same number for every head; see ``PrefixCache.select``.

        Raises:
            InvalidRequestError: when positions are not ascending, or not held.
        """
        positions = mx.stack(list(wanted)).astype(mx.int32)
        index = row_indices(positions, self.positions, self.rows, field)[None, :, :, None]
        return DenseLayer(
            mx.contiguous(mx.take_along_axis(self.keys, index, axis=2)),
            mx.contiguous(mx.take_along_axis(self.values, index, axis=2)),
            positions,
        )

    def branch(self, offset: int, fresh_tokens: int) -> DenseBranch:
        """Return a view for one question."""
        return DenseBranch(self, offset, fresh_tokens)


class DenseBranch(Branch):
    """A question's view of a dense layer: one copy of the prefix rows, followed by fresh rows."""

    def __init__(self, prefix: DenseLayer, offset: int, fresh_tokens: int) -> None:
        super().__init__(prefix.rows, offset)
        self._prefix = prefix
        self._keys = GrowingRows(prefix.keys, fresh_tokens)
        self._values = GrowingRows(prefix.values, fresh_tokens)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append fresh rows, [1, Hk, N, D], and return every row."""
        self._keys.append(keys)
        self._values.append(values)
        self._fresh += int(keys.shape[2])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the valid rows, [1, Hk, rows, D]."""
        return self._keys.rows, self._values.rows

    def frozen(self) -> DenseLayer:
        """Return a layer that holds the fresh rows as well."""
        positions = self._with_fresh_positions(self._prefix.positions, self._prefix.kv_heads)
        keys, values = self.keys_and_values()
        return DenseLayer(mx.contiguous(keys), mx.contiguous(values), positions)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays to evaluate."""
        return self.keys_and_values()

    @property
    def nbytes(self) -> int:
        """Bytes that the branch holds beside the stored prefix."""
        return self._keys.nbytes + self._values.nbytes

    def _forget(self, count: int) -> None:
        self._keys.forget(count)
        self._values.forget(count)
