"""Records as tables, and tables inside a document that people write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.records import Failure, Record
from kvferry.ablations.methods.figures import Figures
from kvferry.ablations.report import method_tables as tables
from kvferry.ablations.report import results
from kvferry.core.errors import ConfigError, StoreError

ORIGIN = Provenance("abc123", "A Processor", 2, "cpu", "Linux x86_64", {"kvferry": "1.2", "mlx": "0.32.4", "blas": ""})
BEGIN, END = "<!-- kvferry:methods:begin -->", "<!-- kvferry:methods:end -->"
FIGURES: dict[str, Any] = {
    "artifact": "00" * 32,
    "name": "sink-recent",
    "label": "inspired",
    "aware": False,
    "dtype": "F32",
    "prefix_tokens": 699,
    "positions": 200,
    "kl_mean": 0.04321,
    "kl_p99": 0.5,
    "flip_rate": 0.035,
    "delta_nll": -0.012,
    "tier": "marginal",
    "rows_min": 64,
    "rows_mean": 64.0,
    "rows_max": 64,
    "payload_bytes": 2_949_120,
    "manifest_bytes": 880,
    "dense_bf16_bytes": 15_728_640,
    "ratio": 5.3319,
    "resident_bytes": 2_960_000,
    "prefill_ms": 4321.4,
    "method_ms": 1.6,
    "encode_ms": 20.2,
    "reconstruct_ms": 3.3,
    "first_token_ms": 61.0,
    "dense_first_token_ms": 99.0,
}


def record(method: str = "B3", *, figures: dict[str, Any] | None = None, **changes: Any) -> Record:
    given: dict[str, Any] = {
        "id": method,
        "status": "done",
        "model": "small",
        "document": "ferry",
        "prefix_tokens": 700,
        "continuation_tokens": 200,
        "method": method,
        "parameters": {"budget": 64, "sinks": 4},
        "figures": msgspec.structs.asdict(Figures(**(FIGURES | (figures or {})))),
        "date": "2026-11-30",
        "provenance": ORIGIN,
    }
    return Record(**(given | changes))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def column(item: Record, name: str) -> str:
    (row,) = tables.rows([item])
    return row[tables.HEADING.index(name)]


def test_a_row_shows_every_figure() -> None:
    (row,) = tables.rows([record()])
    assert dict(zip(tables.HEADING, row, strict=True)) == {
        "method": "B3 sink-recent",
        "parameters": "budget=64 sinks=4",
        "label": "inspired",
        "question": "blind",
        "rows": "64",
        "wire kB": "2,950.0",
        "ratio": "5.33",
        "held kB": "2,960.0",
        "KL mean": "0.0432",
        "KL p99": "0.5000 (n=200)",
        "flips": "3.5%",
        "ΔNLL": "-0.0120",
        "tier": "marginal",
        "method ms": "2",
        "encode ms": "20",
        "rebuild ms": "3",
        "first token ms": "61",
        "dense": "99",
    }


def test_the_count_stands_beside_a_p99_of_few_positions_only() -> None:
    assert column(record(figures={"positions": 499}), "KL p99") == "0.5000 (n=499)"
    assert column(record(figures={"positions": 500}), "KL p99") == "0.5000"


def test_rows_that_differ_show_their_range() -> None:
    ragged = record(figures={"rows_min": 12, "rows_mean": 63.6, "rows_max": 240})
    assert column(ragged, "rows") == "64 (12 to 240)"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0.0000"), (0.0000123, "1.2e-05"), (0.0001, "0.0001"), (1.5, "1.5000")]
)
def test_a_small_divergence_is_told_from_none(value: float, shown: str) -> None:
    assert column(record(figures={"kl_mean": value}), "KL mean") == shown


def test_markdown_says_what_was_measured_with_what() -> None:
    text = tables.markdown([record(), record("B4", date="2026-12-01")], "kvferry ablate methods")
    head = text.split("\n\n")[0]
    assert "`kvferry ablate methods`" in head
    assert "commit abc123" in head
    assert "2026-11-30 to 2026-12-01" in head
    assert "A Processor, 2 cores, Linux x86_64, MLX on the cpu" in head
    assert "kvferry 1.2, mlx 0.32.4." in head
    assert "blas" not in head
    assert "2026-11-30." in tables.markdown([record()], "x")


def test_markdown_has_a_table_for_every_model_and_document() -> None:
    others = [record(document="manual"), record("B4", document="manual"), record(model="large", document="manual")]
    text = tables.markdown([record(), *others], "x")
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == ["### small, ferry", "### small, manual", "### large, manual"]
    tables_found = [part for part in text.split("\n\n") if part.startswith("| method")]
    assert [len(part.splitlines()) for part in tables_found] == [3, 4, 3]
    for part in tables_found:
        assert {len(cells(line)) for line in part.splitlines()} == {len(tables.HEADING)}
    assert "699 prefix tokens, 200 positions judged" in text
    assert "its prefill took 4,321 ms" in text


def test_what_has_no_figures_is_told_below_the_table() -> None:
    refused = record("B6", status="failed", figures={}, failure=Failure("INVALID_REQUEST", "bits: no | group"))
    skipped = record("A1", status="skipped", figures={}, parameters={}, reason="A1 sends text")
    text = tables.markdown([record(), refused, skipped], "x")
    assert text.endswith("|\n\n- B6 budget=64 sinks=4: INVALID_REQUEST: bits: no | group\n- A1: skipped: A1 sends text")
    alone = tables.markdown([refused], "x")
    assert alone.endswith("### small, ferry\n\n- B6 budget=64 sinks=4: INVALID_REQUEST: bits: no | group")


def test_a_bar_in_a_parameter_does_not_make_a_column() -> None:
    text = tables.markdown([record(parameters={"budget": "a|b"})], "x")
    line = text.splitlines()[-1]
    assert "budget=a\\|b" in line
    assert line.replace("\\|", "").count("|") == len(tables.HEADING) + 1


def test_figures_of_another_kind_are_refused() -> None:
    with pytest.raises(StoreError, match=r"^record B3: .*`artifact`"):
        tables.rows([msgspec.structs.replace(record(), figures={"name": "x"})])


class TestResults:
    def test_only_the_section_changes(self, tmp_path: Path) -> None:
        path = tmp_path / "results.md"
        before, after = "# Mine\r\n\nWörds.\n\n", "\n\n<!-- kvferry:maps:begin -->\nx\n<!-- kvferry:maps:end -->\ntail"
        path.write_bytes(f"{before}{BEGIN}\nold | table\n{END}{after}".encode())
        results.write(path, "methods", "new\n\ntable")
        assert path.read_bytes().decode() == f"{before}{BEGIN}\nnew\n\ntable\n{END}{after}"

    def test_writing_twice_is_writing_once(self, tmp_path: Path) -> None:
        path = tmp_path / "results.md"
        results.write(path, "methods", "table")
        first = path.read_bytes()
        results.write(path, "methods", "table")
        assert path.read_bytes() == first
        assert first.decode() == f"# Results\n\n{BEGIN}\ntable\n{END}\n"

    def test_a_document_without_the_section_gets_it_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "results.md"
        path.write_text("# Mine\n\nWords.\n", "utf-8")
        results.write(path, "methods", "table")
        assert path.read_text("utf-8") == f"# Mine\n\nWords.\n\n{BEGIN}\ntable\n{END}\n"

    @pytest.mark.parametrize("text", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f"{BEGIN}{END}{END}"])
    def test_markers_that_are_not_a_pair_are_refused_and_nothing_is_written(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "results.md"
        path.write_text(text, "utf-8")
        with pytest.raises(ConfigError, match="once each, in this order"):
            results.write(path, "methods", "table")
        assert path.read_text("utf-8") == text

    def test_files_that_cannot_be_used_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="Is a directory"):
            results.write(tmp_path, "methods", "table")
        with pytest.raises(StoreError, match="No such file"):
            results.write(tmp_path / "none" / "results.md", "methods", "table")
        (tmp_path / "binary").write_bytes(b"\xff")
        with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
            results.write(tmp_path / "binary", "methods", "table")
