"""Attention on caches that mlx-lm does not know: packed rows, and heads that keep different numbers of rows.

mlx-lm's models call one function for attention, which they look up in their own module. ``install`` puts ``dispatch``
in its place there: a cache with a method ``attend`` computes its attention itself, every other cache gets mlx-lm's
function.

Symbols: H query heads, Hk KV heads, G = H / Hk, N fresh tokens, D head dimension.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import base

from kvferry.core.errors import ModelError

_NAME = "scaled_dot_product_attention"


class Attending(Protocol):
    """A cache that computes its own attention."""

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Return the attention output [1, H, N, Dv] of the last N rows' queries [1, H, N, D] over all rows before."""


def dispatch(  # noqa: PLR0917  (mlx-lm's signature)
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stand in for mlx-lm's function of the same signature.

    Raises:
        ModelError: when a cache that attends itself is asked for more than causal attention.
    """
    if not hasattr(cache, "attend"):
        output: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return output
    if sinks is not None:
        raise ModelError(
            f"sinks: {type(cache).__name__} has no attention with the model's learned sinks", field="sinks"
        )
    # A boolean one is the causal mask that the branch of the first layer made; a bias is part of the attention itself.
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        raise ModelError(f"mask: {type(cache).__name__} has no attention with a bias", field="mask")
    own: Attending = cache
    return own.attend(queries, scale)


def attend_dense(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attend dense rows [1, Hk, R, D] with the queries of the last N of them."""
    mask = None if queries.shape[2] == 1 else "causal"
    output: mx.array = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return output


def install(model: Any) -> str:
    """Route a model's attention through ``dispatch``. Harmless when repeated and for other models of its kind.

    Returns:
        Why that is impossible, or "".
    """
    modules = _attention_modules(model)
    if not modules:
        return f"model type {type(model).__module__}: its attention does not go through mlx-lm's function"
    for module in modules:
        setattr(module, _NAME, dispatch)
    return ""


def _attention_modules(model: Any) -> list[ModuleType]:
    found: dict[str, ModuleType] = {}
    for layer in model.layers:
        for _, part in layer.named_modules():
            module = sys.modules.get(type(part).__module__)
            if module is not None and getattr(module, _NAME, None) in (base.scaled_dot_product_attention, dispatch):
                found[module.__name__] = module
    return list(found.values())


def grouped(queries: mx.array, kv_heads: int) -> mx.array:
    """Return queries [1, H, N, D] as [1, Hk, G * N, D]: query heads of one KV head stand together."""
    batch, heads, tokens, width = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads * tokens, width)


def causal_softmax(scores: mx.array, tokens: int) -> mx.array:
    """Return attention weights for fresh tokens that see every row before them.

    Args:
        scores: [1, Hk, G * N, rows]; the last N rows are those of the fresh tokens.
        tokens: N.
    """
    if tokens > 1:
        batch, heads, stacked, rows = scores.shape
        visible = mx.arange(rows)[None, :] <= mx.arange(rows - tokens, rows)[:, None]
        split = scores.reshape(batch, heads, stacked // tokens, tokens, rows)
        scores = mx.where(visible, split, mx.finfo(scores.dtype).min).reshape(batch, heads, stacked, rows)
    return mx.softmax(scores, axis=-1, precise=True)
