"""``kvferry ablate``: compare methods over a grid, and write the tables of the results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from kvferry.cli import output
from kvferry.core.errors import StoreError

if TYPE_CHECKING:
    from kvferry.ablations.harness.records import Record

_Command = TypeVar("_Command", bound=Callable[..., None])
_PATH = click.Path(path_type=Path)
_SECTION = re.compile(r"[a-z][a-z0-9-]*")


@click.group()
def command() -> None:
    """Compare methods over a grid of models, documents and parameters.

    A run that is broken off goes on where it stopped; cells that failed are run again.
    """


def _section(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _SECTION.fullmatch(value):
        raise click.BadParameter(f"{value!r}: lower-case letters, digits and hyphens are needed, a letter first")
    # --results is eager: it has been read by now, wherever it stands.
    if value is not None and not context.params.get("results"):
        raise click.BadParameter("there is no document to write it in without --results")
    return value


def _grid_options(function: _Command) -> _Command:
    """Add what every experiment takes."""
    for option in (
        click.option("--recorded", is_flag=True, help="Run no cell; show and write what is recorded."),
        click.option("--model", "models", multiple=True, help="Instead of the grid's models; may be repeated."),
        click.option(
            "--section", callback=_section, help="Name of the tables in that document, instead of the command's."
        ),
        click.option("--results", type=_PATH, is_eager=True, help="Markdown document whose tables are to be written."),
        click.option("--out", type=_PATH, help="JSON-lines file of records; by default in the user's data."),
        click.option("--grid", type=_PATH, help="TOML file; by default kvferry's own grid."),
    ):
        function = option(function)
    return function


@command.command()
@_grid_options
@output.json_option
def methods(
    *,
    grid: Path | None,
    out: Path | None,
    results: Path | None,
    section: str | None,
    models: tuple[str, ...],
    recorded: bool,
    as_json: bool,
) -> None:
    """Judge every method's cache against the dense one: fidelity, bytes and times."""
    from kvferry.ablations.methods import bench as experiment
    from kvferry.ablations.methods import grid as grids
    from kvferry.ablations.report import method_tables as tables
    from kvferry.ablations.report.results import write

    chosen = grids.load(grid) if grid else grids.bundled(experiment.EXPERIMENT)
    if models:
        chosen = chosen.with_models(models)
    out = _records_file(out, experiment.EXPERIMENT)
    with output.progress_share("methods") as advance:
        records = experiment.run(chosen, out, advance, recorded=recorded)
    _check_found(records, out)
    if results:
        words = ["kvferry ablate methods", *_file("--grid", grid), *_repeated("--model", models)]
        write(results, section or experiment.EXPERIMENT, tables.markdown(records, " ".join(words)))
        output.remark(f"results: {results}")
    done = [record for record in records if record.status == "done"]
    lines = [(item.model, item.document, *row) for item, row in zip(done, tables.rows(done), strict=True)]
    _show(records, out, [("model", "document", *tables.HEADING), *lines], as_json=as_json)
    _leave([f"{item.model}, {item.document}: {tables.outcome(item)}" for item in records if item.status == "failed"])


@command.command()
@_grid_options
@click.option("--questions", type=_PATH, help="Folder of documents and questions; by default kvferry's own.")
@click.option("--method", "chosen_methods", multiple=True, help="Id of the only methods to run; may be repeated.")
@click.option("--document", "names", multiple=True, help="Name of the only documents to ask about; may be repeated.")
@click.option("--sample", type=click.IntRange(min=1), help="Most questions of each document, of other kinds of each.")
@output.json_option
def answers(
    *,
    grid: Path | None,
    out: Path | None,
    results: Path | None,
    section: str | None,
    models: tuple[str, ...],
    recorded: bool,
    questions: Path | None,
    chosen_methods: tuple[str, ...],
    names: tuple[str, ...],
    sample: int | None,
    as_json: bool,
) -> None:
    """Ask questions whose answers are known, from each method's message: right answers, bytes and times.

    Both daemons are started here, a pair for every model.
    """
    from kvferry.ablations.answers import bench as experiment
    from kvferry.ablations.answers import grid as grids
    from kvferry.ablations.answers import questions as sets
    from kvferry.ablations.report import answer_tables as tables
    from kvferry.ablations.report.answer_arms import scores
    from kvferry.ablations.report.results import write

    chosen = grids.load(grid) if grid else grids.bundled()
    chosen = chosen.with_models(models) if models else chosen
    chosen = chosen.with_methods(chosen_methods) if chosen_methods else chosen
    documents = grids.choose(sets.load(questions) if questions else sets.bundled(), names, sample)
    out = _records_file(out, experiment.EXPERIMENT)
    with output.progress_share("answers") as advance:
        records = experiment.run(chosen, documents, out, advance, recorded=recorded)
    _check_found(records, out)
    if results:
        words = [
            "kvferry ablate answers",
            *_file("--grid", grid),
            *_file("--questions", questions),
            *_repeated("--model", models),
            *_repeated("--method", chosen_methods),
            *_repeated("--document", names),
            *_count("--sample", sample),
        ]
        cells = len(chosen.models) * len(chosen.cells(chosen.models[0], documents))
        write(results, section or experiment.EXPERIMENT, tables.markdown(records, documents, " ".join(words), cells))
        output.remark(f"results: {results}")
    lines = [(name, *row) for name in chosen.models for row in tables.rows(records, name, documents)]
    worth = {"scores": msgspec.to_builtins(scores(records, documents))} if as_json else {}
    _show(records, out, [("model", *tables.HEADING), *lines], as_json=as_json, **worth)
    _leave(tables.failed(records))


def _records_file(given: Path | None, experiment: str) -> Path:
    from kvferry.engine.model_store import models_home

    out = given or models_home().parent / "ablations" / f"{experiment}.jsonl"
    output.remark(f"records: {out}")
    return out


def _check_found(records: list[Record], out: Path) -> None:
    """Refuse to make a table of nothing, which only ``--recorded`` can ask for."""
    if not records:
        raise StoreError(f"{out}: no cell of this grid with this version on this machine", path=str(out))


def _show(records: list[Record], out: Path, table: list[tuple[str, ...]], *, as_json: bool, **more: object) -> None:
    if as_json:
        output.write_json({"records_file": str(out), "records": msgspec.to_builtins(records), **more})
    else:
        click.echo(output.table(table))


def _leave(failed: list[str]) -> None:
    """Name the cells that failed, and leave with a failure when there are any."""
    for line in failed:
        output.remark(f"failed: {line}")
    if failed:
        raise click.exceptions.Exit(1)


def _file(option: str, path: Path | None) -> list[str]:
    return [option, path.name] if path else []


def _count(option: str, value: int | None) -> list[str]:
    return [option, str(value)] if value else []


def _repeated(option: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, Path(value).name)]
