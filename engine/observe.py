"""What a model's queries look like while it reads: for methods that choose rows by attention.

The arrays handed out are fp32 copies, after rotation: what stands in a cache and what asks it can be multiplied as they
are. Queries are scaled so that the product over the root of D is what the model's softmax sees, also where a model
scales its attention otherwise (granite). Symbols: H query heads, Hk KV heads, D head dimension, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kvferry.core.errors import ModelError
from kvferry.engine.attention import attend_dense
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseBranch, DenseLayer
from kvferry.engine.generate import forward
from kvferry.engine.prefill import DEFAULT_PREFILL_CHUNK

See = Callable[[int, int, mx.array, mx.array], None]
"""Called with layer, position of the first token, queries [H, N, D] and the keys [Hk, position + N, D] they may see."""


@dataclass(frozen=True)
class Window:
    """One layer's queries [H, N, D] and keys [Hk, N, D] of tokens that were run behind a prefix, fp32."""

    queries: mx.array
    keys: mx.array


def window(
    model: Any, cache: PrefixCache, ids: Sequence[int], chunk: int = DEFAULT_PREFILL_CHUNK
) -> Generator[int, None, list[Window]]:
    """Run tokens behind a prefix and return what every layer asked. The cache does not change.

    Args:
        model: an mlx-lm model whose attention goes through ``kvferry.engine.attention``.
        cache: of dense layers.
        ids: at least one token.
        chunk: tokens a forward pass.

    Yields:
        How many tokens are done, after every pass but the last.

    Raises:
        ModelError: when a layer is not dense, or its attention was not seen.
    """
    branches = [_Observing(_dense(index, layer), cache.offset, len(ids)) for index, layer in enumerate(cache.layers)]
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        # Not evaluated: the logits of every token would cost as much as a quarter of a small model.
        forward(model, part, branches)
        mx.eval([(branch.state, branch.asked) for branch in branches])
        if start + chunk < len(ids):
            mx.clear_cache()
            yield start + chunk
    return [branch.window(len(ids), index) for index, branch in enumerate(branches)]


def replay(model: Any, ids: Sequence[int], chunk: int, see: See) -> Generator[int, None, None]:
    """Read a prefix and show every layer's queries, chunk by chunk.

    Args:
        model: as for ``window``.
        ids: the prefix.
        chunk: tokens a forward pass.
        see: called for every layer of every chunk.

    Yields:
        How many tokens are done.
    """
    caches = [_ReplayCache(index, see) for index in range(len(model.layers))]
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        forward(model, part, caches)
        mx.eval([cache.state for cache in caches])
        if any(cache.seen != start + len(part) for cache in caches):
            raise ModelError("attention: a layer's queries were not seen")
        mx.clear_cache()
        yield start + len(part)


def _dense(index: int, layer: Any) -> DenseLayer:
    if not isinstance(layer, DenseLayer):
        raise ModelError(f"layer {index}: {type(layer).__name__}, only dense rows can be observed")
    return layer


class _Observing(DenseBranch):
    """A branch that keeps the queries it is asked."""

    def __init__(self, prefix: DenseLayer, offset: int, fresh_tokens: int) -> None:
        super().__init__(prefix, offset, fresh_tokens)
        self.asked: list[mx.array] = []

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attend as mlx-lm would."""
        self.asked.append(_as_scaled(queries, scale)[0])
        return attend_dense(queries, *self.keys_and_values(), scale)

    def window(self, tokens: int, index: int) -> Window:
        """Return what was asked."""
        if sum(queries.shape[1] for queries in self.asked) != tokens:
            raise ModelError(f"layer {index}: its queries were not seen")
        keys, _ = self.keys_and_values()
        seen = Window(mx.concatenate(self.asked, axis=1), keys[0, :, -tokens:].astype(mx.float32))
        mx.eval(seen.queries, seen.keys)
        return seen


class _ReplayCache(KVCache):
    """mlx-lm's cache, showing what it is asked."""

    def __init__(self, index: int, see: See) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._see = see
        self.seen = 0

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attend as mlx-lm would."""
        start = self.seen
        self.seen += int(queries.shape[2])
        keys, values = self.keys_and_values()  # type: ignore[no-untyped-call]
        self._see(self._index, start, _as_scaled(queries, scale)[0], keys[0].astype(mx.float32))
        return attend_dense(queries, keys, values, scale)


def _as_scaled(queries: mx.array, scale: float) -> mx.array:
    width = float(queries.shape[-1])
    factor = scale * width**0.5
    plain = queries.astype(mx.float32)
    return plain if math.isclose(factor, 1.0, rel_tol=1e-6) else plain * factor
