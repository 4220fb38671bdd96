"""The TLS files of a configuration: readable, in date, belonging together, for the names that peers dial."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.checks.findings import Finding
from kvferry.core import addresses
from kvferry.core.config import NodeConfig
from kvferry.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

SOON = dt.timedelta(days=30)
_RENEW = "`kvferry certs` makes new ones; then restart the daemon"
_INSTALL = "install the package that reads certificates into this Python: pip install cryptography"


def certificate(config: NodeConfig, now: dt.datetime | None = None) -> list[Finding]:
    """Check what the daemon shows; nothing without TLS."""
    if not config.certificate and not config.key:
        return []
    return _looked("certificate", lambda: _identity(config, now))


def authority(config: NodeConfig, now: dt.datetime | None = None) -> list[Finding]:
    """Check whom the daemon trusts; nothing without an authority."""
    if not config.authority:
        return []
    return _looked("authority", lambda: _authority(Path(config.authority).expanduser(), now))


def _looked(name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except ConfigError as error:
        return [Finding(name, "problem", error.message, _RENEW)]
    except ModuleNotFoundError as error:
        return [Finding(name, "warning", f"not checked: {error}", _INSTALL)]


def _identity(config: NodeConfig, now: dt.datetime | None) -> list[Finding]:
    from kvferry.core import certificates as pem

    path, key = Path(config.certificate).expanduser(), Path(config.key).expanduser()
    identity = pem.read_identity(path if config.certificate else None, key if config.key else None)
    leaf = pem.parse_certificates(identity.certificate, f"certificate: {path}")[0]
    found = [_dates("certificate", path, leaf, now), _names(config, path, leaf)]
    if not pem.is_private(key):
        text = f"{key} can be read by other users of this machine"
        found.append(Finding("key", "warning", text, f"chmod 600 {key}"))
    return found


def _authority(path: Path, now: dt.datetime | None) -> list[Finding]:
    from kvferry.core import certificates as pem

    trusted = pem.parse_certificates(pem.read_authority(path), f"authority: {path}")
    return [_dates("authority", path, max(trusted, key=lambda item: item.not_valid_after_utc), now)]


def _dates(name: str, path: Path, leaf: Certificate, now: dt.datetime | None) -> Finding:
    left = leaf.not_valid_after_utc - (now or dt.datetime.now(dt.UTC))
    text = f"{path} is valid until {leaf.not_valid_after_utc:%Y-%m-%d}, {left.days} days"
    return Finding(name, "warning", text, _RENEW) if left < SOON else Finding(name, "ok", text)


def _names(config: NodeConfig, path: Path, leaf: Certificate) -> Finding:
    """Compare the certificate's names with the address that peers dial."""
    names = _subject_names(leaf)
    host = addresses.parse(config.listen, "listen").host
    wanted = [host] if not _is_wildcard(host) else _own_names()
    text = f"{path} is for {', '.join(sorted(names)) or 'no name'}"
    if any(_covers(name, item) for name in names for item in wanted):
        return Finding("certificate names", "ok", text)
    again = "make a certificate with the name or address that peers dial: see `kvferry certs --help`"
    if _is_wildcard(host):
        text += f"; this machine is {', '.join(wanted)}, and peers may know it by yet another name"
        return Finding("certificate names", "warning", text, again)
    return Finding("certificate names", "problem", f"{text}, not for {host}; peers will refuse it", again)


def _subject_names(leaf: Certificate) -> set[str]:
    from cryptography import x509

    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    hosts = names.get_values_for_type(x509.DNSName)
    return {*hosts, *(str(address) for address in names.get_values_for_type(x509.IPAddress))}


def _covers(name: str, host: str) -> bool:
    name, host = name.casefold(), host.casefold().rstrip(".")
    if name.startswith("*."):
        return host.partition(".")[2] == name[2:]
    return name == host


def _own_names() -> list[str]:
    name = socket.gethostname()
    return [name] if name.endswith(".local") else [name, f"{name.partition('.')[0]}.local"]


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
