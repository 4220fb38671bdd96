"""Reading a prefix: chunked prefill with progress, the same chunks on every road to a cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core.errors import ModelError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer

DEFAULT_PREFILL_CHUNK = 512


def read(model: Any, ids: Sequence[int], chunk: int) -> Generator[int, None, list[Any]]:
    """Run the model over a prefix.

    Closing the generator stops the work after the chunk in flight; nothing is kept then.

    Args:
        model: an mlx-lm model.
        ids: the prefix, at least one token.
        chunk: tokens a forward pass. Results depend on it in the last bit, so both ends use the same.

    Yields:
        How many tokens are done.

    Returns:
        The model's own caches, ready for fresh tokens.
    """
    cache: list[Any] = make_prompt_cache(model)
    if len(cache) != len(model.layers):
        raise ModelError(f"cache: {len(cache)} caches for {len(model.layers)} layers")
    for start in range(0, len(ids), chunk):
        part = mx.array(list(ids[start : start + chunk]), dtype=mx.uint32)
        model(part[None], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
        yield min(start + chunk, len(ids))
    return cache


def prefill(model: Any, ids: Sequence[int], chunk: int) -> Generator[int, None, PrefixCache]:
    """As ``read``, for models whose layers all use plain KV caches.

    Returns:
        The dense cache, cut to its valid rows.

    Raises:
        ModelError: when a layer's cache is of another class.
    """
    return snapshot((yield from read(model, ids, chunk)), consume=True)


def snapshot(cache: list[Any], *, consume: bool = False) -> PrefixCache:
    """Freeze plain KV caches: the valid rows only, copied out of their padded buffers.

    Args:
        cache: one cache a layer.
        consume: empty the list layer by layer, so that no more than one layer is held twice.

    Raises:
        ModelError: when a layer's cache is of another class.
    """
    layers: list[DenseLayer] = []
    offset = int(cache[0].offset)
    for index in range(len(cache)):
        layer = cache[index]
        if type(layer).__name__ != "KVCache":
            raise ModelError(f"layer {index}: cache class {type(layer).__name__}, only KVCache can be carried")
        keys, values = layer.keys_and_values()
        layers.append(DenseLayer(mx.contiguous(keys), mx.contiguous(values)))
        mx.eval(layers[-1].arrays)
        if consume:
            cache[index] = None
        del layer, keys, values
    return PrefixCache(tuple(layers), offset)
