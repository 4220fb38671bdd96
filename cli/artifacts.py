"""``kvferry artifacts``: list, verify, export and import artifacts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import output
from kvferry.cli.connection import receiver_option, security_options, timeout_option

if TYPE_CHECKING:
    from kvferry.core.artifact_file import ArtifactFile
    from kvferry.sender.transfer import Delivery, Transfer

_SHOWN_PROBLEMS = 2
_store_option = click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Store on this machine; repeatable. By default those of its sender and receiver.",
)


@click.group(name="artifacts")
def command() -> None:
    """List, verify, export and import artifacts."""


@command.command(name="list")
@_store_option
@click.option("--receiver", help="host:port of a receiver to ask instead.")
@timeout_option
@security_options
@output.json_option
def list_artifacts(
    *, stores: tuple[Path, ...], receiver: str | None, timeout: float, security: dict[str, Any], as_json: bool
) -> None:
    """List the artifacts of stores on this machine, or of a receiver.

    The store of a running daemon may be listed.
    """
    if stores and receiver:
        raise click.UsageError("--store and --receiver exclude each other")

    from kvferry.cli import artifact_rows, stored_artifact

    if receiver:
        from kvferry.client import Client

        with Client(receiver=receiver, timeout=timeout, **security) as client:
            rows = artifact_rows.of_receiver(client.artifacts(), receiver)
    else:
        rows = artifact_rows.of_stores(stores or stored_artifact.default_stores())
    if as_json:
        output.write_json({"artifacts": [row.as_json() for row in rows]})
    elif rows:
        click.echo(artifact_rows.table(rows))
    else:
        output.remark("no artifacts")


@command.command(name="verify")
@click.argument("artifacts", nargs=-1, metavar="[ID]...")
@_store_option
@output.json_option
@click.pass_context
def verify(ctx: click.Context, *, artifacts: tuple[str, ...], stores: tuple[Path, ...], as_json: bool) -> None:
    """Read artifacts again, every byte, and say what is damaged.

    Without an ID, or the first 8 digits of one, all published artifacts are read. Nothing is changed and no lock is
    taken, so a daemon may be running. Ends with status 1 when something is damaged.
    """
    from kvferry.cli import artifact_rows, stored_artifact

    searched = stores or tuple(stored_artifact.default_stores())
    if artifacts:
        paths = [path for given in artifacts for path in stored_artifact.copies(given, searched)]
    else:
        paths = stored_artifact.directories(searched, ("artifacts",))
    found: dict[Path, list[str]] = {}
    with output.progress_stages() as bar:
        for number, path in enumerate(paths):
            bar("verify", number, len(paths))
            problems = artifact_rows.problems(path)
            if problems is not None:
                found[path] = problems
    damaged = {path: problems for path, problems in found.items() if problems}
    if as_json:
        listed = [{"artifact_id": path.name, "path": str(path), "problems": found[path]} for path in found]
        output.write_json({"artifacts": listed, "damaged": len(damaged)})
    else:
        for path, problems in damaged.items():
            click.echo(f"{path}: {_summary(problems)}")
        output.remark(f"{len(found)} read, {len(damaged)} damaged")
    if damaged:
        ctx.exit(1)


@command.command(name="export")
@click.argument("artifact")
@click.argument("file", type=click.Path(path_type=Path))
@_store_option
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@output.json_option
def export(*, artifact: str, file: Path, stores: tuple[Path, ...], force: bool, as_json: bool) -> None:
    """Write an artifact into one file, which can travel by any means.

    ARTIFACT is its id, or at least the first 8 digits. Every byte is verified on the way; `kvferry artifacts import`
    delivers the file to a receiver.
    """
    from kvferry.cli import stored_artifact
    from kvferry.core import artifact_file

    found = stored_artifact.find(artifact, stores)
    source = stored_artifact.whole(found)
    with output.progress_stages() as bar:
        size = artifact_file.write(
            file,
            source,
            source.account,
            overwrite=force,
            progress=lambda done, total: bar("export", done, total),
        )
    if as_json:
        output.write_json({"artifact_id": source.artifact_id.hex(), "file": str(file), "bytes": size})
    else:
        click.echo(file)
        output.remark(f"{source.artifact_id.hex()} · {output.size(size)}")
    if source.account is None:
        output.remark("what the artifact cost its sender is not known here; ledgers of its answers have 0 for it")


@command.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@receiver_option
@timeout_option
@security_options
@output.json_option
def deliver(*, file: Path, receiver: str, timeout: float, security: dict[str, Any], as_json: bool) -> None:
    """Verify an exported artifact and deliver it to a receiver.

    A delivery that broke goes on where it stopped. Prints the artifact's id, which `kvferry ask` takes.
    """
    from kvferry.core import addresses, artifact_file
    from kvferry.core.ledger import SenderAccount
    from kvferry.core.tls import PeerSecurity
    from kvferry.sender.transfer import Transfer

    where = addresses.parse(receiver, "receiver", default_port=addresses.RECEIVER_PORT)
    artifact = artifact_file.read(file)
    artifact.verify()
    account = artifact.account or SenderAccount(0, 0, 0.0, 0.0, 0.0, 0.0)
    for name, value in security.items():
        security[name] = value.expanduser() if isinstance(value, Path) else value
    transfer = Transfer(artifact, account, where, timeout, Uncounted(), security=PeerSecurity(**security))
    asyncio.run(_run(transfer))
    record = Imported.of(artifact, str(where), transfer.delivery)
    if as_json:
        output.write_json(vars(record))
    else:
        click.echo(record.artifact_id)
        output.remark(record.text())
    if artifact.account is None:
        output.remark("the file does not say what the artifact cost its sender; ledgers of its answers have 0 for it")


class Uncounted:
    """Counts nothing: this is no daemon."""

    def sent(self, kind: str, count: int) -> None:
        """Take no note of bytes that went out."""

    def received(self, kind: str, count: int) -> None:
        """Take no note of bytes that came in."""


@dataclass(frozen=True)
class Imported:
    """What a delivery came to."""

    artifact_id: str
    method: str
    form: str
    receiver: str
    manifest_bytes: int
    payload_bytes: int
    moved_bytes: int
    wire_bytes: int

    @classmethod
    def of(cls, artifact: ArtifactFile, receiver: str, delivery: Delivery) -> Imported:
        """Put it together."""
        return cls(
            artifact.artifact_id.hex(),
            artifact.manifest.method.id,
            artifact.manifest.form,
            receiver,
            len(artifact.encoded),
            artifact.manifest.payload.length,
            delivery.moved_bytes,
            delivery.traffic.wire_bytes if delivery.traffic else 0,
        )

    def text(self) -> str:
        """Return it in one line for people."""
        return " · ".join(
            (
                f"{self.method} ({self.form}) at {self.receiver}",
                f"artifact {output.size(self.manifest_bytes + self.payload_bytes)}",
                f"moved {output.size(self.moved_bytes)}",
                f"on the wire {output.size(self.wire_bytes)}",
            )
        )


async def _run(transfer: Transfer) -> None:
    with output.progress_stages() as bar:
        async with contextlib.aclosing(transfer.run()) as steps:
            async for progress in steps:
                bar(progress.stage, progress.done, progress.total)


def _summary(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    more = len(problems) - _SHOWN_PROBLEMS
    return f"{shown}; and {more} more" if more > 0 else shown
