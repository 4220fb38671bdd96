"""Expected Attention: the rows that queries to come will look at, if they are distributed as those so far.

Symbols: H query heads, Hk KV heads, G = H / Hk, T rows, D head dimension. Statistics and scores are computed in
float64: they cost little beside a reading, and keys with outliers make logits in the hundreds.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
from msgspec import Meta

from kvferry.core.errors import InvalidRequestError
from kvferry.core.manifest import Rope
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.dense import DenseLayer
from kvferry.engine.observe import replay
from kvferry.engine.rope import Rotation
from kvferry.engine.selection import Scores, protect, to_scores, top_rows
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject

Doubles = np.ndarray[Any, np.dtype[np.float64]]
_POSITIONS_AT_ONCE = 64


class ExpectedAttentionParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``sinks`` first rows are kept and stand outside the statistics; ``future`` positions behind the prefix count.

    ``covariance`` and ``value_norm`` take the two factors of those names in; ``epsilon`` is added to the expected
    attention before it is multiplied by the norm of the value.
    """

    sinks: Annotated[int, Meta(ge=0, le=4096)] = 4
    future: Annotated[int, Meta(ge=1, le=65536)] = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class QueryStatistics:
    """Mean and covariance of every query head's queries, gathered piece by piece."""

    def __init__(self, heads: int, width: int) -> None:
        self._count = 0
        self._sum: Doubles = np.zeros((heads, width))
        self._products: Doubles = np.zeros((heads, width, width))

    def add(self, queries: mx.array) -> None:
        """Take in queries [H, N, D] before rotation.

        Raises:
            ModelError: when one is not finite.
        """
        rows = to_scores("expected-attention", queries).astype(np.float64)
        self._count += rows.shape[1]
        self._sum += rows.sum(axis=1)
        self._products += rows.transpose(0, 2, 1) @ rows

    def moments(self) -> tuple[Doubles, Doubles]:
        """Return the mean [H, D] and the covariance [H, D, D], divided by the number of queries."""
        mean = self._sum / self._count
        return mean, self._products / self._count - mean[:, :, None] * mean[:, None, :]


def average_rotation(rotation: Rotation, width: int, start: int, count: int) -> Doubles:
    """Return the entrywise mean of the rotation's matrices [D, D] at the positions start..start+count-1.

    What the layer really does to unit vectors, so that any kind of rotation and its magnitude are right.
    """
    total = np.zeros((width, width))
    for first in range(start, start + count, _POSITIONS_AT_ONCE):
        positions = mx.arange(first, min(first + _POSITIONS_AT_ONCE, start + count), dtype=mx.int32)
        shape = (width, positions.size)
        units = mx.broadcast_to(mx.eye(width)[:, None, :], (*shape, width))
        turned = rotation.rotate_at(units, mx.broadcast_to(positions, shape))
        total += np.array(turned).astype(np.float64).sum(axis=1).T
    return total / count


def expected_attention(mean: Doubles, covariance: Doubles | None, keys: Doubles) -> Doubles:
    """Return how much attention every row of one KV head may expect, [N].

    Args:
        mean: of rotated queries to come, [G, D].
        covariance: of the same, [G, D, D]; None leaves it out.
        keys: [N, D], after rotation.
    """
    width = keys.shape[1]
    logits = mean @ keys.T / np.sqrt(width)
    if covariance is not None:
        logits += np.einsum("gnd,nd->gn", keys @ covariance, keys) / (2 * width)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    share: Doubles = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    return share


def layer_scores(
    layer: DenseLayer, statistics: QueryStatistics, average: Doubles, given: ExpectedAttentionParameters
) -> Scores:
    """Return the scores [Hk, T] of a layer. Those of the sinks are 0: they take no part in the contest.

    Raises:
        ModelError: when a score is not finite.
    """
    keys, values = (to_scores("expected-attention", rows[0]).astype(np.float64) for rows in (layer.keys, layer.values))
    mean, covariance = statistics.moments()
    mean, covariance = mean @ average.T, average @ covariance @ average.T
    scores: Doubles = np.zeros(keys.shape[:2])
    group = len(mean) // layer.kv_heads
    for head in range(layer.kv_heads):
        asking = slice(head * group, (head + 1) * group)
        spread = covariance[asking] if given.covariance else None
        share = expected_attention(mean[asking], spread, keys[head, given.sinks :])
        if given.value_norm:
            share = (share + given.epsilon) * np.sqrt((values[head, given.sinks :] ** 2).sum(axis=1))
        scores[head, given.sinks :] = share
    return to_scores("expected-attention", mx.array(scores.astype(np.float32)))


def expected_scores(subject: Subject, given: ExpectedAttentionParameters) -> Generator[Progress, None, list[Scores]]:
    """Read the prefix again and return every layer's scores [Hk, T]; those of the sinks are 0.

    Raises:
        InvalidRequestError: when there is no row behind the sinks.
        ModelError: when a score is not finite.
    """
    if subject.rows <= given.sinks:
        raise InvalidRequestError(
            f"sinks: {given.sinks}, but the prefix has {subject.rows} tokens, and statistics need one behind them",
            field="sinks",
            value=given.sinks,
            tokens=subject.rows,
        )
    statistics = yield from _read(subject, given.sinks)
    averages: dict[tuple[Rope, int], Doubles] = {}
    scores = []
    for layer, rotation, gathered in zip(subject.layers, subject.model.rotations, statistics, strict=True):
        width = layer.keys.shape[3]
        kind = (rotation.rope, width)
        if kind not in averages:
            averages[kind] = average_rotation(rotation, width, subject.rows, given.future)
        scores.append(layer_scores(layer, gathered, averages[kind], given))
        yield Progress("method", len(scores), len(statistics))
    return scores


def _read(subject: Subject, sinks: int) -> Generator[Progress, None, list[QueryStatistics]]:
    """Gather the statistics of every layer's queries behind the sinks, before rotation."""
    gathered: dict[int, QueryStatistics] = {}

    def see(layer: int, start: int, queries: mx.array, _keys: mx.array) -> None:
        heads, count, width = queries.shape
        known = gathered.setdefault(layer, QueryStatistics(heads, width))
        behind = max(sinks - start, 0)
        if behind < count:
            known.add(subject.model.rotations[layer].unrotate(queries[None], start)[0, :, behind:])

    for done in replay(subject.model.model, subject.ids, subject.model.prefill_chunk, see):
        yield Progress("method", done, subject.rows)
    return [gathered[layer] for layer in range(len(subject.layers))]


class ExpectedAttention(SelectingMethod):
    """Keeps what queries to come are expected to look at. Reads the prefix a second time, for its queries."""

    info = MethodInfo(
        id="expected-attention",
        name="expected-attention",
        form="kv",
        label="faithful",
        aware=False,
        source="Expected Attention, arXiv 2510.00636; NVIDIA/kvpress expected_attention_press.py",
        summary="the rows that queries to come are expected to look at, from the statistics of those so far",
    )
    parameters = ExpectedAttentionParameters

    def observes(self, given: ExpectedAttentionParameters) -> bool:
        """By attention."""
        return True

    def rank(self, subject: Subject, given: ExpectedAttentionParameters) -> Generator[Progress, None, Keep]:
        """Read the prefix again and score every row."""
        scores = yield from expected_scores(subject, given)
        protected = protect(subject.rows, sinks=given.sinks)

        def keep(count: int) -> Kept:
            return [top_rows(layer, count, protected) for layer in scores]

        return keep
