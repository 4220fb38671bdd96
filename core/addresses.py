"""host:port addresses: parsing, what counts as loopback, and which of a receiver's two doors is meant."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from kvferry.core.errors import ConfigError

SENDER_PORT = 7411
RECEIVER_PORT = 7412
TCP_SCHEME = "tcp://"
_MAX_PORT = 65_535
_MAX_PORT_DIGITS = 5
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
# gRPC takes the rest of an address that begins like this for the path of a socket.
_SOCKET_SCHEMES = ("unix", "unix-abstract", "vsock", "external")


@dataclass(frozen=True)
class Address:
    """A host and a port; an IPv6 host is kept without brackets. ``tcp`` is a plain TCP worker, in place of gRPC."""

    host: str
    port: int
    tcp: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TCP_SCHEME if self.tcp else ''}{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address. A name other than localhost does not count."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(text: str, field: str, default_port: int | None = None) -> Address:
    """Parse "host:port", "host" (with a default port) or "[v6]:port".

    Raises:
        ConfigError: naming ``field`` and the text.
    """
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, "" if default_port is None else str(default_port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{field}: {text!r}: write an IPv6 address as [address]:port", field=field, value=text)
    digits = port.isascii() and port.isdigit() and len(port) <= _MAX_PORT_DIGITS
    if not host or not digits or not 0 <= int(port) <= _MAX_PORT:
        raise ConfigError(
            f"{field}: {text!r} is not host:port with a port from 0 to {_MAX_PORT}", field=field, value=text
        )
    if not _is_host(host):
        raise ConfigError(f"{field}: {text!r}: {host!r} is no host name and no IP address", field=field, value=text)
    return Address(host, int(port))


def parse_receiver(text: str, field: str) -> Address:
    """Parse where artifacts are delivered: as ``parse`` with the receiver's port, or "tcp://host:port".

    Raises:
        ConfigError: naming ``field`` and the text.
    """
    if text.startswith(TCP_SCHEME):
        plain = parse(text.removeprefix(TCP_SCHEME), field)
        return Address(plain.host, plain.port, tcp=True)
    return parse(text, field, default_port=RECEIVER_PORT)


def _is_host(host: str) -> bool:
    if ":" in host:
        return _IPV6.fullmatch(host) is not None
    return _NAME.fullmatch(host) is not None and host not in _SOCKET_SCHEMES
