"""Q-Filters without calibration: the direction of the first keys, and a sign that must be guessed.

The axis is the first right singular vector of the first ``warmup`` keys, not centred, which is then frozen. A singular
vector has no sign: it is oriented so that those keys lie along it more than against it, and ``sign`` says which end is
kept. Nothing is dropped before the warm-up is complete.

The result depends on the path: with ``mode`` "incremental" the axis comes from every key that is there after the chunk
that completes the warm-up, so another ``chunk`` may give another axis and other rows. "one-shot" looks at exactly
``warmup`` keys.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Annotated, Any, Literal

import mlx.core as mx
import numpy as np
from msgspec import Meta

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import to_scores
from kvferry.sender.calibration.directions import first_axis, sign_of_sum
from kvferry.sender.kv.qfilters import (
    StreamingParameters,
    filter_scores,
    keep_rows,
    layer_keys,
    warn_without_recent,
)
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject


class KeyDirectionParameters(StreamingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``sign`` 1 keeps the rows furthest along the axis of the first ``warmup`` keys, -1 those furthest against it."""

    sign: Literal[1, -1] = 1
    warmup: Annotated[int, Meta(ge=1, le=65_536)] = 128


def observed_rows(rows: int, given: KeyDirectionParameters) -> int:
    """Return how many keys the axis is taken from; 0 when the warm-up is never complete."""
    if rows < given.warmup:
        return 0
    if given.mode == "one-shot":
        return given.warmup
    return min(math.ceil(given.warmup / given.chunk) * given.chunk, rows)


def key_filter(keys: np.ndarray[Any, Any], sign: int) -> np.ndarray[Any, Any]:
    """Return a filter [D] in the stored form, with a minus sign, from keys [N, D].

    Raises:
        ModelError: when a key is not finite, or all are 0.
    """
    axis = first_axis(keys)
    return -sign * (sign_of_sum(keys.astype(np.float64) @ axis) or 1) * axis


class QFiltersSvd(SelectingMethod):
    """Direction of the keys in place of that of the queries."""

    info = MethodInfo(
        id="qfilters-svd",
        name="qfilters-svd",
        form="kv",
        label="inspired",
        aware=False,
        source="Q-Filters, arXiv 2503.02812 (its form only: keys in place of queries, sign guessed)",
        summary="rows furthest along the first keys' own direction; nothing is evicted while answering",
    )
    parameters = KeyDirectionParameters

    def rank(self, subject: Subject, given: KeyDirectionParameters) -> Generator[Progress, None, Keep]:
        """Find every head's axis and score every row; a prefix below the warm-up is only ever kept whole."""
        warn_without_recent(self.info.id, given)
        observed = observed_rows(subject.rows, given)
        scores = []
        for number, keys in enumerate(layer_keys(subject) if observed else ()):
            try:
                filters = np.stack([key_filter(head[:observed], given.sign) for head in keys])
            except ModelError as error:
                raise ModelError(f"layers.{number}.keys: {error.message}", field=f"layers.{number}.keys") from error
            scores.append(to_scores(f"layers.{number}", mx.array(filter_scores(keys, filters))))
            yield Progress("method", number + 1, len(subject.layers))

        def keep(count: int) -> Kept:
            if count >= subject.rows:
                every = np.arange(subject.rows, dtype=np.int32)
                return [[every] * layer.kv_heads for layer in subject.layers]
            if not observed:
                raise InvalidRequestError(
                    f"warmup: {given.warmup} keys come before anything is dropped, the prefix has {subject.rows}",
                    field="warmup",
                    value=given.warmup,
                    tokens=subject.rows,
                )
            return [keep_rows(layer, count, given, observed) for layer in scores]

        return keep
