"""Parts of a document that tables of every experiment have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.ablations.harness.records import Record
from kvferry.core.manifest import Scalar


def origin(records: Sequence[Record], command: str) -> list[str]:
    """Return lines that say what was measured with what.

    Args:
        records: of one run, at least one.
        command: that was given.
    """
    found = records[0].provenance
    dates = sorted({record.date for record in records})
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    return [
        f"`{command}`, commit {found.commit}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        f"Machine: {found.machine}; {versions}.",
    ]


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines."""
    return [_line(heading), _line(("---",) * len(heading)), *map(_line, rows)]


def parameters(given: dict[str, Scalar]) -> str:
    """Return a method's parameters in one line."""
    return " ".join(f"{name}={value}" for name, value in given.items())


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
