"""From a daemon's configuration to what it shows, whom it lets in, and how it reaches its peers."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.core import tls, tokens
from kvferry.core.addresses import Address
from kvferry.core.auth import Gate
from kvferry.core.config import NodeConfig, ReceiverConfig
from kvferry.core.logs import logger
from kvferry.core.tls import PeerSecurity
from kvferry.core.tokens import TokenFile

_EXPIRY_WARNING = datetime.timedelta(days=30)


@dataclass(frozen=True)
class ServerSecurity:
    """What a daemon serves with. ``credentials`` None is no TLS; ``context`` is the same for its plain TCP worker."""

    credentials: grpc.ServerCredentials | None
    gate: Gate
    context: ssl.SSLContext | None = None


def for_server(config: NodeConfig) -> ServerSecurity:
    """Read every file that serving and calling need, so that a mistake shows before the model is loaded.

    Raises:
        ConfigError: naming the setting, the file and what is wrong with it.
    """
    token_file = TokenFile(_path(config.tokens)) if config.tokens else None
    if config.token_file:
        tokens.read_secret(_path(config.token_file))
    if config.authority:
        from kvferry.core import certificates  # noqa: PLC0415  (loads cryptography, which only TLS needs)

        certificates.read_authority(_path(config.authority))
    return ServerSecurity(_credentials(config), Gate(token_file, config.max_calls), _context(config))


def for_peer(config: NodeConfig, peer: Address, configured: Address) -> PeerSecurity:
    """Return how a daemon reaches another one.

    Without TLS nothing proves who answers at an address, so the token then goes to the configured peer alone: a request
    that names another address cannot draw it out.

    Args:
        config: of the daemon that calls.
        peer: where it calls.
        configured: the peer that its configuration names.

    Raises:
        ConfigError: when the token's file cannot be used.
    """
    authority = _path(config.authority) if config.authority else None
    shows_token = bool(config.token_file) and (authority is not None or _is_same(peer, configured))
    return PeerSecurity(
        authority=authority,
        certificate=_path(config.certificate) if authority and config.certificate else None,
        key=_path(config.key) if authority and config.key else None,
        token=tokens.read_secret(_path(config.token_file)) if shows_token else None,
        insecure=config.insecure,
    )


def _context(config: NodeConfig) -> ssl.SSLContext | None:
    if not isinstance(config, ReceiverConfig) or not config.tcp or not config.certificate:
        return None
    return tls.server_context(_path(config.certificate), _path(config.key), _client_authority(config))


def _client_authority(config: NodeConfig) -> Path | None:
    """Return who must have signed a caller's certificate; None asks for none."""
    return _path(config.authority) if config.client_certificates else None


def _credentials(config: NodeConfig) -> grpc.ServerCredentials | None:
    if not config.certificate:
        return None
    from kvferry.core import certificates  # noqa: PLC0415

    certificate, key = _path(config.certificate), _path(config.key)
    identity = certificates.read_identity(certificate, key)
    log = logger("security")
    if identity.expires - datetime.datetime.now(datetime.UTC) < _EXPIRY_WARNING:
        log.warning("certificate expires soon", path=str(certificate), expires=f"{identity.expires:%Y-%m-%d}")
    if not certificates.is_private(key):
        log.warning("key can be read by other users of this machine", path=str(key))
    return tls.server_credentials(identity, _client_authority(config))


def _is_same(one: Address, other: Address) -> bool:
    return one.port == other.port and (one.host == other.host or (one.is_loopback and other.is_loopback))


def _path(text: str) -> Path:
    return Path(text).expanduser()
