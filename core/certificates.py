"""PEM files of certificates and keys: read, and refused with one clear error each."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import Certificate

from kvferry.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

MAX_PEM_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Identity:
    """A certificate chain and its key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    expires: datetime.datetime


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
    _check_pair(chain[0], parse_key(key_bytes, f"key: {key}"), certificate, key)
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


def parse_key(data: bytes, source: str) -> PrivateKeyTypes:
    """Parse an unencrypted PEM private key.

    Raises:
        ConfigError: naming ``source``.
    """
    try:
        return load_pem_private_key(data, password=None)
    except TypeError as error:
        raise ConfigError(f"{source}: is encrypted; a daemon starts without anybody to ask", source=source) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{source}: holds no PEM private key", source=source) from error


def _check_pair(leaf: Certificate, private: PrivateKeyTypes, certificate: Path, key: Path) -> None:
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
