"""Whether this machine lets a daemon listen where it is told to: asked before a model is loaded for nothing."""

from __future__ import annotations

import errno
import socket
from typing import Any

from kvferry.core import addresses
from kvferry.core.addresses import Address
from kvferry.core.config import NodeConfig, ReceiverConfig
from kvferry.core.errors import ConfigError


def trouble(address: Address) -> OSError | UnicodeError | None:
    """Return why nobody can listen at an address now; None when it is free.

    A name may stand for several addresses, of which this machine need not have every one, but none may be taken.
    """
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return error
    problems = [_bind(family, where) for family, _, _, _, where in places]
    taken = next((problem for problem in problems if problem and problem.errno == errno.EADDRINUSE), None)
    return taken if taken or None in problems else problems[0]


def _bind(family: int, where: Any) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does, so that connections of a daemon that just ended are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def cannot_be_bound(field: str, address: Address, error: OSError | UnicodeError) -> ConfigError:
    """Return the error of an address of the configuration that cannot be bound."""
    reason = getattr(error, "strerror", None) or str(error)
    taken = getattr(error, "errno", None) == errno.EADDRINUSE
    advice = "; is another daemon there?" if taken else ""
    return ConfigError(f"{field}: {address} cannot be bound: {reason}{advice}", field=field, value=str(address))


def check(config: NodeConfig) -> None:
    """Check every address that a daemon is to listen at.

    Raises:
        ConfigError: naming the key and the address that cannot be bound.
    """
    wanted = {"listen": config.listen, "metrics": config.metrics}
    if isinstance(config, ReceiverConfig):
        wanted["tcp"] = config.tcp
    for field, text in wanted.items():
        if not text:
            continue
        address = addresses.parse(text, field)
        error = trouble(address)
        if error is not None:
            raise cannot_be_bound(field, address, error)
