"""The ledger on disk: whole lines, one an answer, from any number of threads and runs."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import StoreError
from kvferry.core.ledger import Ledger, ledger_from_json
from kvferry.engine.model import LoadedModel
from kvferry.receiver.ledger_file import LedgerFile


@pytest.fixture
def ledger(bench: Callable[..., Any], artifact: Callable[..., Any], tiny_model: Callable[..., LoadedModel]) -> Ledger:
    model = tiny_model("llama")
    receiver = bench(model)
    _, made = receiver.ask(receiver.take(artifact(model, "A1", "A line\nof text.")), "What?", 1)
    assert isinstance(made, Ledger)
    return made


def test_each_answer_is_one_line(tmp_path: Path, ledger: Ledger) -> None:
    file = LedgerFile(tmp_path / "ledger.jsonl")
    odd = msgspec.structs.replace(ledger, system="a\nb\u2028c 門")
    file.append(ledger)
    file.append(odd)
    lines = (tmp_path / "ledger.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [ledger_from_json(line.decode()) for line in lines] == [ledger, odd]


def test_a_restart_appends(tmp_path: Path, ledger: Ledger) -> None:
    for _ in range(3):
        LedgerFile(tmp_path / "ledger.jsonl").append(ledger)
    assert (tmp_path / "ledger.jsonl").read_text().count("\n") == 3


def test_opening_alone_writes_nothing(tmp_path: Path) -> None:
    LedgerFile(tmp_path / "deep" / "er" / "ledger.jsonl")
    assert (tmp_path / "deep" / "er" / "ledger.jsonl").read_bytes() == b""


def test_lines_of_many_threads_do_not_mix(tmp_path: Path, ledger: Ledger) -> None:
    file = LedgerFile(tmp_path / "ledger.jsonl")
    records = [msgspec.structs.replace(ledger, system=str(number) * 3000) for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(file.append, records))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert sorted(ledger_from_json(line).system for line in lines) == sorted(record.system for record in records)


def test_a_file_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"^ledger {tmp_path}: "):
        LedgerFile(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"^ledger {tmp_path / 'file' / 'ledger.jsonl'}: "):
        LedgerFile(tmp_path / "file" / "ledger.jsonl")


def test_a_file_that_is_lost_later_is_one_clear_error(tmp_path: Path, ledger: Ledger) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=f"^ledger {path}: "):
        file.append(ledger)


def test_a_file_that_was_moved_away_starts_anew(tmp_path: Path, ledger: Ledger) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path)
    file.append(ledger)
    path.rename(tmp_path / "ledger.1.jsonl")
    file.append(ledger)
    assert path.read_text() == (tmp_path / "ledger.1.jsonl").read_text()


def test_half_a_line_is_taken_back(tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path)
    file.append(ledger)
    writes = iter([True, True, False])

    class Filling(io.FileIO):
        def write(self, data: Any) -> int:
            if not next(writes):
                raise OSError(28, "No space left on device")
            return super().write(bytes(data)[:10])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *_, **__: Filling(path, "ab"))
        with pytest.raises(StoreError, match="No space left"):
            file.append(ledger)
    file.append(ledger)
    assert [ledger_from_json(line) for line in path.read_text("utf-8").splitlines()] == [ledger, ledger]
