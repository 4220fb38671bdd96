"""``kvferry calibrate``: measure what a method needs to know about a model, once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvferry.cli import output
from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import finish

if TYPE_CHECKING:
    from kvferry.engine.model import LoadedModel
    from kvferry.sender.calibration.corpus import Corpus
    from kvferry.sender.calibration.qfilters import Request
    from kvferry.sender.calibration.qfilters_file import QFilters

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def command() -> None:
    """Measure what a method needs to know about a model, once."""


@command.command()
@click.option("--model", "source", required=True, help="Directory, catalogue name or hub id.")
@click.option("--adapter", default="", help="Directory of a LoRA adapter.")
@click.option("--revision", default="", help="Of a hub id.")
@click.option(
    "--text", "texts", multiple=True, type=_FILE, metavar="FILE...", help="UTF-8 texts for the model to read."
)
@click.argument("more", nargs=-1, type=_FILE, metavar="")
@click.option("--tokens", default=2048, show_default=True, type=click.IntRange(min=32), help="Of one sequence.")
@click.option("--sequences", default=20, show_default=True, type=click.IntRange(min=1), help="Most sequences.")
@click.option("--rows", default=3000, show_default=True, type=click.IntRange(min=1), help="Most queries a head.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of the choice of queries.")
@click.option(
    "--sign",
    default="majority",
    show_default=True,
    type=click.Choice(["majority", "sum"]),
    help="How a direction gets its sign: as the official code does, or as the paper says.",
)
@click.option("--bind", type=_FILE, help="Published filters for this very model, instead of reading texts.")
@click.option("--out", "name", help="Name of the calibration; by default made from model and sign.")
@click.option("--overwrite", is_flag=True, help="Replace a calibration of that name.")
@output.json_option
def qfilters(
    *,
    source: str,
    adapter: str,
    revision: str,
    texts: tuple[Path, ...],
    more: tuple[Path, ...],
    tokens: int,
    sequences: int,
    rows: int,
    seed: int,
    sign: Any,
    bind: Path | None,
    name: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Find the directions of a model's queries, for the method qfilters.

    The sender finds what is written here by the model, or by its name (parameter calibration).
    """
    files = (*texts, *more)
    if bool(files) == bool(bind):
        raise click.UsageError("give either --text FILE... or --bind FILE")

    from kvferry.sender.calibration import folder
    from kvferry.sender.calibration import qfilters as calibration
    from kvferry.sender.calibration.qfilters import Request

    contents = [_read(file) for file in files]
    if name is not None:
        folder.check_free(name, overwrite=overwrite)
    start = time.perf_counter()
    model = _load(source, adapter, revision)
    chosen = name or folder.default_name(model.profile.model.id, "imported" if bind else sign)
    folder.check_free(chosen, overwrite=overwrite)
    request = Request(tokens=tokens, sequences=sequences, rows=rows, seed=seed, sign=sign)
    if bind:
        found, corpus = calibration.bind(model, bind), None
    else:
        with output.progress_stages() as bar:
            done = finish(
                calibration.calibrate(model, contents, request), lambda step: bar(step.stage, step.done, step.total)
            )
        found, corpus = done.calibration, done.corpus
    path = folder.save(chosen, found)
    seconds = time.perf_counter() - start
    notes = [] if corpus is None else shortfalls(request, corpus, found)
    if as_json:
        output.write_json(_record(chosen, path, found, notes, seconds))
    else:
        _show(chosen, path, found, notes, seconds)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidRequestError(f"text: {path}: {reason}", field="text", path=str(path)) from error


def _load(source: str, adapter: str, revision: str) -> LoadedModel:
    from kvferry.engine import model_store
    from kvferry.engine.model import load

    return load(str(model_store.resolve(source)), adapter=adapter, revision=revision)


def shortfalls(request: Request, corpus: Corpus, found: QFilters) -> list[str]:
    """Return, as lines, in what the calibration fell short of what was asked for."""
    notes = []
    lengths = [len(ids) for ids in corpus.sequences]
    shorter = [length for length in lengths if length < request.tokens]
    if len(lengths) < request.sequences:
        notes.append(f"the texts give {len(lengths)} sequences, {request.sequences} were asked for")
    if shorter:
        notes.append(
            f"{len(shorter)} of {len(lengths)} sequences are shorter than {request.tokens} tokens, from {min(shorter)}"
        )
    if found.record.rows < request.rows:
        notes.append(f"{found.record.rows} queries a head were there, {request.rows} were asked for")
    if found.record.undecided:
        notes.append(
            f"for {found.record.undecided} query heads the rule {request.sign} had no answer; see the documentation"
        )
    return notes


def _record(name: str, path: Path, found: QFilters, notes: list[str], seconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "path": str(path),
        "digest": found.digest.hex(),
        "record": msgspec.to_builtins(found.record),
        "notes": notes,
        "seconds": round(seconds, 3),
    }


def _show(name: str, path: Path, found: QFilters, notes: list[str], seconds: float) -> None:
    record = found.record
    click.echo(name)
    if record.estimator == "imported":
        output.remark(f"bound to {record.model.id}; that the filters are this model's own could not be checked")
    else:
        output.remark(
            f"{record.sequences} sequences, {record.tokens:,} tokens, {record.rows:,} queries a head, "
            f"sign by {record.estimator} ({record.label}), {seconds:.1f} s"
        )
    for note in notes:
        output.remark(f"note: {note}")
    output.remark(f"written to {path}")
