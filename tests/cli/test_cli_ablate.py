"""``kvferry ablate``: a grid in, records, a table and a document out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from kvferry.ablations.answers import bench as answers
from kvferry.ablations.answers.figures import AnswerFigures
from kvferry.ablations.answers.grid import AnswerCell
from kvferry.core.errors import TooLargeError
from kvferry.core.manifest import Scalar

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


QUESTIONS = """document = "crates.txt"
[[questions]]
question = "What is the code?"
answers = ["4417"]
quote = "warehouse is 4417"
kind = "code"
"""


class FakeBench:
    """Answers every question with what it was told to say, or fails."""

    model = ("weights",)

    def __init__(self, said: str) -> None:
        self.said = said

    def measure(self, cell: AnswerCell) -> dict[str, Scalar]:
        if cell.setting.method == "A2":
            raise TooLargeError("document: too large")
        whole = dict.fromkeys(AnswerFigures.__struct_fields__, 0)
        words = dict.fromkeys(("artifact", "name", "label", "form", "finish_reason", "fallback"), "x")
        given = {"prediction": self.said, "aware": False, "first_ask": True}
        return whole | words | given | {"wire_bytes": 10, "document_bytes": 20}


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvferry: Run) -> Callable[..., Result]:
    """Return a function that runs `kvferry ablate answers` on one document and fakes, with more words."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "crates.txt").write_text("The access code of the north warehouse is 4417.", "utf-8")
    (tmp_path / "set" / "crates.toml").write_text(QUESTIONS, "utf-8")
    (tmp_path / "small.toml").write_text(
        '[[models]]\nname = "m"\n[[methods]]\nmethod = "A1"\n[[methods]]\nmethod = "A3"\nbudget = [8, 9]\n', "utf-8"
    )
    monkeypatch.setattr(answers.model_store, "resolve", lambda name: name)
    monkeypatch.setattr(answers, "open_bench", lambda name: contextlib.nullcontext(FakeBench("It is 4417.")))

    def run(*words: str) -> Result:
        grid, folder, out = (str(tmp_path / name) for name in ("small.toml", "set", "records.jsonl"))
        return kvferry("ablate", "answers", "--grid", grid, "--questions", folder, "--out", out, *words)

    return run


def test_answers_write_records_a_table_and_the_document(asking: Callable[..., Result], tmp_path: Path) -> None:
    results = tmp_path / "results.md"
    shown = asking("--results", str(results), "--model", "n", "--document", "crates")
    assert shown.exit_code == 0
    head, *rows = shown.stdout.splitlines()
    assert head.split()[:2] == ["model", "method"]
    assert [row.split()[:2] for row in rows] == [["n", "A1"], ["n", "A3"], ["n", "A3"]]
    assert all(row.split().count("100.0") == 1 for row in rows)
    assert len((tmp_path / "records.jsonl").read_text("utf-8").splitlines()) == 3
    document = results.read_text("utf-8")
    assert "<!-- kvferry:answers:begin -->\n`kvferry ablate answers --grid small.toml --questions set" in document
    assert "--model n --document crates`" in document
    assert "| A3 budget=8 − A1 | 1 |" in document


def test_answers_may_be_of_some_methods_and_as_json(asking: Callable[..., Result]) -> None:
    shown = asking("--json", "--method", "A3", "--method", "A0")
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    records = found["records"]
    assert [found["scores"][item["id"]]["contains"] for item in records] == [True] * 3
    assert [(item["method"], item["parameters"]) for item in records] == [
        ("A3", {"budget": 8}),
        ("A3", {"budget": 9}),
        ("A0", {}),
    ]
    assert records[0]["question"] == "What is the code?"


def test_failed_answers_are_named_and_are_a_failure_of_the_command(asking: Callable[..., Result]) -> None:
    shown = asking("--method", "A2", "--method", "A1")
    assert shown.exit_code == 1
    assert [line.split()[:2] for line in shown.stdout.splitlines()[1:]] == [["m", "A1"]]
    assert shown.stderr.splitlines()[-1] == "failed: crates: A2: TOO_LARGE: document: too large (answers missing: 1)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "A99"), "error: method: 'A99' is not one of A0 (none)"),
        (("--document", "quay"), "error: document: 'quay' is not one of crates"),
    ],
)
def test_a_wrong_name_is_one_error_before_anything_runs(
    asking: Callable[..., Result], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    shown = asking(*words)
    assert shown.exit_code == 1
    assert shown.stderr.splitlines()[-1].startswith(message)
    assert not (tmp_path / "records.jsonl").exists()


def test_what_is_recorded_is_shown_and_nothing_is_run(asking: Callable[..., Result], tmp_path: Path) -> None:
    asking("--method", "A1")
    before = (tmp_path / "records.jsonl").read_bytes()
    results = tmp_path / "results.md"
    shown = asking("--recorded", "--results", str(results))
    assert shown.exit_code == 0
    assert [row.split()[:2] for row in shown.stdout.splitlines()[1:]] == [["m", "A1"]]
    assert (tmp_path / "records.jsonl").read_bytes() == before
    document = results.read_text("utf-8")
    assert "| A1 |" in document
    assert "A3" not in document


def test_a_table_of_nothing_is_refused(asking: Callable[..., Result], tmp_path: Path) -> None:
    results = tmp_path / "results.md"
    shown = asking("--recorded", "--results", str(results))
    assert shown.exit_code == 1
    assert shown.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'records.jsonl'}: no cell of this grid")
    assert not results.exists()


def test_a_sample_of_questions_may_be_enough(asking: Callable[..., Result], tmp_path: Path) -> None:
    with (tmp_path / "set" / "crates.toml").open("a", encoding="utf-8") as file:
        file.write(QUESTIONS.partition("\n")[2].replace("What is the code?", "Which code is it?"))
    results = tmp_path / "results.md"
    shown = asking("--json", "--method", "A1", "--sample", "1", "--results", str(results))
    assert [item["question"] for item in json.loads(shown.stdout)["records"]] == ["What is the code?"]
    assert "--method A1 --sample 1`" in results.read_text("utf-8")
    assert len(json.loads(asking("--json", "--method", "A1").stdout)["records"]) == 2


def test_tables_may_stand_in_a_section_of_their_own(asking: Callable[..., Result], tmp_path: Path) -> None:
    results = tmp_path / "results.md"
    asking("--method", "A1", "--results", str(results))
    first = results.read_text("utf-8")
    shown = asking("--method", "A0", "--section", "answers-floor", "--results", str(results))
    assert shown.exit_code == 0
    both = results.read_text("utf-8")
    assert both.startswith(first)
    added = both.removeprefix(first).strip()
    assert added.startswith("<!-- kvferry:answers-floor:begin -->\n")
    assert added.endswith("\n<!-- kvferry:answers-floor:end -->")
    assert "| A0 |" in added


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--results", "r.md", "--section", "a -->"), "lower-case letters, digits and hyphens"),
        (("--results", "r.md", "--section", ""), "lower-case letters, digits and hyphens"),
        (("--section", "floor"), "without --results"),
    ],
)
def test_an_impossible_section_is_refused_before_anything_runs(
    asking: Callable[..., Result], tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    shown = asking(*words)
    assert shown.exit_code == 2
    assert why in shown.stderr
    assert not (tmp_path / "records.jsonl").exists()
