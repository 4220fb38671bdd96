"""``kvferry inspect``: show the manifest of a stored artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvferry.cli import output


@click.command(name="inspect")
@click.argument("target")
@click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Store to search; repeatable. By default those of this machine's sender and receiver.",
)
@output.json_option
def command(*, target: str, stores: tuple[Path, ...], as_json: bool) -> None:
    """Show the manifest of a stored artifact.

    TARGET is an artifact's directory, a manifest file, an artifact id, or at least its first 8 digits. The store of a
    running daemon may be inspected.
    """
    from kvferry.cli import stored_artifact

    found = stored_artifact.find(target, stores).as_json()
    if as_json:
        output.write_json(found)
    else:
        click.echo(_text(found))


def _text(found: dict[str, Any]) -> str:
    manifest = found.pop("manifest")
    sections = manifest.pop("sections")
    manifest["payload"]["chunks"] = len(manifest["payload"]["chunks"])
    head = ("SECTION", "DTYPE", "SHAPE", "ENCODING", "BYTES", "DIGEST")
    rows = [
        (
            section["name"],
            section["dtype"],
            "x".join(map(str, section["shape"])),
            section["encoding"],
            str(section["length"]),
            section["digest"][:16] + "…",
        )
        for section in sections
    ]
    return "\n".join([*flatten(found), "", *flatten(manifest), "", output.table([head, *rows])])


def flatten(value: Any, path: str = "") -> list[str]:
    """Return "path: value" lines; equal neighbours in a list, such as the layers of a model, share theirs."""
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in flatten(item, f"{path}.{key}" if path else key)]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [line for span, item in _runs(value) for line in flatten(item, f"{path}[{span}]")]
    if isinstance(value, list):
        return [f"{path}: {', '.join(map(str, value)) or '-'}"]
    return [f"{path}: {'-' if value is None or value == {} else value}"]


def _runs(items: list[Any]) -> list[tuple[str, Any]]:
    starts = [index for index, item in enumerate(items) if index == 0 or item != items[index - 1]]
    ends = [start - 1 for start in starts[1:]] + [len(items) - 1]
    return [
        (str(start) if start == end else f"{start}..{end}", items[start])
        for start, end in zip(starts, ends, strict=True)
    ]
