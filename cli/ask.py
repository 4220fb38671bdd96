"""``kvferry ask``: ask the receiver a question about an artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvferry.cli import output
from kvferry.cli.connection import receiver_option, security_options, timeout_option

if TYPE_CHECKING:
    from kvferry.client import Answer, Ledger


@click.command(name="ask")
@click.argument("artifact")
@click.argument("question", nargs=-1, required=True)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Most tokens to generate."
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Nucleus mass."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampler.")
@click.option(
    "--fallback",
    is_flag=True,
    help="Read the document again when the stored cache cannot be trusted, and do without passages that cannot be had.",
)
@click.option(
    "--look-up-at",
    default="",
    help="host:port under which the receiver reaches the sender, for references; by default as configured there.",
)
@receiver_option
@timeout_option
@security_options
@output.json_option
def command(
    *,
    artifact: str,
    question: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    fallback: bool,
    look_up_at: str,
    receiver: str,
    timeout: float,
    security: dict[str, Any],
    as_json: bool,
) -> None:
    """Ask the receiver a question about an artifact.

    ARTIFACT is its id as `kvferry send` printed it, or at least the first 8 digits. The words of QUESTION may be given
    without quotes.
    """
    from kvferry.client import Client

    live = output.is_terminal() and not as_json
    with (
        Client(receiver=receiver, look_up_at=look_up_at, idle_timeout=timeout, **security) as client,
        client.stream(
            artifact,
            " ".join(question),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            fallback=fallback,
        ) as stream,
    ):
        for piece in stream:
            if live:
                click.echo(piece.text, nl=False)
        answer = stream.answer
    if as_json:
        output.write_json(record(answer))
        if answer.ledger.fallback is not None:
            output.remark(fallback_line(answer.ledger))
    else:
        click.echo("" if live else answer.text)
        output.remark(account(answer.ledger))


def record(answer: Answer) -> dict[str, Any]:
    """Return an answer as programs read it."""
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    return plain


def account(ledger: Ledger) -> str:
    """Return a ledger in one line for people."""
    first = "no text" if ledger.ms.first_token is None else f"first token {ledger.ms.first_token:.0f} ms"
    parts = [
        f"{ledger.method} ({ledger.form})",
        f"on the wire {output.size(ledger.wire_bytes)}",
        f"dense cache {output.size(ledger.dense_bf16_bytes)} (ratio {ledger.ratio:.2f})",
        f"read {ledger.tokens.receiver_prefill} tokens, reused {ledger.tokens.reused}",
        first,
        f"total {ledger.ms.total:.0f} ms",
        f"{ledger.tokens.generated} tokens ({ledger.finish_reason})",
    ]
    if ledger.lookups.hit is not None:
        parts.append(_lookup(ledger))
    if ledger.fallback is not None:
        parts.append(fallback_line(ledger))
    return " · ".join(parts)


def _lookup(ledger: Ledger) -> str:
    if not ledger.lookups.hit:
        return "no reference has to do with the question"
    found = ledger.lookups
    rest = f", {found.left_out} more had no room" if found.left_out else ""
    return f"looked up {found.count} references{rest} ({output.size(found.bytes)}, {found.ms:.0f} ms)"


def fallback_line(ledger: Ledger) -> str:
    """Return what was done instead, and why."""
    return f"fell back to {ledger.fallback}: {ledger.fallback_reason}"
