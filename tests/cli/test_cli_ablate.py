"""``kvferry ablate``: a grid in, records, a table and a document out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
TEXT = "The access code of the north warehouse is 4417. The ferry leaves at dawn with eleven crates of paper. " * 9


@pytest.fixture
def grid(tmp_path: Path, tiny_model_dir: Callable[..., Path]) -> Path:
    """Return a grid of one tiny model, one document, an exact method and one that sends text."""
    (tmp_path / "crates.txt").write_text(TEXT, "utf-8")
    path = tmp_path / "small.toml"
    path.write_text(
        f'[[models]]\nname = "{tiny_model_dir()}"\nprefix_tokens = 150\ncontinuation_tokens = 20\n'
        '[[documents]]\nfile = "crates.txt"\nquestion = "Who keeps the keys?"\n'
        '[[methods]]\nmethod = "B1"\n[[methods]]\nmethod = "A1"\n',
        "utf-8",
    )
    return path


def test_writes_records_a_table_and_the_document(kvferry: Run, grid: Path, tmp_path: Path) -> None:
    out, results = tmp_path / "records.jsonl", tmp_path / "results.md"
    shown = kvferry("ablate", "methods", "--grid", str(grid), "--out", str(out), "--results", str(results))
    assert shown.exit_code == 0
    head, row = shown.stdout.splitlines()
    assert head.split()[:3] == ["model", "document", "method"]
    assert row.split()[1:4] == ["crates", "B1", "serialised"]
    assert " good " in row
    assert shown.stderr.splitlines() == [f"records: {out}", f"results: {results}"]
    statuses = [json.loads(line)["status"] for line in out.read_text("utf-8").splitlines()]
    assert statuses == ["done", "skipped"]
    document = results.read_text("utf-8")
    assert "`kvferry ablate methods --grid small.toml`" in document
    assert "- A1: skipped: A1 sends text" in document
    assert "| B1 serialised |" in document


def test_json_ends_with_every_record(kvferry: Run, grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    shown = kvferry("ablate", "methods", "--grid", str(grid), "--out", str(out), "--json")
    (line,) = shown.stdout.splitlines()
    found = json.loads(line)
    assert found["records_file"] == str(out)
    exact, text = found["records"]
    assert (exact["method"], exact["figures"]["kl_mean"], exact["figures"]["flip_rate"]) == ("B1", 0.0, 0.0)
    assert text["reason"]


def test_a_failed_cell_is_a_failure_of_the_command(kvferry: Run, grid: Path, tmp_path: Path) -> None:
    grid.write_text(grid.read_text("utf-8").replace('"A1"', '"nobody"'), "utf-8")
    shown = kvferry("ablate", "methods", "--grid", str(grid), "--out", str(tmp_path / "records.jsonl"))
    assert shown.exit_code == 1
    assert len(shown.stdout.splitlines()) == 2
    assert "crates: nobody: UNKNOWN_METHOD: method: 'nobody' is not one of" in shown.stderr


def test_another_model_may_be_named(kvferry: Run, grid: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    shown = kvferry("ablate", "methods", "--grid", str(grid), "--out", str(out), "--model", str(tmp_path / "none"))
    assert shown.exit_code == 1
    assert "there is no model directory" in shown.stderr
    assert not out.exists()


def test_records_lie_in_the_users_data_by_default(
    kvferry: Run, grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    assert kvferry("ablate", "methods", "--grid", str(grid)).exit_code == 0
    assert (tmp_path / "home" / "ablations" / "methods.jsonl").is_file()


def test_a_wrong_grid_is_a_usage_error_that_names_the_key(kvferry: Run, grid: Path) -> None:
    grid.write_text(grid.read_text("utf-8") + "budgets = 3\n[[models]]\nprefix = 4\n", "utf-8")
    shown = kvferry("ablate", "methods", "--grid", str(grid))
    assert shown.exit_code == 2
    assert "models[1]" in shown.stderr
    assert "prefix" in shown.stderr


def test_a_misspelt_parameter_is_named_before_anything_runs(kvferry: Run, grid: Path, tmp_path: Path) -> None:
    grid.write_text(grid.read_text("utf-8") + "budgets = 3\n", "utf-8")
    shown = kvferry("ablate", "methods", "--grid", str(grid), "--out", str(tmp_path / "records.jsonl"))
    assert shown.exit_code == 1
    assert shown.stderr.splitlines()[-1].startswith("error: budgets: method A1 has no such parameter")
    assert not (tmp_path / "records.jsonl").exists()
