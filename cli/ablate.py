"""``kvferry ablate``: compare methods over a grid, and write the tables of the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kvferry.cli import output

if TYPE_CHECKING:
    from kvferry.ablations.records import Record


@click.group()
def command() -> None:
    """Compare methods over a grid of models, documents and parameters.

    A run that is broken off goes on where it stopped; cells that failed are run again.
    """


@command.command()
@click.option("--grid", type=click.Path(path_type=Path), help="TOML file; by default kvferry's own grid.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="JSON-lines file of records; by default in the user's data."
)
@click.option("--results", type=click.Path(path_type=Path), help="Markdown document whose table is to be written.")
@click.option("--model", "models", multiple=True, help="Instead of the grid's models; may be repeated.")
@output.json_option
def methods(
    grid: Path | None, out: Path | None, results: Path | None, models: tuple[str, ...], *, as_json: bool
) -> None:
    """Judge every method's cache against the dense one: fidelity, bytes and times."""
    from kvferry.ablations import grid as grids
    from kvferry.ablations import methods as experiment
    from kvferry.ablations import tables
    from kvferry.ablations.results import write
    from kvferry.engine.model_store import models_home

    chosen = grids.load(grid) if grid else grids.bundled(experiment.EXPERIMENT)
    if models:
        chosen = chosen.with_models(models)
    out = out or models_home().parent / "ablations" / f"{experiment.EXPERIMENT}.jsonl"
    output.remark(f"records: {out}")
    with output.progress_share("methods") as advance:
        records = experiment.run(chosen, out, advance)
    if results:
        words = ["kvferry ablate methods", *(["--grid", grid.name] if grid else []), *_repeated("--model", models)]
        write(results, experiment.EXPERIMENT, tables.markdown(records, " ".join(words)))
        output.remark(f"results: {results}")
    _show(records, out, as_json=as_json)


def _show(records: list[Record], out: Path, *, as_json: bool) -> None:
    """Print the outcome and leave with a failure when a cell failed."""
    from kvferry.ablations import tables
    from kvferry.ablations.records import failures

    if as_json:
        output.write_json({"records_file": str(out), "records": msgspec.to_builtins(records)})
    else:
        done = [record for record in records if record.status == "done"]
        heading = ("model", "document", *tables.HEADING)
        lines = [(item.model, item.document, *row) for item, row in zip(done, tables.rows(done), strict=True)]
        click.echo(output.table([heading, *lines]))
    failed = failures(records)
    for record in failed:
        output.remark(f"failed: {record.model}, {record.document}: {tables.outcome(record)}")
    if failed:
        raise click.exceptions.Exit(1)


def _repeated(option: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, Path(value).name)]
