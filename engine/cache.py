"""The sparse cache: rows that were kept, where they stood, and the logical length.

``PrefixCache`` is what is stored: it never changes. ``BranchCache`` is what a question runs on: it obeys mlx-lm's cache
protocol, holds one copy of the prefix rows followed by fresh rows, and tells RoPE the logical offset while attention
sees the rows. Retained rows stand before fresh rows, so the mask "causal", which MLX aligns to the lower right, is
right for any selection, also when layers keep different numbers of rows.

Symbols: Hk KV heads, R rows, Dk and Dv head dimensions, T logical length of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvferry.core.errors import InvalidRequestError, ModelError


@dataclass(frozen=True)
class PrefixLayer:
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
    def rows(self) -> int:
        """R."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes held by rows and positions."""
        held = self.keys.nbytes + self.values.nbytes
        return int(held + (self.positions.nbytes if self.positions is not None else 0))


@dataclass(frozen=True)
class PrefixCache:
    """A prefix's cache in every layer. ``offset`` is the logical length T in tokens."""

    layers: tuple[PrefixLayer, ...]
    offset: int

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if layer.positions is None and layer.rows != self.offset:
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

    def select(self, positions: Sequence[mx.array]) -> PrefixCache:
        """Keep only some rows.

        Args:
            positions: for each layer int32 [Hk, R'], strictly ascending: true positions, each held by this cache.

        Returns:
            A new cache with the same logical length.

        Raises:
            InvalidRequestError: when positions are of another shape, not ascending, or not held.
        """
        pairs = enumerate(zip(self.layers, positions, strict=True))
        return PrefixCache(
            tuple(_select_rows(layer, wanted, f"positions[{index}]") for index, (layer, wanted) in pairs), self.offset
        )

    def branch(self, fresh_tokens: int) -> list[BranchCache]:
        """Return per-layer caches for one question.

        Args:
            fresh_tokens: room for question and answer, so that the prefix is copied exactly once.
        """
        return [BranchCache(layer, self.offset, fresh_tokens) for layer in self.layers]


def _select_rows(layer: PrefixLayer, wanted: mx.array, field: str) -> PrefixLayer:
    heads = int(layer.keys.shape[1])
    if tuple(wanted.shape[:-1]) != (heads,):
        raise InvalidRequestError(f"{field}: shape {wanted.shape}, expected ({heads}, rows)", field=field)
    if layer.positions is None:
        rows, held = wanted, (wanted >= 0) & (wanted < layer.rows)
    else:
        matches = layer.positions[:, None, :] == wanted[:, :, None]
        rows, held = mx.argmax(matches, axis=-1), mx.any(matches, axis=-1)
    # Without these two, MLX would gather some other row and say nothing, or count one twice.
    if not mx.all(held).item():
        raise InvalidRequestError(f"{field}: names a row that the cache does not hold", field=field)
    if not mx.all(wanted[:, 1:] > wanted[:, :-1]).item():
        raise InvalidRequestError(f"{field}: not strictly ascending", field=field)
    index = rows.astype(mx.int32)[None, :, :, None]
    return PrefixLayer(
        mx.contiguous(mx.take_along_axis(layer.keys, index, axis=2)),
        mx.contiguous(mx.take_along_axis(layer.values, index, axis=2)),
        wanted.astype(mx.int32),
    )


class BranchCache:
    """A question's view of one layer: the prefix rows, then fresh rows. Follows mlx-lm's cache protocol."""

    def __init__(self, prefix: PrefixLayer, offset: int, fresh_tokens: int) -> None:
        self._prefix = prefix
        self._room = max(fresh_tokens, 1)
        self._fresh = 0
        self._start = offset
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int:
        """Logical length: the position of the next token."""
        return self._start + self._fresh

    @property
    def rows(self) -> int:
        """Rows that attention sees."""
        return self._prefix.rows + self._fresh

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append fresh rows, [1, Hk, N, D], and return every row."""
        start = self.rows
        end = start + int(keys.shape[2])
        if self.keys is None or self.values is None:
            self._room = max(self._room, end - start)
            self.keys = _with_room(self._prefix.keys, self._room)
            self.values = _with_room(self._prefix.values, self._room)
        elif end > self.keys.shape[2]:
            # More was generated than announced: grow by what was announced, to copy rarely.
            growth = max(self._room, end - start)
            self.keys = _with_room(self.keys[..., :start, :], growth)
            self.values = _with_room(self.values[..., :start, :], growth)
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        self._fresh = end - self._prefix.rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the valid rows, [1, Hk, rows, D]."""
        if self.keys is None or self.values is None:
            return self._prefix.keys, self._prefix.values
        return self.keys[..., : self.rows, :], self.values[..., : self.rows, :]

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: FBT001, FBT002  (mlx-lm's protocol)
        """Return the mask for ``tokens`` fresh tokens.

        Raises:
            ModelError: for a window: after a selection a row index is not a position.
        """
        if window_size is not None:
            raise ModelError(f"window_size: a sliding window of {window_size} cannot run on a carried cache")
        if return_array:
            return create_causal_mask(tokens, self.rows)
        return None if tokens == 1 else "causal"

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The arrays to evaluate."""
        return self.keys_and_values()

    def is_trimmable(self) -> bool:
        """Fresh rows can go; prefix rows cannot."""
        return True

    def trim(self, count: int) -> int:
        """Forget the last ``count`` fresh rows.

        Raises:
            InvalidRequestError: when that would reach into the prefix; nothing changes then.
        """
        if not 0 <= count <= self._fresh:
            raise InvalidRequestError(
                f"trim: {count} rows, but the branch has {self._fresh} fresh ones", value=count, limit=self._fresh
            )
        self._fresh -= count
        return count

    def size(self) -> int:
        """Logical length, as mlx-lm's KVCache counts it."""
        return self.offset

    def empty(self) -> bool:
        """A branch always has a prefix."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes that the branch holds beside the stored prefix."""
        if self.keys is None or self.values is None:
            return 0
        return int(self.keys.nbytes + self.values.nbytes)


def _with_room(rows: mx.array, room: int) -> mx.array:
    batch, heads, _, width = rows.shape
    return mx.concatenate([rows, mx.zeros((batch, heads, room, width), dtype=rows.dtype)], axis=2)
