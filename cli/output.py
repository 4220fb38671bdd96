"""What commands share: results on standard output; errors, progress and remarks on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PIPE_COLUMNS = 160

json_option = click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")


def write_json(value: Mapping[str, Any]) -> None:
    """Print one line of JSON on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def remark(text: str) -> None:
    """Print a line for people on standard error."""
    click.echo(text, err=True)


def error_record(code: str, message: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error as programs read it."""
    return {"error": {"code": code, "message": message, "fields": dict(fields)}}


def report_error(code: str, message: str, fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Print an error as one line on standard error, and as JSON on standard output if a program is reading."""
    if as_json:
        write_json(error_record(code, message, fields))
    remark("error: " + " ".join(message.splitlines()))


def is_terminal() -> bool:
    """Whether a person is watching standard output."""
    return sys.stdout.isatty()


def size(count: float) -> str:
    """Return a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:  # noqa: PLR2004
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as left-aligned columns with two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def console() -> Console:
    """Return a rich console on standard output; in a pipe it writes plain text, wide enough for a table."""
    from rich.console import Console

    return Console(width=None if is_terminal() else PIPE_COLUMNS)


@contextlib.contextmanager
def progress_stages() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (stage, done, total) that draws one bar a stage."""
    with _progress() as bar:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


@contextlib.contextmanager
def progress_share(label: str) -> Iterator[Callable[[str, float], None]]:
    """Yield a function (text, share of the whole that is done) that draws one bar."""
    with _progress() as bar:
        task = bar.add_task(label, total=1.0)

        def report(text: str, share: float) -> None:
            bar.update(task, description=text, completed=share)

        yield report


def _progress() -> Progress:
    """Return bars on standard error, which stay invisible when that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Rich's own opinion of what a terminal is follows FORCE_COLOR, which is often set where nobody is watching.
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
