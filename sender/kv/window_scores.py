"""SnapKV's scores: how much attention a window of queries pays to every row of the prefix, smoothed over neighbours.

In numpy: MLX takes several times as long for an exponential on a CPU, and a score is the same on every device.
Symbols: H query heads, Hk KV heads, G = H / Hk, W queries of the window, T rows of the prefix before the window.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import mlx.core as mx
import numpy as np
from msgspec import Meta

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import Progress, passing_on
from kvferry.engine.observe import Window
from kvferry.engine.selection import Flags, Scores, protect, to_scores
from kvferry.sender.kv import probes
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Subject

Array = np.ndarray[Any, np.dtype[np.float32]]
WindowTokens = Annotated[int, Meta(ge=1, le=4096)]
_WEIGHTS_AT_ONCE = 2**23
"""Attention weights held at a time, so that a long question does not need memory of its length times the prefix's."""


class WindowScoreParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How attention becomes a score.

    ``query_reduction`` over the queries of the window, which ranks alike; ``group_reduction`` over the query heads of a
    KV head; ``pooling`` over ``kernel`` neighbouring rows. ``reduction_order``: the group before the pooling, or after.
    """

    kernel: Annotated[int, Meta(ge=1, le=1023)] = 7
    pooling: Literal["max", "avg"] = "max"
    query_reduction: Literal["mean", "sum"] = "mean"
    group_reduction: Literal["mean", "max"] = "mean"
    reduction_order: Literal["group-pool", "pool-group"] = "group-pool"

    def __post_init__(self) -> None:
        if self.kernel % 2 == 0:
            raise InvalidRequestError(
                f"kernel: {self.kernel}, must be odd, from 1 to 1023", field="kernel", value=self.kernel
            )


class BlindWindowParameters(WindowScoreParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whose queries count when the question is not known.

    ``window`` "instruction": a generic one of 32 tokens that runs behind the prefix. "prompt", as published: the
    prefix's own last ``window_tokens``, whose rows are always kept and count for the budget.
    """

    window: Literal["instruction", "prompt"] = "instruction"
    window_tokens: WindowTokens = 32


def window_votes(queries: Array, prefix_keys: Array, window_keys: Array) -> Generator[int, None, Scores]:
    """Return the attention that every row of the prefix gets, [H, T]: the sum over the window's queries.

    The softmax goes over prefix and window, causal within the window, whose columns are dropped afterwards.

    Args:
        queries: [H, W, D], fp32, after rotation.
        prefix_keys: [Hk, T, D].
        window_keys: [Hk, W, D].

    Yields:
        How many queries are done, after every block of them but the last.
    """
    heads, tokens, width = queries.shape
    rows = prefix_keys.shape[1]
    scaled = queries * np.float32(width**-0.5)
    votes: Scores = np.zeros((heads, rows), dtype=np.float32)
    step = max(_WEIGHTS_AT_ONCE // (heads * (rows + tokens)), 1)
    for start in range(0, tokens, step):
        # What overflows ends as NaN, which no score may be.
        with np.errstate(over="ignore", invalid="ignore"):
            votes += _block_votes(scaled[:, start : start + step], start, prefix_keys, window_keys)
        if start + step < tokens:
            yield start + step
    return votes


def _block_votes(scaled: Array, start: int, prefix_keys: Array, window_keys: Array) -> Scores:
    """Return the votes of some of the window's queries, scaled ones, of which the first is number ``start``."""
    heads, count, width = scaled.shape
    (kv_heads, rows, _), tokens = prefix_keys.shape, window_keys.shape[1]
    asking = scaled.reshape(kv_heads, -1, width)
    prefix = (asking @ prefix_keys.swapaxes(1, 2)).reshape(heads, count, rows)
    window = (asking @ window_keys.swapaxes(1, 2)).reshape(heads, count, tokens)
    window[:, ~np.tri(count, tokens, start, dtype=np.bool_)] = -np.inf
    top = np.maximum(prefix.max(axis=-1), window.max(axis=-1))[..., None]
    np.exp(prefix - top, out=prefix)
    shares = 1 / (prefix.sum(axis=-1) + np.exp(window - top).sum(axis=-1))
    votes: Scores = (shares[:, None] @ prefix)[:, 0]
    return votes


def check_finite(name: str, keys: Array) -> None:
    """Refuse keys of which one is not finite: an infinite one may have weight 0, which would look like any other.

    Raises:
        ModelError: naming who asked.
    """
    if not np.isfinite(keys).all():
        raise ModelError(f"{name}: a key is not finite; nothing is selected", field=name)


def pool(scores: Scores, kernel: int, pooling: Literal["max", "avg"]) -> Scores:
    """Return the maximum or the mean over ``kernel`` neighbours, an odd number, for scores [..., T].

    Beyond the ends there is -inf for the maximum; for the mean there are zeros, which count.
    """
    half = kernel // 2
    edges = [(0, 0)] * (scores.ndim - 1) + [(half, half)]
    padded = np.pad(scores, edges, constant_values=-np.inf if pooling == "max" else 0.0)
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1)
    pooled: Scores = neighbours.max(axis=-1) if pooling == "max" else neighbours.sum(axis=-1) / np.float32(kernel)
    return pooled


def window_scores(
    queries: Array, prefix_keys: Array, window_keys: Array, given: WindowScoreParameters
) -> Generator[int, None, Scores]:
    """Return the scores [Hk, T] of the prefix's rows. Arguments and steps as for ``window_votes``.

    Raises:
        ModelError: when a key or a score is not finite.
    """
    check_finite("window scores", prefix_keys)
    votes = yield from window_votes(queries, prefix_keys, window_keys)
    if given.query_reduction == "mean":
        votes /= np.float32(queries.shape[1])
    kv_heads = len(prefix_keys)
    if given.reduction_order == "group-pool":
        scores = pool(_over_group(votes, kv_heads, given), given.kernel, given.pooling)
    else:
        scores = _over_group(pool(votes, given.kernel, given.pooling), kv_heads, given)
    return to_scores("window scores", mx.array(scores))


def _over_group(scores: Scores, kv_heads: int, given: WindowScoreParameters) -> Scores:
    grouped_scores = scores.reshape(kv_heads, len(scores) // kv_heads, scores.shape[1])
    reduced: Scores = grouped_scores.mean(axis=1) if given.group_reduction == "mean" else grouped_scores.max(axis=1)
    return reduced


@dataclass(frozen=True)
class Scored:
    """Every layer's scores [Hk, T] of all rows of a prefix, and which rows [T] are kept whatever their score."""

    layers: list[Scores]
    protected: Flags


def score_blind(subject: Subject, given: BlindWindowParameters) -> Generator[Progress, None, Scored]:
    """Score with the window that the parameters name."""
    if given.window == "prompt":
        return (yield from score_at_end(subject, given.window_tokens, given))
    return (yield from score_behind(subject, probes.instruction_ids(subject.model), given))


def score_behind(subject: Subject, ids: list[int], given: WindowScoreParameters) -> Generator[Progress, None, Scored]:
    """Score with a probe that is no part of the prefix: no row is protected."""
    layers = yield from _score(subject, probes.behind(subject, ids), subject.rows, given)
    return Scored(layers, protect(subject.rows))


def score_at_end(subject: Subject, count: int, given: WindowScoreParameters) -> Generator[Progress, None, Scored]:
    """Score with the last ``count`` tokens of the prefix, as published: they are protected, and have no scores."""
    protected = protect(subject.rows, recent=count)
    before = subject.rows - count
    if before < 1:
        return Scored([np.zeros((layer.kv_heads, subject.rows), np.float32) for layer in subject.layers], protected)
    layers = yield from _score(subject, probes.at_end(subject, count), before, given)
    return Scored([np.pad(scores, ((0, 0), (0, count))) for scores in layers], protected)


def _score(
    subject: Subject, probe: Generator[int, None, list[Window]], rows: int, given: WindowScoreParameters
) -> Generator[Progress, None, list[Scores]]:
    total = len(subject.layers)
    scores: list[Scores] = []
    yield Progress("method", 0, total)
    windows = yield from passing_on(probe, Progress("method", 0, total))
    for layer, seen in zip(subject.layers, windows, strict=True):
        keys = np.array(layer.keys[0, :, :rows].astype(mx.float32))
        steps = window_scores(np.array(seen.queries), keys, np.array(seen.keys), given)
        scores.append((yield from passing_on(steps, Progress("method", len(scores), total))))
        yield Progress("method", len(scores), total)
    return scores
