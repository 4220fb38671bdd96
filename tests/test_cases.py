"""docs/cases.md keeps its word: every test that it names is there, and every fault has tests or a reason."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")
LINES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "cases.md").read_text("utf-8").splitlines()
    if re.match(r"\| \d", line)
]


@cache
def names_in(path: Path) -> set[str]:
    """Return the names of a file's tests, those in classes as well."""
    tree = ast.parse(path.read_text("utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {name for name in found if name.startswith("test_")}


def test_the_lines_are_counted_without_a_gap() -> None:
    assert [int(number) for number, *_ in LINES] == list(range(1, len(LINES) + 1))
    assert len(LINES) >= 45


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_each_line_names_reports_and_tests_that_exist_or_a_reason(line: list[str]) -> None:
    _, fault, reports, tests = line
    assert fault
    assert all(REPORT.fullmatch(report.strip()) for report in reports.split(","))
    named = TEST.findall(tests)
    # Nothing that looks like a test escapes the pattern.
    assert tests.count("::") == len(named)
    assert named or re.search(r"\*later\*: \w+", tests)
    for file, name in named:
        assert name in names_in(ROOT / file), f"{file} has no {name}"
