"""``kvferry bench``: how fast artifacts move, and how soon the first token comes."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvferry.cli import output


@click.group()
def command() -> None:
    """Measure how fast artifacts move, how soon the first token comes, what choosing rows and look-ups cost.

    Every figure is a ratio to a floor that is measured in the same run.
    """


@command.command()
@click.option("--size", "sizes", type=click.FloatRange(min=0.1), multiple=True, help="Megabytes; may be repeated.")
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Measurements a transport.")
@output.json_option
def wire(sizes: tuple[float, ...], turns: int, *, as_json: bool) -> None:
    """Offer, Put and Commit with every digest verified, against a raw TCP socket."""
    from kvferry.ablations.speed import wire as experiment

    with output.progress_share("wire") as advance:
        rows = experiment.run(
            tuple(sorted(set(sizes))) or experiment.SIZES_MB, turns, durable=(False, True), advance=advance
        )
    if as_json:
        output.write_json({"rows": [asdict(row) for row in rows]})
        return
    heading = ("transport", "MB", "held", "MB/s", "ratio", "sender +MB", "receiver +MB")
    lines = [
        (
            row.transport,
            f"{row.megabytes:.0f}",
            "on disk" if row.durable else "in memory",
            f"{row.mb_per_s:.0f}",
            f"{row.ratio:.2f}",
            f"{row.sender_extra_mb:.0f}",
            f"{row.receiver_extra_mb:.0f}",
        )
        for row in rows
    ]
    click.echo(output.table([heading, *lines]))


@command.command()
@click.option(
    "--model", default="smollm2-135m-instruct", show_default=True, help="Directory, catalogue name or hub id."
)
@click.option("--tokens", type=click.IntRange(min=64), multiple=True, help="Prefix length; may be repeated.")
@click.option("--turns", type=click.IntRange(min=1), default=7, show_default=True, help="Measurements an arm.")
@output.json_option
def ttft(model: str, tokens: tuple[int, ...], turns: int, *, as_json: bool) -> None:
    """Time the first token: from a crossed cache, the text and mlx-lm's own file, against the floor."""
    from kvferry.ablations.speed import ttft as experiment

    with output.progress_share("ttft") as advance:
        rows = experiment.run(model, tuple(sorted(set(tokens))) or experiment.LENGTHS, turns, advance)
    if as_json:
        output.write_json({"rows": [asdict(row) for row in rows]})
        return
    lines = [(str(row.prefix_tokens), row.arm, f"{row.ttft_ms:.1f}", f"{row.ratio:.2f}") for row in rows]
    click.echo(output.table([("tokens", "from", "first token ms", "to the floor"), *lines]))


@command.command()
@click.option(
    "--model", default="smollm2-135m-instruct", show_default=True, help="Directory, catalogue name or hub id."
)
@click.option("--tokens", type=click.IntRange(min=64), default=1024, show_default=True, help="Prefix length.")
@click.option("--turns", type=click.IntRange(min=1), default=5, show_default=True, help="Measurements an arm.")
@output.json_option
def selection(model: str, tokens: int, turns: int, *, as_json: bool) -> None:
    """Time the choice of rows against prefill and window, and what a smaller cache saves."""
    from kvferry.ablations.speed import selection as experiment

    with output.progress_share("selection") as advance:
        rows = experiment.run(model, tokens, turns, advance)
    if as_json:
        output.write_json({"rows": [asdict(row) for row in rows]})
        return
    lines = [(row.arm, f"{row.ms:.1f}", f"{row.ratio:.2f}", row.floor) for row in rows]
    click.echo(output.table([("arm", "ms", "ratio", "to"), *lines]))


@command.command()
@click.option("--turns", type=click.IntRange(min=1), default=300, show_default=True, help="Measurements a path.")
@output.json_option
def lookup(turns: int, *, as_json: bool) -> None:
    """Time a look-up of six passages of a long document against a bare gRPC call with as many bytes."""
    from kvferry.ablations.speed import lookups as experiment

    with output.progress_share("lookup") as advance:
        rows = experiment.run(turns, advance)
    if as_json:
        output.write_json({"rows": [asdict(row) for row in rows]})
        return
    lines = [
        (row.path, f"{row.ms:.2f}", f"{row.ratio:.2f}", str(row.request_bytes), str(row.response_bytes)) for row in rows
    ]
    click.echo(output.table([("path", "ms", "ratio", "request B", "response B"), *lines]))
