"""The addresses that a daemon listens on: free, taken, or impossible here."""

from __future__ import annotations

import errno
import http.client
import socket

from kvferry.cli.checks import daemons
from kvferry.cli.checks.findings import Finding
from kvferry.core import addresses, metrics_server, ports
from kvferry.core.addresses import Address
from kvferry.core.errors import ConfigError
from kvferry.core.tls import PeerSecurity

_SECONDS = 1.0
_PAGE_BYTES = 1024 * 1024
_PLAINTEXT = PeerSecurity()


def listen(text: str, role: str, security: PeerSecurity = _PLAINTEXT) -> Finding:
    """Check that a daemon can listen, or that it does.

    Args:
        text: host:port.
        role: of the daemon that wants the address.
        security: how it would be called.
    """
    address = addresses.parse(text, "listen")
    reached = _reachable(address) if address.port else None
    if reached is None:
        return _free("port", text, address, role)
    try:
        answer = daemons.ask(reached, security, _SECONDS)
    except ConfigError as error:
        remedy = "mend the files that the configuration names; then this shows who it is"
        return Finding("port", "warning", f"{text} is taken, and nobody can be asked there: {error.message}", remedy)
    if answer.node is not None and answer.node.role == role:
        return Finding("port", "ok", f"{text}: the {role} is running there, with {answer.node.model}")
    if answer.withheld:
        return Finding("port", "ok", f"{text}: a kvferry daemon that asks for a token is running there")
    if answer.error is not None and security.authority is not None:
        remedy = "if the daemon is running, all is well; otherwise choose another port, or stop the program that has it"
        return Finding("port", "warning", f"{text} is taken, and cannot be asked: {answer.error.message}", remedy)
    who = f"a kvferry {answer.node.role}" if answer.node else "another gRPC server"
    if answer.error is not None:
        who = "something that does not answer a health check"
    return _taken("port", f"{text}: the {role} wants it, and it is taken by {who}", address)


def page(text: str, role: str) -> Finding:
    """Check that the metrics page can be served, or that it is."""
    address = addresses.parse(text, "metrics")
    reached = _reachable(address) if address.port else None
    if reached is None:
        return _free("metrics port", text, address, role)
    if _serves_metrics(reached):
        return Finding("metrics port", "ok", f"{text}: a kvferry daemon's metrics are there")
    return _taken("metrics port", f"{text}: the {role} wants it for its metrics, and another program has it", address)


def _free(name: str, text: str, address: Address, role: str) -> Finding:
    if address.port == 0:
        return Finding(name, "ok", f"{text}: the {role} takes any free port")
    trouble = ports.trouble(address)
    if trouble is None:
        return Finding(name, "ok", f"{text} is free for the {role}")
    reason = getattr(trouble, "strerror", None) or trouble
    return Finding(name, "problem", f"{text}: {reason}", _remedy(trouble, address))


def _taken(name: str, text: str, address: Address) -> Finding:
    remedy = f"choose another port, or stop that program (`lsof -nP -i :{address.port}` shows which it is)"
    return Finding(name, "problem", text, remedy)


def _serves_metrics(address: Address) -> bool:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=_SECONDS)
    try:
        connection.request("GET", metrics_server.PATH)
        return b"kvferry_node_info" in connection.getresponse().read(_PAGE_BYTES)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _reachable(address: Address) -> Address | None:
    """Return where somebody takes connections at this address; one that stands for every interface is asked here."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104  (compared, not bound)
    try:
        with socket.create_connection((host, address.port), timeout=_SECONDS):
            return Address(host, address.port)
    except OSError:
        return None


def _remedy(error: OSError | UnicodeError, address: Address) -> str:
    if isinstance(error, UnicodeError):
        return f"{address.host} is no name of a host: give an IP address"
    if error.errno == errno.EADDRINUSE:
        return f"choose another port, or stop the program that holds it (`lsof -nP -i :{address.port}` shows which)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "ports below 1024 belong to the administrator: choose one from 1024 on, such as 7411 or 7412"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"no interface of this machine has the address {address.host}: give one that it has, or 127.0.0.1"
    if isinstance(error, socket.gaierror):
        return f"the name {address.host} does not resolve here: give an IP address"
    return "give another address or port"
