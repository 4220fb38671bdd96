"""``kvferry demo``: two daemons, one document, a method of each kind, the same questions, one table."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli import output

if TYPE_CHECKING:
    from kvferry.client import Client

DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_ANSWER_TOKENS = 32
REFERENCE = "A1"
# These promise the answers of the full context, token for token; the demo fails when one breaks that promise.
EXACT = ("A7", "B0", "B1")
# These need `kvferry calibrate` first, or a package and a model of their own.
PREPARED = ("A8", "qfilters")
# A few of each form: a demo is watched. ``--method`` shows others, ``--all`` every one that needs nothing beforehand.
SHOWN = ("A0", "A1", "A7", "B0", "B1", "B2", "B3", "B5", "B9")


@dataclass(frozen=True)
class Question:
    """A bundled question and what a right answer holds."""

    text: str
    expects: tuple[str, ...]
    excludes: tuple[str, ...]

    def is_right(self, answer: str) -> bool:
        """Judge an answer by its text."""
        return all(item in answer for item in self.expects) and not any(item in answer for item in self.excludes)


@dataclass(frozen=True)
class Row:
    """One answer. ``ratio`` is dense bf16 cache bytes over wire bytes."""

    method: str
    name: str
    form: str
    question: str
    answer: str
    token_ids: tuple[int, ...]
    correct: bool
    wire_bytes: int
    ratio: float
    receiver_prefill_tokens: int
    ttft_ms: float | None


@dataclass(frozen=True)
class Outcome:
    """What the demo saw. ``broken`` lists the exact methods whose answers differ from the full context's."""

    ok: bool
    rows: tuple[Row, ...]
    broken: tuple[str, ...]


def bundled() -> tuple[str, tuple[Question, ...]]:
    """Return the bundled document and its questions."""
    folder = files("kvferry.cli").joinpath("demo_data")
    document = folder.joinpath("handover.md").read_text("utf-8")
    listed = tomllib.loads(folder.joinpath("questions.toml").read_text("utf-8"))["questions"]
    questions = tuple(Question(item["text"], tuple(item["expects"]), tuple(item["excludes"])) for item in listed)
    return document, questions


def run(model: str, advance: Callable[[str, float], None], methods: Collection[str] = SHOWN) -> Outcome:
    """Start both daemons, send the document by each method, ask every question.

    Args:
        model: what both daemons load.
        methods: ids of those to show; empty: every blind one that needs no preparation. ``EXACT`` ones always run.
        advance: told what happens now and which share of the whole is done.

    Raises:
        KvferryError: when a daemon does not start or a call fails.
    """
    from kvferry.cli import processes
    from kvferry.client import Client

    document, questions = bundled()
    advance("starting the sender and the receiver", 0.0)
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-demo-") as folder,
        processes.pair(model, Path(folder)) as (sender, receiver),
        Client(sender=sender, receiver=receiver) as client,
    ):
        rows = tuple(_rows(client, document, questions, advance, methods))
    broken = tuple(_broken(rows))
    return Outcome(ok=not broken and bool(rows), rows=rows, broken=broken)


def _rows(
    client: Client,
    document: str,
    questions: tuple[Question, ...],
    advance: Callable[[str, float], None],
    chosen: Collection[str],
) -> Iterator[Row]:
    wanted = {REFERENCE, *EXACT, *(chosen or _unprepared(client))}
    methods = [method for method in client.methods() if not method.aware and method.id in wanted]
    steps = len(methods) * (len(questions) + 1)
    step = 0
    for method in methods:
        advance(f"{method.id} {method.name}: sending the document", step / steps)
        report = client.send(text=document, method=method.id)
        step += 1
        for number, question in enumerate(questions, 1):
            advance(f"{method.id} {method.name}: question {number} of {len(questions)}", step / steps)
            answer = report.ask(question.text, max_tokens=MAX_ANSWER_TOKENS)
            step += 1
            yield Row(
                method=method.id,
                name=method.name,
                form=method.form,
                question=question.text,
                answer=answer.text,
                token_ids=tuple(answer.token_ids),
                correct=question.is_right(answer.text),
                wire_bytes=answer.ledger.wire_bytes,
                ratio=answer.ledger.ratio,
                receiver_prefill_tokens=answer.ledger.tokens.receiver_prefill,
                ttft_ms=answer.ledger.ms.first_token,
            )
    advance("stopping the daemons", 1.0)


def _unprepared(client: Client) -> Iterator[str]:
    """Yield the ids of the methods that need nothing but the document."""
    yield from (method.id for method in client.methods() if not method.aware and method.id not in PREPARED)


def _broken(rows: tuple[Row, ...]) -> Iterator[str]:
    reference = {row.question: row.token_ids for row in rows if row.method == REFERENCE}
    present = {row.method for row in rows}
    yield from (f"{method}: missing" for method in (REFERENCE, *EXACT) if method not in present)
    for method in EXACT:
        for row in rows:
            if row.method == method and row.token_ids != reference.get(row.question):
                yield f"{method}: {row.question!r}: {row.answer!r} is not the full-context answer"


@click.command()
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Directory, catalogue name or hub id.")
@click.option("--method", "methods", multiple=True, help="Id of a method to show beside the exact ones; repeatable.")
@click.option("--all", "everything", is_flag=True, help="Show every blind method that needs nothing prepared.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def command(model: str, methods: tuple[str, ...], *, everything: bool, as_json: bool) -> None:
    """Carry a bundled document from one daemon to another and compare a few methods."""
    with output.progress_share("demo") as advance:
        outcome = run(model, advance, () if everything else methods or SHOWN)
    if as_json:
        output.write_json({"ok": outcome.ok, "rows": [asdict(row) for row in outcome.rows], "broken": outcome.broken})
    else:
        _show(outcome)
    if not outcome.ok:
        raise click.exceptions.Exit(1)


def _show(outcome: Outcome) -> None:
    from rich.table import Table

    table = Table(
        title="One document, one method of each kind", caption="ratio: the dense bf16 cache over the bytes on the wire"
    )
    for heading, align in (
        ("method", "left"),
        ("form", "left"),
        ("wire bytes", "right"),
        ("ratio", "right"),
        ("prefill tokens", "right"),
        ("first token ms", "right"),
        ("answer", "left"),
        ("", "left"),
    ):
        table.add_column(heading, justify="right" if align == "right" else "left", overflow="fold")
    previous = ""
    for row in outcome.rows:
        first = row.method != previous
        if first and previous:
            table.add_section()
        previous = row.method
        table.add_row(
            f"{row.method} {row.name}" if first else "",
            row.form if first else "",
            f"{row.wire_bytes:,}" if first else "",
            f"{row.ratio:,.2f}x" if first else "",
            f"{row.receiver_prefill_tokens:,}",
            f"{row.ttft_ms:,.0f}" if row.ttft_ms is not None else "-",
            " ".join(row.answer.split()),
            "right" if row.correct else "wrong",
        )
    output.console().print(table)
    if outcome.ok:
        click.echo("Every exact method gave the full-context answers, token for token.")
    for line in outcome.broken:
        click.echo(f"broken: {line}", err=True)
