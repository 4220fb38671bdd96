"""ChunkKV: whole chunks of neighbouring rows, ranked once for all heads of a layer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import Positions, Scores, same_for_every_head, to_scores, top_rows
from kvferry.sender.kv import keydiff, l2norm, probes
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject
from kvferry.sender.kv.window_scores import WindowScoreParameters, score_behind


class ChunkKVParameters(WindowScoreParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``chunk`` rows stay or go together. ``scorer`` ranks rows: B5's attention, key norms, or keys' differences.

    Those of B5, kernel to reduction_order, matter to the scorer "snapkv" only.
    """

    chunk: Annotated[int, Meta(ge=1, le=4096)] = 20
    scorer: Literal["snapkv", "l2norm", "keydiff"] = "snapkv"


def chunk_scores(scores: Scores, chunk: int) -> Scores:
    """Return the score of every chunk, [ceil(T / chunk)]: the mean over its rows of the sum over heads.

    Args:
        scores: [Hk, T]. The last chunk may be a partial one, which competes with its own mean.
        chunk: rows of a chunk.
    """
    total = scores.astype(np.float64).sum(axis=0)
    starts = np.arange(0, total.size, chunk)
    means: Scores = (np.add.reduceat(total, starts) / np.diff([*starts, total.size])).astype(np.float32)
    return means


def chunkkv_rows(scores: Scores, count: int, chunk: int) -> Positions:
    """Return the rows of the best chunks, ascending.

    That many chunks as the budget's share of all chunks, rounded down. Where the last chunk is short, they may hold
    more rows than the budget; the worst of them goes then.

    Args:
        scores: [Hk, T], with at least one complete chunk.
        count: rows at most.
        chunk: rows of a chunk.

    Raises:
        InvalidRequestError: when the budget holds no chunk.
    """
    rows = scores.shape[1]
    if count >= rows:
        return np.arange(rows, dtype=np.int32)
    if count < chunk:
        raise InvalidRequestError(
            f"budget: {count} rows, which hold no chunk of {chunk}", field="budget", value=count, minimum=chunk
        )
    ranking = chunk_scores(scores, chunk)[None]
    chunks = max(ranking.size * count // rows, 1)
    kept = _expand(top_rows(ranking, chunks)[0], chunk, rows)
    if kept.size > count:
        kept = _expand(top_rows(ranking, chunks - 1)[0], chunk, rows)
    return kept


def _expand(chosen: Positions, chunk: int, rows: int) -> Positions:
    members = (chosen[:, None] * chunk + np.arange(chunk)).reshape(-1)
    kept: Positions = members[members < rows].astype(np.int32)
    return kept


class ChunkKV(SelectingMethod):
    """Adapted: rows are scored by a probe behind the prefix, and each layer ranks its chunks by itself.

    A prefix without a complete chunk is left to the scorer, head by head.
    """

    info = MethodInfo(
        id="chunkkv",
        name="chunkkv",
        form="kv",
        label="adapted",
        aware=False,
        source="ChunkKV, arXiv 2502.00299; NVIDIA/kvpress chunkkv_press.py",
        summary="whole chunks of neighbouring rows that a generic instruction looks at most, the same for all heads",
    )
    parameters = ChunkKVParameters

    def observes(self, given: ChunkKVParameters) -> bool:
        """With the scorer of B5."""
        return given.scorer == "snapkv"

    def rank(self, subject: Subject, given: ChunkKVParameters) -> Generator[Progress, None, Keep]:
        """Score every row."""
        scores = yield from _scores(subject, given)

        def keep(count: int) -> Kept:
            if subject.rows < given.chunk:
                return [top_rows(layer, count) for layer in scores]
            return [same_for_every_head(chunkkv_rows(layer, count, given.chunk), len(layer)) for layer in scores]

        return keep


def _scores(subject: Subject, given: ChunkKVParameters) -> Generator[Progress, None, list[Scores]]:
    if given.scorer == "snapkv":
        return (yield from score_behind(subject, probes.instruction_ids(subject.model), given)).layers
    yield Progress("method", 0, 1)
    if given.scorer == "l2norm":
        return [to_scores("l2norm", l2norm.norm_scores(layer.keys[0])) for layer in subject.layers]
    return [keydiff.keydiff_scores(keydiff.directions(layer.keys[0])) for layer in subject.layers]
