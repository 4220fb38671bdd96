"""TLS, made from checked PEM files: credentials for gRPC, contexts for the plain TCP worker."""

from __future__ import annotations

import ssl
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
    files = _client_files(security)
    if files is None:
        return None
    roots, identity = files
    return grpc.ssl_channel_credentials(
        root_certificates=roots,
        private_key=identity.key if identity else None,
        certificate_chain=identity.certificate if identity else None,
    )


def server_context(certificate: Path, key: Path, authority: Path | None) -> ssl.SSLContext:
    """Return what ``server_credentials`` does, for sockets.

    Raises:
        ConfigError: when a file cannot be used.
    """
    from kvferry.core import certificates  # noqa: PLC0415

    certificates.read_identity(certificate, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A ticket that the peer has not read when it leaves would break the connection off.
    context.num_tickets = 0
    _show(context, certificate, key)
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, certificates.read_authority(authority))
    return context


def client_context(security: PeerSecurity) -> ssl.SSLContext | None:
    """Return what ``channel_credentials`` does, for sockets.

    Raises:
        ConfigError: naming the setting, the file and what is wrong with it.
    """
    files = _client_files(security)
    if files is None:
        return None
    # Checks the peer's certificate and its name.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _trust(context, files[0])
    if security.certificate and security.key:
        _show(context, security.certificate, security.key)
    return context


def _client_files(security: PeerSecurity) -> tuple[bytes, Identity | None] | None:
    """Return the authority's certificates and what is shown to a peer that asks."""
    if security.authority is None:
        if security.certificate or security.key:
            raise ConfigError("certificate: is shown only over TLS; give the authority as well", field="authority")
        return None
    from kvferry.core import certificates  # noqa: PLC0415

    shows = security.certificate or security.key
    identity = certificates.read_identity(security.certificate, security.key) if shows else None
    return certificates.read_authority(security.authority), identity


def _show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        # With an empty password OpenSSL asks nobody for one.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise ConfigError(f"certificate: {certificate} and {key}: {error}", field="certificate") from error


def _trust(context: ssl.SSLContext, authority: bytes) -> None:
    try:
        context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    except OSError as error:
        raise ConfigError(f"authority: not usable: {error}", field="authority") from error
    # As gRPC has it: whoever the file holds is trusted, also where somebody else signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
