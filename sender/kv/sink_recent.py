"""B3, sink and recent rows: the first few and the last ones, at their own positions."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

import numpy as np
from msgspec import Meta

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.selection import Positions, check_room, protect, same_for_every_head
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.selecting import Keep, Kept, SelectingMethod, Subject, every_layer

Sinks = Annotated[int, Meta(ge=0, le=4096)]


class SinkRecentParameters(SelectionParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``sinks`` first rows; the rest of the budget goes to the last rows."""

    sinks: Sinks = 4


def sink_recent_rows(rows: int, count: int, sinks: int) -> Positions:
    """Return the first ``sinks`` and the last ``count - sinks`` of ``rows`` rows, ascending.

    Raises:
        InvalidRequestError: when the budget leaves no recent row although rows are dropped.
    """
    count = min(count, rows)
    check_room(count, rows, sinks, 1)
    kept: Positions = np.flatnonzero(protect(rows, sinks, count - sinks)).astype(np.int32)
    return kept


class SinkRecent(SelectingMethod):
    """Keeps what StreamingLLM keeps, without renumbering: fresh tokens see a gap."""

    info = MethodInfo(
        id="B3",
        name="sink-recent",
        form="kv",
        label="inspired",
        aware=False,
        source="StreamingLLM, arXiv 2309.17453 (its row set only)",
        summary="the first rows and the last ones, at their own positions",
    )
    parameters = SinkRecentParameters

    def rank(self, subject: Subject, given: SinkRecentParameters) -> Generator[Progress, None, Keep]:
        """Nothing to rank."""
        yield Progress("method", 0, 1)

        def keep(count: int) -> Kept:
            rows = sink_recent_rows(subject.rows, count, given.sinks)
            return every_layer(same_for_every_head(rows, subject.layers[0].kv_heads), len(subject.layers))

        return keep
