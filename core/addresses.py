"""host:port addresses: parsing, and what counts as loopback."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvferry.core.errors import ConfigError

SENDER_PORT = 7411
RECEIVER_PORT = 7412
_MAX_PORT = 65_535


@dataclass(frozen=True)
class Address:
    """A host and a port; an IPv6 host is kept without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

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
    if not host or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= _MAX_PORT:
        raise ConfigError(
            f"{field}: {text!r} is not host:port with a port from 0 to {_MAX_PORT}", field=field, value=text
        )
    return Address(host, int(port))
