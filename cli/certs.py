"""``kvferry certs``: a small certificate authority, certificates for both ends, and tokens."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli import output
from kvferry.core.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.core.authority import Facts, Pair

AUTHORITY = "authority"
_SECRET_MODE = 0o600
_PUBLIC_MODE = 0o644

folder_argument = click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))


@click.group(name="certs")
def command() -> None:
    """Make certificates and tokens, so that only your own machines can connect."""


@command.command(name="init")
@folder_argument
@click.option("--days", type=int, default=3650, show_default=True, help="How long the authority is valid.")
@output.json_option
def init(*, folder: Path, days: int, as_json: bool) -> None:
    """Make an authority in DIR.

    Every machine gets a copy of authority.pem. The key, authority.key, stays in DIR and goes to no daemon.
    """
    from kvferry.core import authority

    paths = _paths(folder, AUTHORITY)
    _refuse_existing(*paths)
    _make_folder(folder)
    _write_pair(paths, authority.create(days))
    _report({"certificate": str(paths[0]), "key": str(paths[1])}, paths[0], as_json=as_json)


@command.command(name="issue")
@folder_argument
@click.argument("name")
@click.option("--host", "hosts", multiple=True, required=True, help="DNS name or IP address; repeatable.")
@click.option("--days", type=int, default=365, show_default=True, help="How long the certificate is valid.")
@click.option("--replace", is_flag=True, help="Replace the certificate and key of that name.")
@output.json_option
def issue(*, folder: Path, name: str, hosts: tuple[str, ...], days: int, replace: bool, as_json: bool) -> None:
    """Make the certificate NAME.pem and its key in DIR, signed by the authority there.

    It serves for a daemon and for a client. The hosts are those under which others reach the machine.
    """
    from kvferry.core import authority

    authority.check_name(name, "name")
    if name == AUTHORITY:
        raise ConfigError(f"name: {AUTHORITY!r} is the authority's own", field="name", value=name)
    paths = _paths(folder, name)
    if not replace:
        _refuse_existing(*paths)
    certificate, key = _paths(folder, AUTHORITY)
    signer = authority.Pair(_read(certificate), _read(key))
    _write_pair(paths, authority.issue(signer, name, hosts, days))
    _report({"certificate": str(paths[0]), "key": str(paths[1])}, paths[0], as_json=as_json)


@command.command(name="token")
@click.argument("name")
@click.option(
    "--tokens",
    "token_file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of accepted tokens; it gets the digest.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the secret; without it the secret is printed, this once.",
)
@click.option("--expires", type=click.DateTime(["%Y-%m-%d"]), help="Last day on which it is accepted.")
@click.option("--max-bytes", type=click.IntRange(min=0), help="Bytes that may be stored for it.")
@click.option("--max-artifacts", type=click.IntRange(min=0), help="Artifacts that may be stored for it.")
@click.option("--max-calls", type=click.IntRange(min=1), help="Calls that may run for it at the same time.")
@output.json_option
def token(
    *,
    name: str,
    token_file: Path,
    out: Path | None,
    expires: datetime.datetime | None,
    max_bytes: int | None,
    max_artifacts: int | None,
    max_calls: int | None,
    as_json: bool,
) -> None:
    """Make the token NAME: a random secret for whoever calls, its digest for the daemon that is called."""
    from kvferry.core import authority, tokens

    secret = tokens.new_secret()
    entry = tokens.Token(
        name=authority.check_name(name, "name"),
        digest=tokens.digest_of(secret),
        expires=expires.date() if expires else None,
        max_bytes=max_bytes,
        max_artifacts=max_artifacts,
        max_calls=max_calls,
    )
    if out is not None:
        _refuse_existing(out)
        _write(out, f"{secret}\n".encode("ascii"), _SECRET_MODE)
    try:
        tokens.append(token_file, entry)
    except ConfigError:
        if out is not None:
            out.unlink(missing_ok=True)
        raise
    record = {"name": name, "tokens": str(token_file)} | ({"token": secret} if out is None else {"out": str(out)})
    if as_json:
        output.write_json(record)
    elif out is None:
        click.echo(secret)
        output.remark(f"{name}: this is the only time that the token is shown; {token_file} holds its digest")
    else:
        click.echo(f"{name}: the token is in {out}, its digest in {token_file}")


@command.command(name="show")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@output.json_option
def show(*, file: Path, as_json: bool) -> None:
    """Say what the certificates in FILE are."""
    from kvferry.core import authority

    found = authority.describe(_read(file), str(file))
    if as_json:
        output.write_json({"certificates": [asdict(facts) for facts in found]})
        return
    for facts in found:
        click.echo(output.table(_rows(facts)))


def _rows(facts: Facts) -> list[tuple[str, ...]]:
    return [
        ("subject", facts.subject),
        ("issuer", facts.issuer),
        ("kind", "authority" if facts.is_authority else "node"),
        ("hosts", ", ".join(facts.hosts) or "-"),
        ("valid", f"{facts.not_before} to {facts.not_after}" + ("  EXPIRED" if facts.expired else "")),
        ("sha-256", facts.fingerprint),
    ]


def _report(record: dict[str, str], certificate: Path, *, as_json: bool) -> None:
    from kvferry.core import authority

    facts = authority.describe(_read(certificate), str(certificate))[0]
    if as_json:
        output.write_json({**record, "not_after": facts.not_after, "hosts": facts.hosts})
    else:
        click.echo(f"{record['certificate']} and {record['key']}, valid until {facts.not_after[:10]}")


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


def _write_pair(paths: tuple[Path, Path], pair: Pair) -> None:
    _write(paths[1], pair.key, _SECRET_MODE)
    _write(paths[0], pair.certificate, _PUBLIC_MODE)


def _refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path}: is there already and would be lost", path=str(path))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", path=str(folder)) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=str(path)) from error


def _write(path: Path, data: bytes, mode: int) -> None:
    from kvferry.core.files import write_atomic

    try:
        write_atomic(path, data, mode)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=str(path)) from error
