"""Q-Filters: rows whose keys lie furthest along the direction of the model's queries, found once for the model.

Keys are scored by minus their product with the stored filter, because filters are stored with a minus sign. A row's
score never changes, so the kept set does not depend on how rows are cut into chunks, bit for bit. Eviction follows the
prefill: nothing is dropped before the last row is read. Budgets have no upper limit of their own, because rows are
ranked on the CPU.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, Literal

import mlx.core as mx
import numpy as np
from msgspec import Meta

from kvferry.core import logs
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.model import LoadedModel
from kvferry.engine.selection import Positions, Scores, to_scores
from kvferry.sender.calibration import binding, folder
from kvferry.sender.calibration.qfilters_file import QFilters as Calibration
from kvferry.sender.kv import streaming
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject

Protected = Annotated[int, Meta(ge=0, le=65_536)]


class StreamingParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``sinks`` first rows and ``recent`` last rows are always kept; the rest of the budget goes by score.

    ``mode`` "incremental" drops rows after every ``chunk`` of the prefix instead of once at its end.
    """

    sinks: Protected = 0
    recent: Protected = 32
    mode: Literal["one-shot", "incremental"] = "one-shot"
    chunk: Annotated[int, Meta(ge=1, le=65_536)] = 512


class QFiltersParameters(StreamingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``calibration`` is a name; "" takes the one that is bound to the model."""

    calibration: Annotated[str, Meta(pattern=f"^({folder.NAME_PATTERN})?$", description=folder.NAMES)] = ""


def filter_scores(keys: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]) -> Scores:
    """Return the score of every row, fp32 [Hk, T]; the highest are kept.

    Args:
        keys: [Hk, T, D], as they stand in the cache.
        stored: [Hk, D], with the minus sign.
    """
    # Row by row and not as a matrix product, whose rounding depends on how many rows there are.
    rows = [
        -(head.astype(np.float64) * filter_.astype(np.float64)).sum(axis=-1)
        for head, filter_ in zip(keys, stored, strict=True)
    ]
    scores: Scores = np.stack(rows).astype(np.float32)
    return scores


def layer_keys(subject: Subject) -> Generator[np.ndarray[Any, Any], None, None]:
    """Yield every layer's keys, fp32 [Hk, T, D]."""
    for layer in subject.layers:
        yield np.array(layer.keys[0].astype(mx.float32))


def keep_rows(scores: Scores, count: int, given: StreamingParameters, warmup: int = 0) -> list[Positions]:
    """Return the rows that a layer's heads keep, in the way that the parameters name."""
    if given.mode == "one-shot":
        return streaming.rows_at_once(scores, count, sinks=given.sinks, recent=given.recent)
    rows = scores.shape[1]
    chunks = [min(given.chunk, rows - start) for start in range(0, rows, given.chunk)]
    return streaming.rows_in_chunks(scores, count, sinks=given.sinks, recent=given.recent, chunks=chunks, warmup=warmup)


def warn_without_recent(method: str, given: StreamingParameters) -> None:
    """Say in the log that long answers suffer without recent rows."""
    if given.recent == 0:
        logs.logger("sender").warning(
            "recent is 0: fine for looking something up, but text that goes on for long needs the last rows",
            method=method,
        )


class QFilters(SelectingMethod):
    """The calibrated filters. The published cache evicts while it answers as well; a receiver here does not."""

    info = MethodInfo(
        id="qfilters",
        name="qfilters",
        form="kv",
        label="adapted",
        aware=False,
        source="Q-Filters, arXiv 2503.02812; NathanGodey/qfilters src/hf_cache.py",
        summary="rows furthest along the queries' calibrated direction; nothing is evicted while answering",
    )
    parameters = QFiltersParameters

    def calibrated(self, model: LoadedModel, given: QFiltersParameters) -> Calibration:
        """Return the model's filters.

        Raises:
            NotFoundError: when there are none; the message says how to make them.
            InvalidRequestError, ContainerError: when the named ones cannot be used.
        """
        return folder.find(given.calibration, binding.describe(model.profile))

    def rank(self, subject: Subject, given: QFiltersParameters) -> Generator[Progress, None, Keep]:
        """Score every row."""
        warn_without_recent(self.info.id, given)
        filters = subject.calibration.filters
        scores = []
        for number, (keys, stored) in enumerate(zip(layer_keys(subject), filters, strict=True)):
            scores.append(to_scores(f"layers.{number}", mx.array(filter_scores(keys, stored))))
            yield Progress("method", number + 1, len(filters))

        def keep(count: int) -> Kept:
            return [keep_rows(layer, count, given) for layer in scores]

        return keep
