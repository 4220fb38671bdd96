"""KeyDiff: the rows whose keys differ most from the others."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

import mlx.core as mx
import numpy as np
from msgspec import Meta

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import Positions, Scores, to_scores, top_rows
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject


class KeyDiffParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``block`` rows are added at a time, each followed by an eviction, as in the paper; 0 scores all rows at once."""

    block: Annotated[int, Meta(ge=0)] = 128


def directions(keys: mx.array) -> Scores:
    """Return keys [Hk, T, D] at length 1, fp32. A zero key has no direction and stays zero.

    Raises:
        ModelError: when a key or its norm is not finite.
    """
    plain = keys.astype(mx.float32)
    norms = mx.sqrt(mx.sum(plain * plain, axis=-1, keepdims=True))
    to_scores("keydiff", norms)
    return to_scores("keydiff", plain / mx.where(norms > 0, norms, 1.0))


def keydiff_scores(units: Scores) -> Scores:
    """Return -cos(key, anchor) for every row, [Hk, R], where the anchor is the mean of the directions [Hk, R, D]."""
    anchor = units.mean(axis=1, keepdims=True)
    length = np.sqrt((anchor * anchor).sum(axis=-1))
    # Not a matrix product: BLAS may sum equal rows in another order, and equal keys must tie.
    cosines = (units * anchor).sum(axis=-1) / np.where(length > 0, length, 1.0)
    scores: Scores = -cosines.astype(np.float32)
    return scores


def keydiff_rows(units: Scores, count: int, block: int) -> list[Positions]:
    """Return the rows that every head keeps.

    Args:
        units: directions [Hk, T, D].
        count: rows a head.
        block: rows added at a time; ``count`` remain after each. 0 adds all at once.
    """
    heads, rows, _ = units.shape
    held = np.empty((heads, 0), dtype=np.int32)
    step = block or rows
    for start in range(0, rows, step):
        added = np.arange(start, min(start + step, rows), dtype=np.int32)
        held = np.concatenate([held, np.broadcast_to(added, (heads, added.size))], axis=1)
        if held.shape[1] > count:
            scores = keydiff_scores(np.take_along_axis(units, held[..., None], axis=1))
            held = np.take_along_axis(held, np.stack(top_rows(scores, count)), axis=1)
    return list(held)


class KeyDiff(SelectingMethod):
    """Drops the keys that are most like the mean key.

    Adapted, in blocks as well: the paper evicts while it reads, so that later blocks see what is left of earlier ones.
    Here the prefix was read with every row in sight, and the paper's iteration runs over its keys.
    """

    info = MethodInfo(
        id="keydiff",
        name="keydiff",
        form="kv",
        label="adapted",
        aware=False,
        source="KeyDiff, arXiv 2504.15364; NVIDIA/kvpress keydiff_press.py",
        summary="the keys least like their mean, block by block or at once, chosen after the whole reading",
    )
    parameters = KeyDiffParameters

    def rank(self, subject: Subject, given: KeyDiffParameters) -> Generator[Progress, None, Keep]:
        """Bring every key to length 1. What remains of a block depends on the budget, so the rest is done for it."""
        yield Progress("method", 0, 1)
        units = [directions(layer.keys[0]) for layer in subject.layers]

        def keep(count: int) -> Kept:
            return [keydiff_rows(layer, count, given.block) for layer in units]

        return keep
