"""Runs the cells of a grid one after the other, whatever it is that they measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvferry.ablations import provenance
from kvferry.ablations.grid import Cell, Grid, ModelEntry, cell_id
from kvferry.ablations.provenance import Provenance
from kvferry.ablations.records import Failure, Record, RecordFile, Status
from kvferry.core.errors import KvferryError
from kvferry.core.manifest import Model, Scalar

Advance = Callable[[str, float], None]


@dataclass(frozen=True)
class Skipped:
    """A cell that this experiment has no figures for, and why."""

    reason: str


class Bench(Protocol):
    """An experiment with one model at hand."""

    @property
    def model(self) -> Model:
        """What the model is, from its contents."""

    def measure(self, cell: Cell) -> dict[str, Scalar] | Skipped:
        """Return a cell's figures.

        Raises:
            KvferryError: when the cell cannot be run; it is recorded, and the run goes on.
        """


def run(
    grid: Grid, file: RecordFile, open_bench: Callable[[ModelEntry], AbstractContextManager[Bench]], advance: Advance
) -> list[Record]:
    """Run what is not finished yet.

    Args:
        grid: what to run.
        file: where records go; finished cells found there are not run again.
        open_bench: loads a model.
        advance: told what happens and which share of the whole is done.

    Returns:
        The newest record of every cell of the grid, in the grid's order. A cell that the grid names twice is one.

    Raises:
        KvferryError: when a model cannot be loaded or a record cannot be written.
    """
    origin = provenance.here()
    total = len(grid.models) * len(grid.documents) * len(grid.settings)
    done = 0
    records: dict[str, Record] = {}
    for model in grid.models:
        advance(f"{model.name}: loading", done / total)
        with open_bench(model) as bench:
            for cell in grid.cells(model):
                advance(describe(cell), done / total)
                identity = cell_id(cell, bench.model, origin)
                if identity not in records:
                    records[identity] = file.finished(identity) or _run_cell(cell, bench, identity, file, origin)
                done += 1
    advance("", 1.0)
    return list(records.values())


def describe(cell: Cell) -> str:
    """Return a cell in a few words."""
    parameters = "".join(f" {name}={value}" for name, value in cell.setting.parameters)
    return f"{cell.model.name}, {cell.document.name}: {cell.setting.method}{parameters}"


def _run_cell(cell: Cell, bench: Bench, identity: str, file: RecordFile, origin: Provenance) -> Record:
    record = _measure(cell, bench, identity, origin)
    file.append(record)
    return record


def _measure(cell: Cell, bench: Bench, identity: str, origin: Provenance) -> Record:
    status: Status = "done"
    figures: dict[str, Scalar] = {}
    failure, reason = None, ""
    try:
        result = bench.measure(cell)
    except KvferryError as error:
        status, failure = "failed", Failure(error.code, error.message)
    else:
        if isinstance(result, Skipped):
            status, reason = "skipped", result.reason
        else:
            figures = result
    return Record(
        id=identity,
        status=status,
        model=cell.model.name,
        document=cell.document.name,
        prefix_tokens=cell.model.prefix_tokens,
        continuation_tokens=cell.model.continuation_tokens,
        method=cell.setting.method,
        parameters=dict(cell.setting.parameters),
        figures=figures,
        failure=failure,
        reason=reason,
        date=provenance.today(),
        provenance=origin,
    )
