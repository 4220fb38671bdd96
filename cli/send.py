"""``kvferry send``: have the sender read a document and deliver it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvferry.cli import output
from kvferry.cli.connection import receiver_option, security_options, sender_option, timeout_option

if TYPE_CHECKING:
    from kvferry.client import SendReport

# Arguments of Client.send, so a method's parameter of that name would be taken for one of them.
_TAKEN = ("document", "fallback", "method", "progress", "question", "system", "text")


@click.command(name="send")
@click.argument("document")
@click.option(
    "--method",
    default="B1",
    show_default=True,
    help="Id or name of the method, see `kvferry methods`; or auto: whatever gives the first token soonest.",
)
@click.option(
    "--budget", help="How much is sent: rows or text tokens (256), a fraction (0.25), bytes of a cache (200KB)."
)
@click.option("--bits", type=int, help="Bits a number of a packed cache: 2, 3, 4, 5, 6 or 8.")
@click.option(
    "--param", "parameters", multiple=True, metavar="NAME=VALUE", help="A parameter of the method; repeatable."
)
@click.option("--question", help="The question, for methods that look at it.")
@click.option("--system", help="The system prompt, in place of the default one.")
@click.option("--fallback", is_flag=True, help="Send the text instead when the receiver refuses the cache.")
@sender_option
@receiver_option
@click.option("--deliver-to", help="host:port under which the sender reaches the receiver, if that is another.")
@timeout_option
@security_options
@output.json_option
def command(
    *,
    document: str,
    method: str,
    budget: str | None,
    bits: int | None,
    parameters: tuple[str, ...],
    question: str | None,
    system: str | None,
    fallback: bool,
    sender: str,
    receiver: str,
    deliver_to: str | None,
    timeout: float,
    security: dict[str, Any],
    as_json: bool,
) -> None:
    """Have the sender read a document and deliver it to the receiver.

    DOCUMENT is a UTF-8 text file, or - for standard input. Prints the artifact's id, which `kvferry ask` takes.

    With --method auto the sender measures link, models and sizes, and says what it chose and why. --param quality=near
    lets it pack the cache, quality=reduced lets it leave parts of the document out; the default is exact.
    """
    named = {"budget": budget, "bits": bits}
    given = parse_parameters([*(f"{name}={value}" for name, value in named.items() if value is not None), *parameters])

    from kvferry.client import Client, Progress
    from kvferry.core.choice import explain

    source = sys.stdin.buffer if document == "-" else Path(document)
    with (
        output.progress_stages() as bar,
        Client(sender=sender, receiver=receiver, deliver_to=deliver_to, idle_timeout=timeout, **security) as client,
    ):

        def show(event: Progress) -> None:
            bar(event.stage, event.done, event.total)

        report = client.send(
            source, method=method, question=question, system=system, fallback=fallback, progress=show, **given
        )
    if report.fallback_reason is not None:
        output.remark(f"fell back to the {report.form} ({report.method}): {report.fallback_reason}")
    if report.account.auto is not None:
        output.remark(f"chose {explain(report.account.auto)}")
    if as_json:
        output.write_json(record(report))
    else:
        click.echo(report.artifact_id)
        output.remark(account(report))


def parse_parameters(given: Iterable[str]) -> dict[str, Any]:
    """Return parameters from NAME=VALUE; a value that reads as a JSON number, boolean or string is that.

    Raises:
        click.BadParameter: when one is malformed or given twice.
    """
    parameters: dict[str, Any] = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not separator or not name.isidentifier():
            raise click.BadParameter(f"{item!r} is not NAME=VALUE", param_hint="--param")
        if name in _TAKEN:
            raise click.BadParameter(f"{name} is no parameter of a method", param_hint="--param")
        if name in parameters:
            raise click.BadParameter(f"{name} is given twice", param_hint="--param")
        parameters[name] = _scalar(name, value)
    return parameters


def _scalar(name: str, value: str) -> int | float | str:
    try:
        parsed: Any = json.loads(value, parse_constant=str)
    except ValueError:
        return value
    if not isinstance(parsed, int | float | str):
        raise click.BadParameter(f"{name}: {value} is neither a number, a text, true nor false", param_hint="--param")
    return parsed


def record(report: SendReport) -> dict[str, Any]:
    """Return a report as programs read it."""
    public = {name: value for name, value in vars(report).items() if not name.startswith("_")}
    plain: dict[str, Any] = msgspec.to_builtins(public)
    return plain


def account(report: SendReport) -> str:
    """Return a report in one line for people."""
    parts = [
        f"{report.method} ({report.form}) at {report.receiver}",
        f"document {output.size(report.document_bytes)}",
        f"artifact {output.size(report.manifest_bytes + report.payload_bytes)}",
        f"moved {output.size(report.moved_bytes)}",
        f"on the wire {output.size(report.wire_bytes)}",
        "made by an earlier send" if report.reused else f"read {report.account.prefill_tokens} tokens",
    ]
    return " · ".join(parts)
