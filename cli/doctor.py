"""``kvferry doctor``: look at this machine, a configuration and the way to a peer, and say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli import output
from kvferry.cli.connection import security_options
from kvferry.core import addresses
from kvferry.core.addresses import RECEIVER_PORT, SENDER_PORT, Address

if TYPE_CHECKING:
    from kvferry.cli.checks.findings import Finding
    from kvferry.cli.checks.plan import Daemon
    from kvferry.cli.checks.system import System
    from kvferry.core.tls import PeerSecurity

ROLES = ("sender", "receiver")
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
_NAME_WIDTH = 17
_STATUS_WIDTH = 7


@click.command(
    name="doctor",
    epilog="Without --config and --role it looks at both daemons as they would start now. Exit status 1: a problem.",
)
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file of the daemon to check.")
@click.option("--role", type=click.Choice(ROLES), help="Daemon to check; by default the file's name tells.")
@click.option("--peer", "dialled", multiple=True, metavar="HOST:PORT", help="Daemon to reach; may be repeated.")
@security_options
@output.json_option
@click.pass_context
def command(
    ctx: click.Context,
    path: Path | None,
    role: str | None,
    dialled: Sequence[str],
    *,
    security: dict[str, Any],
    as_json: bool,
) -> None:
    """Check this machine, a configuration and the way to a peer.

    A --peer is called as the options say, or else as the daemon of this machine would call it.
    """
    # A tool that must work where nothing else does imports the rest only now.
    from kvferry.cli.checks import plan
    from kvferry.cli.checks.system import System
    from kvferry.core.tls import PeerSecurity

    calling = PeerSecurity(**security)
    daemons = [plan.load(name, path) for name in _roles(path, role)]
    wanted = [addresses.parse(text, "--peer", default_port=RECEIVER_PORT) for text in dialled]
    reached: dict[Address, PeerSecurity | None] = dict.fromkeys(_configured(daemons, path))
    reached |= dict.fromkeys(wanted, calling if calling != PeerSecurity() else None)
    findings = list(_examine(System(), daemons, reached, None if as_json else _show))
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        output.write_json({"ok": problems == 0, "findings": [asdict(finding) for finding in findings]})
    else:
        warnings = sum(finding.status == "warning" for finding in findings)
        click.echo(f"{problems} problem{'s'[problems == 1 :]}, {warnings} warning{'s'[warnings == 1 :]}")
    ctx.exit(1 if problems else 0)


def _examine(
    system: System,
    daemons: Sequence[Daemon],
    dialled: Mapping[Address, PeerSecurity | None],
    show: Callable[[Finding], None] | None,
) -> Iterator[Finding]:
    from kvferry.cli.checks import findings, plan

    for check in plan.checks(system, daemons, dialled):
        for finding in findings.run(check):
            if show is not None:
                show(finding)
            yield finding


def _roles(path: Path | None, role: str | None) -> Sequence[str]:
    if role is not None:
        return [role]
    if path is None:
        return ROLES
    named = [name for name in ROLES if name in path.name]
    if len(named) != 1:
        raise click.UsageError(f"{path.name} could be of either daemon: add --role sender or --role receiver")
    return named


def _configured(daemons: Sequence[Daemon], path: Path | None) -> list[Address]:
    """Return the peer that a daemon's own file names; a default that nobody chose is no peer."""
    from kvferry.core.config import ReceiverConfig, SenderConfig

    if path is None:
        return []
    found = []
    for config in (daemon.config for daemon in daemons):
        if isinstance(config, SenderConfig):
            found.append(addresses.parse(config.receiver, "receiver", default_port=RECEIVER_PORT))
        elif isinstance(config, ReceiverConfig) and config.sender != ReceiverConfig().sender:
            found.append(addresses.parse(config.sender, "sender", default_port=SENDER_PORT))
    return found


def _show(finding: Finding) -> None:
    status = click.style(finding.status.ljust(_STATUS_WIDTH), fg=_COLOURS[finding.status])
    click.echo(f"{status}  {finding.name:<{_NAME_WIDTH}}  {finding.message}")
    if finding.remedy:
        click.echo(f"{'':<{_STATUS_WIDTH}}  {'':<{_NAME_WIDTH}}  → {finding.remedy}")
