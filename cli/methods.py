"""``kvferry methods``: list the methods of the sender's registry."""

from __future__ import annotations

import click
import msgspec

from kvferry.cli import output


@click.command(name="methods")
@output.json_option
def command(*, as_json: bool) -> None:
    """List the methods that documents can be sent with."""
    from kvferry.sender.registry import METHODS

    infos = [method.info for method in METHODS]
    if as_json:
        output.write_json({"methods": msgspec.to_builtins(infos)})
        return
    head = ("ID", "NAME", "FORM", "LABEL", "QUESTION", "SUMMARY", "SOURCE")
    rows = [
        (
            info.id,
            info.name,
            info.form,
            info.label,
            "aware" if info.aware else "blind",
            info.summary,
            info.source,
        )
        for info in infos
    ]
    click.echo(output.table([head, *rows]))
