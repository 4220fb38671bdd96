"""What a run found: one JSON line a cell, on disk before the next cell begins.

A run that is broken off goes on where it stopped. Its last line may be torn then; that cell is run again. So is one
that failed: the newest record of a cell counts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from kvferry.ablations.harness.provenance import Provenance
from kvferry.core import json_records
from kvferry.core.errors import StoreError
from kvferry.core.files import fsync_directory
from kvferry.core.manifest import Scalar

Status = Literal["done", "failed", "skipped"]
# Every record begins like this, because ``id`` is its first field.
_BEGINNING = b'{"id":"'


class Failure(msgspec.Struct, frozen=True):
    """Why a cell has no figures: the stable code of the error, and its message."""

    code: str
    message: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One cell's outcome.

    Attributes:
        id: digest of everything that shapes the cell.
        status: "done" has figures; "failed" has a failure and is run again; "skipped" has a reason and is not.
        model, document, method: as the grid names them.
        question: that was asked, of an experiment that asks several of a document.
        prefix_tokens, continuation_tokens: what the grid asks for, of an experiment that cuts documents; the figures
            say what was there.
        parameters: as the grid gives them.
        figures: by name; each experiment says which.
        failure: of a failed cell.
        reason: why a cell was skipped.
        date: of the run, ISO 8601.
        provenance: commit, versions and machine.
    """

    id: str
    status: Status
    model: str
    document: str
    question: str = ""
    prefix_tokens: int = 0
    continuation_tokens: int = 0
    method: str
    parameters: dict[str, Scalar]
    figures: dict[str, Scalar] = {}
    failure: Failure | None = None
    reason: str = ""
    date: str
    provenance: Provenance


class RecordFile:
    """A file of records. One process writes it."""

    def __init__(self, path: Path) -> None:
        """Open or begin a file.

        Raises:
            StoreError: when the file cannot be read or holds something else; the message names the line.
        """
        self._path = path
        self._found: dict[str, Record] = {}
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
        *lines, torn = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            record = self._decode(line, number)
            self._found[record.id] = record
        if torn and not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
            raise StoreError(f"{path}: line {len(lines) + 1} is no record", path=str(path))
        self._whole = len(data) - len(torn)

    def newest(self, cell: str) -> Record | None:
        """Return a cell's newest record, None when there is none."""
        return self._found.get(cell)

    def finished(self, cell: str) -> Record | None:
        """Return a cell's newest record, None when there is none or the cell failed."""
        record = self.newest(cell)
        return None if record is None or record.status == "failed" else record

    def append(self, record: Record) -> None:
        """Add a record. It is on disk when this returns.

        Raises:
            StoreError: when the disk refuses.
        """
        line = msgspec.json.encode(record) + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            with self._path.open("ab") as file:
                # What stands behind the last whole line is a record that a crash tore.
                file.truncate(self._whole)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                fsync_directory(self._path.parent)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}", path=str(self._path)) from error
        self._whole += len(line)
        self._found[record.id] = record

    def _decode(self, line: bytes, number: int) -> Record:
        try:
            return json_records.decode(line, Record)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{self._path}: line {number} is no record: {error}", path=str(self._path)) from error
