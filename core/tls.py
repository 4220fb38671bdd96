"""TLS for gRPC: the credentials of servers and channels, made from checked PEM files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvferry.core.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.core.certificates import Identity


@dataclass(frozen=True)
class PeerSecurity:
    """How a daemon is reached.

    Attributes:
        authority: PEM of the certificates that vouch for the daemon; None speaks without TLS.
        certificate, key: PEM files that are shown to a daemon which asks for a client's certificate.
        token: presented with every call.
        insecure: let the token cross a network without TLS.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool = False


def server_credentials(identity: Identity, authority: Path | None) -> grpc.ServerCredentials:
    """Return the credentials of a server.

    Args:
        identity: what it shows.
        authority: who must have signed the certificates of clients; None asks for none.

    Raises:
        ConfigError: when ``authority`` cannot be used.
    """
    from kvferry.core import certificates  # noqa: PLC0415  (loads cryptography, which only TLS needs)

    roots = certificates.read_authority(authority) if authority else None
    return grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)], root_certificates=roots, require_client_auth=roots is not None
    )


def channel_credentials(security: PeerSecurity) -> grpc.ChannelCredentials | None:
    """Return the credentials for a peer, None where there is no TLS.

    Raises:
        ConfigError: naming the setting, the file and what is wrong with it.
    """
    if security.authority is None:
        if security.certificate or security.key:
            raise ConfigError("certificate: is shown only over TLS; give the authority as well", field="authority")
        return None
    from kvferry.core import certificates  # noqa: PLC0415

    shows = security.certificate or security.key
    identity = certificates.read_identity(security.certificate, security.key) if shows else None
    return grpc.ssl_channel_credentials(
        root_certificates=certificates.read_authority(security.authority),
        private_key=identity.key if identity else None,
        certificate_chain=identity.certificate if identity else None,
    )
