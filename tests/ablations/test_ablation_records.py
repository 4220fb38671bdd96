"""Records on disk: one line each, nothing lost, a torn end forgiven, anything else refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.records import Failure, Record, RecordFile
from kvferry.core.errors import StoreError

ORIGIN = Provenance("abc", "a processor", 2, "cpu", "Linux", {"kvferry": "1"})


def record(cell: str, **changes: Any) -> Record:
    given: dict[str, Any] = {
        "id": cell,
        "status": "done",
        "model": "m",
        "document": "d",
        "prefix_tokens": 7,
        "continuation_tokens": 2,
        "method": "B3",
        "parameters": {"budget": 64},
        "figures": {"kl_mean": 0.25, "tier": "poor"},
        "date": "2026-11-30",
        "provenance": ORIGIN,
    }
    return Record(**(given | changes))


def failed(cell: str) -> Record:
    return record(cell, status="failed", figures={}, failure=Failure("MODEL", "no"))


def test_a_record_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    file = RecordFile(path)
    assert not path.exists()
    file.append(record("a"))
    file.append(failed("b"))
    first, second = path.read_text("utf-8").splitlines()
    assert json.loads(first)["figures"] == {"kl_mean": 0.25, "tier": "poor"}
    assert json.loads(first)["provenance"]["commit"] == "abc"
    assert json.loads(second)["failure"] == {"code": "MODEL", "message": "no"}
    assert path.read_bytes().endswith(b"\n")


def test_what_was_appended_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    skipped = record("s", status="skipped", figures={}, reason="it sends text")
    for item in (record("a"), skipped, failed("f")):
        file.append(item)
    for opened in (file, RecordFile(path)):
        assert opened.finished("a") == record("a")
        assert opened.finished("s") == skipped
        assert opened.finished("f") is None
        assert opened.finished("unknown") is None


def test_the_newest_record_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for outcomes, finished in (([failed("a"), record("a")], record("a")), ([record("a"), failed("a")], None)):
        path.unlink(missing_ok=True)
        file = RecordFile(path)
        for outcome in outcomes:
            file.append(outcome)
        assert file.finished("a") == finished
        assert RecordFile(path).finished("a") == finished


def test_every_torn_end_is_forgiven_and_then_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.append(record("a"))
    whole = path.stat().st_size
    file.append(record("b"))
    data = path.read_bytes()
    for end in range(whole, len(data)):
        path.write_bytes(data[:end])
        opened = RecordFile(path)
        assert opened.finished("a") == record("a")
        assert opened.finished("b") is None
        opened.append(record("c"))
        assert path.read_bytes() == data[:whole] + data[whole:].replace(b'"id":"b"', b'"id":"c"')


def test_records_are_on_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle)))
    RecordFile(path).append(record("a"))
    assert path.stat().st_size in synced


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"My notes\n", 1),
        (b"My notes, without an end", 1),
        (b"{}\n", 1),
        (b"\n", 1),
        (b"%b\n%b\n", 2),
        (b"%b\nMy notes", 2),
        (b'%b\n{"id":"x"}\n', 2),
        (b"\xff\xfe\n", 1),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, data: bytes, line: int) -> None:
    path = tmp_path / "records.jsonl"
    RecordFile(path).append(record("a"))
    whole = path.read_bytes().rstrip()
    data = data.replace(b"%b", whole, 1).replace(b"%b", whole[:-5])
    path.write_bytes(data)
    with pytest.raises(StoreError, match=rf"records.jsonl: line {line} is no record"):
        RecordFile(path)
    assert path.read_bytes() == data


def test_a_disk_that_refuses_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Is a directory"):
        RecordFile(tmp_path)
    (tmp_path / "file").write_text("")
    file = RecordFile(tmp_path / "file" / "records.jsonl")
    with pytest.raises(StoreError, match="records.jsonl: "):
        file.append(record("a"))
