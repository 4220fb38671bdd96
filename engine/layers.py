"""What every kind of cache layer has in common, and what every question's view of one has.

A *layer* holds the rows of one model layer and never changes. A *branch* is a question's view of it: it obeys mlx-lm's
cache protocol, adds fresh rows behind the held ones, and tells RoPE the logical offset while attention sees the rows.

Symbols: Hk KV heads, R rows, D head dimension, T logical length of the prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kvferry.core.errors import InvalidRequestError, ModelError


class Layer(Protocol):
    """One layer's kept rows: dense, packed, or ragged."""

    @property
    def kv_heads(self) -> int:
        """Hk."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of every KV head."""

    @property
    def rows(self) -> int:
        """Rows of the head that keeps most."""

    @property
    def positions(self) -> mx.array | None:
        """Where the rows stood, int32; None when they are 0..R-1 for every head."""

    @property
    def nbytes(self) -> int:
        """Bytes held by rows and positions."""

    @property
    def arrays(self) -> list[mx.array]:
        """Every array that holds rows."""

    def select(self, wanted: Sequence[mx.array], field: str) -> Layer:
        """Keep only some rows of every head; see ``PrefixCache.select``."""

    def branch(self, offset: int, fresh_tokens: int) -> Branch:
        """Return a view for one question, with room for that many fresh tokens."""


class Branch(ABC):
    """A question's view of one layer. Follows mlx-lm's cache protocol."""

    def __init__(self, held_rows: int, offset: int) -> None:
        self._held = held_rows
        self._start = offset
        self._fresh = 0

    @property
    def offset(self) -> int:
        """Logical length: the position of the next token."""
        return self._start + self._fresh

    @property
    def rows(self) -> int:
        """Rows that attention sees."""
        return self._held + self._fresh

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append fresh rows, [1, Hk, N, D]. Return what the attention function shall be given."""

    @abstractmethod
    def frozen(self) -> Layer:
        """Return a layer that holds the fresh rows as well, at their true positions."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """The arrays to evaluate."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the branch holds beside the stored prefix."""

    @abstractmethod
    def _forget(self, count: int) -> None:
        """Drop the last fresh rows."""

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
        self._forget(count)
        self._fresh -= count
        return count

    def size(self) -> int:
        """Logical length, as mlx-lm's KVCache counts it."""
        return self.offset

    def empty(self) -> bool:
        """A branch always has a prefix."""
        return False

    def _with_fresh_positions(self, held: mx.array | None, heads: int) -> mx.array | None:
        """Return positions [Hk, R + fresh], or None when they are still 0..R-1."""
        if held is None:
            return None
        fresh = mx.broadcast_to(mx.arange(self._start, self.offset, dtype=mx.int32), (heads, self._fresh))
        return mx.concatenate([held, fresh], axis=1)


class AttendingBranch(Branch):
    """A branch that computes its own attention: what ``update_and_fetch`` returns is not all that there is to see."""

    def __init__(self, held_rows: int, offset: int) -> None:
        super().__init__(held_rows, offset)
        self._owed = False

    @property
    def owed(self) -> bool:
        """Whether rows were added whose attention nobody asked for: the model attended in a way of its own."""
        return self._owed

    @abstractmethod
    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Return the last tokens' attention over every row; see ``kvferry.engine.attention``."""

    def _owe(self) -> None:
        """Note that rows were added.

        Raises:
            ModelError: when it was not asked for those before.
        """
        if self._owed:
            raise ModelError("attention: the model does not ask the cache for it, and does not see the prefix")
        self._owed = True


class GrowingRows:
    """Rows [1, Hk, n, D] that grow. The first ones are copied when the first row is added, once."""

    def __init__(self, rows: mx.array, room: int) -> None:
        self._first = rows
        self._room = max(room, 1)
        self._count = int(rows.shape[2])
        self._buffer: mx.array | None = None

    @property
    def rows(self) -> mx.array:
        """The valid rows."""
        return self._first if self._buffer is None else self._buffer[..., : self._count, :]

    @property
    def nbytes(self) -> int:
        """Bytes held beside the first rows."""
        return 0 if self._buffer is None else int(self._buffer.nbytes)

    def append(self, rows: mx.array) -> None:
        """Add rows at the end."""
        start, end = self._count, self._count + int(rows.shape[2])
        if self._buffer is None:
            self._room = max(self._room, end - start)
            self._buffer = _with_room(self._first, self._room)
        elif end > self._buffer.shape[2]:
            # More was generated than announced: grow by what was announced, to copy rarely.
            self._buffer = _with_room(self._buffer[..., :start, :], max(self._room, end - start))
        self._buffer[..., start:end, :] = rows
        self._count = end

    def forget(self, count: int) -> None:
        """Drop the last rows."""
        self._count -= count


def _with_room(rows: mx.array, room: int) -> mx.array:
    batch, heads, _, width = rows.shape
    return mx.concatenate([rows, mx.zeros((batch, heads, room, width), dtype=rows.dtype)], axis=2)


def row_indices(wanted: mx.array, held: mx.array | None, rows: int, field: str) -> mx.array:
    """Return the row index of every wanted position, int32 [Hk, R'].

    Args:
        wanted: [Hk, R'], true positions, strictly ascending.
        held: [Hk, R] true positions of the rows, or None for 0..R-1.
        rows: R.
        field: what to call ``wanted`` in an error.

    Raises:
        InvalidRequestError: when positions are not held, or not ascending.
    """
    if held is None:
        index, found = wanted, (wanted >= 0) & (wanted < rows)
    else:
        matches = held[:, None, :] == wanted[:, :, None]
        index, found = mx.argmax(matches, axis=-1), mx.any(matches, axis=-1)
    # Without these two, MLX would gather some other row and say nothing, or count one twice.
    if not mx.all(found).item():
        raise InvalidRequestError(f"{field}: names a row that the cache does not hold", field=field)
    if not mx.all(wanted[:, 1:] > wanted[:, :-1]).item():
        raise InvalidRequestError(f"{field}: not strictly ascending", field=field)
    return index.astype(mx.int32)
