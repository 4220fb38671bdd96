"""TLS: PEM files checked with one clear error each, and gRPC credentials made from them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvferry.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.x509 import Certificate

MAX_PEM_BYTES = 1024 * 1024


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


@dataclass(frozen=True)
class Identity:
    """A certificate chain and its key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    expires: datetime.datetime


def server_credentials(identity: Identity, authority: Path | None) -> grpc.ServerCredentials:
    """Return the credentials of a server.

    Args:
        identity: what it shows.
        authority: who must have signed the certificates of clients; None asks for none.

    Raises:
        ConfigError: when ``authority`` cannot be used.
    """
    roots = read_authority(authority) if authority else None
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
    identity = read_identity(security.certificate, security.key) if security.certificate or security.key else None
    return grpc.ssl_channel_credentials(
        root_certificates=read_authority(security.authority),
        private_key=identity.key if identity else None,
        certificate_chain=identity.certificate if identity else None,
    )


def read_identity(certificate: Path | None, key: Path | None) -> Identity:
    """Read a certificate chain and its key.

    Raises:
        ConfigError: when one is missing, cannot be read, is no PEM, has expired, or they do not belong together.
    """
    if certificate is None or key is None:
        given, missing = ("certificate", "key") if key is None else ("key", "certificate")
        raise ConfigError(f"{missing}: is needed as well when {given} is given", field=missing)
    chain_bytes, key_bytes = _read(certificate, "certificate"), _read(key, "key")
    chain = parse_certificates(chain_bytes, f"certificate: {certificate}")
    _check_dates(chain[0], f"certificate: {certificate}")
    _check_pair(chain[0], _parse_key(key_bytes, f"key: {key}"), certificate, key)
    return Identity(chain_bytes, key_bytes, chain[0].not_valid_after_utc)


def read_authority(path: Path) -> bytes:
    """Read the certificates of an authority.

    Raises:
        ConfigError: when the file cannot be read or is no PEM, or all of its certificates have expired.
    """
    data = _read(path, "authority")
    certificates = parse_certificates(data, f"authority: {path}")
    # A bundle may hold the old authority beside the new one while certificates are being replaced.
    _check_dates(max(certificates, key=lambda item: item.not_valid_after_utc), f"authority: {path}")
    return data


def parse_certificates(data: bytes, source: str) -> list[Certificate]:
    """Parse one or more PEM certificates.

    Raises:
        ConfigError: naming ``source``.
    """
    from cryptography import x509  # noqa: PLC0415  (only where TLS is used)

    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{source}: holds no PEM certificate", source=source) from error


def is_private(path: Path) -> bool:
    """Whether only its owner may read a file."""
    return not path.stat().st_mode & 0o077


def _read(path: Path, setting: str) -> bytes:
    where = {"field": setting, "path": str(path)}
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}", **where) from error
    if len(data) > MAX_PEM_BYTES:
        raise ConfigError(f"{setting}: {path}: over {MAX_PEM_BYTES} bytes", **where)
    return data


def _parse_key(data: bytes, source: str) -> PrivateKeyTypes:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    try:
        return load_pem_private_key(data, password=None)
    except TypeError as error:
        raise ConfigError(f"{source}: is encrypted; a daemon starts without anybody to ask", source=source) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{source}: holds no PEM private key", source=source) from error


def _check_pair(leaf: Certificate, private: PrivateKeyTypes, certificate: Path, key: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: PLC0415

    if not isinstance(private, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        # gRPC's TLS library offers no signature algorithm for them, and every handshake would fail.
        raise ConfigError(f"key: {key}: must be an elliptic curve (P-256) or RSA key", field="key", path=str(key))
    if leaf.public_key() != private.public_key():
        raise ConfigError(f"key: {key} does not belong to the certificate {certificate}", field="key", path=str(key))


def _check_dates(certificate: Certificate, source: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise ConfigError(f"{source}: expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", source=source)
    if now < certificate.not_valid_before_utc:
        raise ConfigError(
            f"{source}: is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; is the clock right?",
            source=source,
        )
