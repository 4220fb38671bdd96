"""Runs the cells of a grid one after the other, whatever it is that they measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgpack
import msgspec

from kvferry.ablations.harness import provenance
from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.records import Failure, Record, RecordFile, Status
from kvferry.ablations.harness.settings import Setting
from kvferry.core.digests import digest
from kvferry.core.errors import KvferryError, UnavailableError
from kvferry.core.manifest import Scalar

Advance = Callable[[str, float], None]


class Cell(Protocol):
    """One run of an experiment."""

    @property
    def setting(self) -> Setting:
        """The method and its parameters."""

    def shape(self) -> list[Any]:
        """Return what shapes its figures beside the model and the method, as plain values."""

    def record_fields(self) -> dict[str, Any]:
        """Return what its record says of it, the names of its model and its document among it."""

    def describe(self) -> str:
        """Return it in a few words."""


CellType = TypeVar("CellType", bound=Cell)
Cell_contra = TypeVar("Cell_contra", bound=Cell, contravariant=True)


@dataclass(frozen=True)
class Skipped:
    """A cell that this experiment has no figures for, and why."""

    reason: str


class LostError(Exception):
    """Raised by a bench that cannot measure anything any more: the run ends, and no cell is to blame.

    Not one of kvferry's own errors: those stand for what crosses the wire, each for a code.
    """


class Bench(Protocol[Cell_contra]):
    """An experiment with one model at hand."""

    @property
    def model(self) -> object:
        """What the model is, from its contents: anything that msgspec can turn into plain values."""

    def measure(self, cell: Cell_contra) -> dict[str, Scalar] | Skipped:
        """Return a cell's figures.

        Raises:
            LostError: when no other cell can be run either.
            KvferryError: when the cell cannot be run; it is recorded, and the run goes on.
        """


def run(
    batches: Sequence[tuple[str, Sequence[CellType]]],
    file: RecordFile,
    open_bench: Callable[[str], AbstractContextManager[Bench[CellType]]],
    advance: Advance,
    *,
    recorded: bool = False,
) -> list[Record]:
    """Run what is not finished yet.

    Args:
        batches: models by name, and the cells of each.
        file: where records go; finished cells found there are not run again.
        open_bench: loads a model.
        advance: told what happens and which share of the whole is done.
        recorded: whether to run no cell and leave out those without a record. Models are loaded all the same: a
            record is of a model's contents, not of its name.

    Returns:
        The newest record of every cell, in the order given. A cell that is given twice is one.

    Raises:
        UnavailableError: when what measures is gone; everything that was recorded stays.
        KvferryError: when a model cannot be loaded or a record cannot be written.
    """
    origin = provenance.here()
    total = sum(len(cells) for _, cells in batches)
    done = 0
    records: dict[str, Record] = {}
    for name, cells in batches:
        advance(f"{name}: loading", done / total)
        with open_bench(name) as bench:
            for cell in cells:
                advance(cell.describe(), done / total)
                identity = cell_id(cell, bench.model, origin)
                if identity not in records:
                    found = file.newest(identity) if recorded else file.finished(identity)
                    if found is None and not recorded:
                        found = _run_cell(cell, bench, identity, file, origin)
                    if found is not None:
                        records[identity] = found
                done += 1
    advance("", 1.0)
    return list(records.values())


def cell_id(cell: Cell, model: object, origin: Provenance) -> str:
    """Return the digest of everything that shapes a cell's figures, in hexadecimal."""
    parts = [
        cell.setting.method,
        sorted(cell.setting.parameters),
        msgspec.to_builtins(model, builtin_types=(bytes,)),
        cell.shape(),
        msgspec.to_builtins(origin),
    ]
    return digest(msgpack.packb(parts)).hex()


def _run_cell(cell: CellType, bench: Bench[CellType], identity: str, file: RecordFile, origin: Provenance) -> Record:
    record = _measure(cell, bench, identity, origin)
    file.append(record)
    return record


def _measure(cell: CellType, bench: Bench[CellType], identity: str, origin: Provenance) -> Record:
    status: Status = "done"
    figures: dict[str, Scalar] = {}
    failure, reason = None, ""
    try:
        result = bench.measure(cell)
    except LostError as error:
        raise UnavailableError(str(error)) from error
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
        method=cell.setting.method,
        parameters=dict(cell.setting.parameters),
        figures=figures,
        failure=failure,
        reason=reason,
        date=provenance.today(),
        provenance=origin,
        **cell.record_fields(),
    )
