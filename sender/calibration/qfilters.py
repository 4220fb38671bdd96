"""Calibration of Q-Filters: the queries of texts, as they stand in the attention, to one filter a KV head.

Rule: Q-Filters, arXiv 2503.02812; NathanGodey/qfilters, make_filters.py. The queries are those after RoPE, and after
their norm where a model has one, because the keys that they meet in a cache are rotated. One random choice of rows
serves all layers and heads. The official loop stops one sequence before the number it is given; here the number holds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import Progress
from kvferry.engine.model import LoadedModel
from kvferry.engine.observe import replay
from kvferry.sender.calibration import binding, corpus, qfilters_file
from kvferry.sender.calibration.corpus import Corpus
from kvferry.sender.calibration.directions import SignRule, stored_filters
from kvferry.sender.calibration.qfilters_file import QFilters, Record

LEAST_ROWS = 256
"""Queries a head below which no direction is taken; twice the head dimension if that is more."""


@dataclass(frozen=True)
class Request:
    """How to calibrate.

    Attributes:
        tokens: of a full sequence.
        sequences: most sequences.
        rows: most queries a head.
        seed: of the choice of rows.
        sign: the sign rule.
    """

    tokens: int = 2048
    sequences: int = 20
    rows: int = 3000
    seed: int = 0
    sign: SignRule = "majority"


@dataclass(frozen=True)
class Calibrated:
    """Filters, and the corpus that they were found on."""

    calibration: QFilters
    corpus: Corpus


def calibrate(model: LoadedModel, texts: Sequence[str], request: Request) -> Generator[Progress, None, Calibrated]:
    """Find a model's filters.

    Args:
        model: what they are for; its caches must be plain.
        texts: what it reads.
        request: how much of it, and how.

    Yields:
        Progress of the stages "read" (tokens) and "filters" (layers).

    Raises:
        ContextOverflowError: when a sequence does not fit the context.
        InvalidRequestError: when the texts, or the rows asked for, are too few.
        ModelError: when the model's queries cannot be seen, or have no direction.
    """
    bound = binding.describe(model.profile)
    if model.profile.attention:
        raise ModelError(f"model: {bound.id} does not show its queries: {model.profile.attention}", field="model")
    least = max(LEAST_ROWS, 2 * bound.head_dim)
    if request.rows < least:
        raise InvalidRequestError(
            f"rows: {request.rows}, at least {least} are needed for a head dimension of {bound.head_dim}",
            field="rows",
            value=request.rows,
            minimum=least,
        )
    read = corpus.cut(model, texts, request.tokens, request.sequences, least)
    chosen = np.sort(np.random.default_rng(request.seed).permutation(read.tokens)[: request.rows])
    rows = yield from query_rows(model, read, chosen)
    filters, undecided = [], 0
    for layer, queries in enumerate(rows):
        try:
            found = stored_filters(queries, bound.kv_heads, request.sign)
        except ModelError as error:
            raise ModelError(f"layer {layer}: {error.message}", **error.fields) from error
        filters.append(found.stored)
        undecided += found.undecided
        yield Progress("filters", layer + 1, len(rows))
    record = Record(
        version=qfilters_file.VERSION,
        model=bound,
        sign="negative",
        estimator=request.sign,
        label="faithful" if request.sign == "majority" else "adapted",
        sequences=len(read.sequences),
        tokens=read.tokens,
        rows=len(chosen),
        seed=request.seed,
        undecided=undecided,
        corpus=read.digest.hex(),
    )
    return Calibrated(QFilters(record, np.stack(filters)), read)


def query_rows(
    model: LoadedModel, read: Corpus, chosen: np.ndarray[Any, np.dtype[np.int64]]
) -> Generator[Progress, None, list[np.ndarray[Any, np.dtype[np.float32]]]]:
    """Read sequences and return, for every layer, the queries [H, N, D] of chosen tokens.

    Args:
        model: that reads.
        read: the sequences.
        chosen: ascending numbers of tokens, counted through all sequences.
    """
    kept: list[list[mx.array]] = [[] for _ in model.profile.layers]
    before = 0
    for ids in read.sequences:

        def see(layer: int, start: int, queries: mx.array, keys: mx.array, first: int = before) -> None:  # noqa: ARG001
            low = first + start
            span = np.searchsorted(chosen, [low, low + queries.shape[1]])
            wanted = chosen[span[0] : span[1]] - low
            if wanted.size:
                rows = mx.take(queries, mx.array(wanted.astype(np.int32)), axis=1)
                # Evaluated now, or every chunk's queries would stay in memory until the end.
                mx.eval(rows)
                kept[layer].append(rows)

        for done in replay(model.model, ids, model.prefill_chunk, see):
            yield Progress("read", before + done, read.tokens)
        before += len(ids)
    return [np.concatenate([np.array(part) for part in parts], axis=1) for parts in kept]


def bind(model: LoadedModel, path: Path) -> QFilters:
    """Bind filters that were published without a record to a model, on the caller's word that they are its own.

    Raises:
        ContainerError: when the file is damaged, or its filters do not fit the model's heads.
        ModelError: when the model's caches are not plain.
    """
    bound = binding.describe(model.profile)
    filters, source = qfilters_file.read_unbound(path)
    expected = (bound.layers, bound.kv_heads, bound.head_dim)
    if filters.shape != expected:
        raise InvalidRequestError(
            f"{path.name}: filters {filters.shape}, but the model {bound.id} needs {expected} "
            "(layers, KV heads, head dimension)",
            field=qfilters_file.TENSOR,
            value=str(filters.shape),
            expected=str(expected),
        )
    record = Record(
        version=qfilters_file.VERSION,
        model=bound,
        sign="negative",
        estimator="imported",
        label="adapted",
        sequences=0,
        tokens=0,
        rows=0,
        seed=0,
        undecided=0,
        corpus=source.hex(),
    )
    return QFilters(record, filters)
