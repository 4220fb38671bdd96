"""Options that say where the daemons are, for the commands that talk to them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvferry.core.addresses import RECEIVER_PORT, SENDER_PORT

sender_option = click.option(
    "--sender", default=f"127.0.0.1:{SENDER_PORT}", show_default=True, help="host:port of the sender."
)
receiver_option = click.option(
    "--receiver", default=f"127.0.0.1:{RECEIVER_PORT}", show_default=True, help="host:port of the receiver."
)
_SECURITY = (
    (
        "authority",
        "KVFERRY_AUTHORITY",
        "PEM file of the authority that signed the daemons' certificates; turns TLS on.",
    ),
    ("certificate", "KVFERRY_CERTIFICATE", "PEM file to show to a daemon that asks for a certificate."),
    ("key", "KVFERRY_KEY", "PEM file of its key."),
    ("token_file", "KVFERRY_TOKEN_FILE", "File of the token to present."),
)


def security_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of TLS and tokens; the command gets them as ``security``, keyword arguments of a client."""

    @functools.wraps(function)
    def command(*args: Any, insecure: bool, token_file: Path | None, **options: Any) -> Any:
        # gRPC writes about broken connections itself, and our errors say it better. It reads this when imported.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from kvferry.core import tokens

        security = {name: options.pop(name) for name in ("authority", "certificate", "key")}
        security |= {"token": tokens.read_secret(token_file) if token_file else None, "insecure": insecure}
        return function(*args, security=security, **options)

    add = click.option("--insecure", is_flag=True, help="Let the token cross a network without TLS.")
    decorated = add(command)
    for name, variable, text in reversed(_SECURITY):
        flag, kind = f"--{name.replace('_', '-')}", click.Path(path_type=Path)
        decorated = click.option(flag, name, type=kind, envvar=variable, show_envvar=True, help=text)(decorated)
    return decorated


timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Most seconds to wait for a sign of life.",
)
