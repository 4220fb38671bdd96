"""A small certificate authority: its own certificate, and those of the daemons and clients that it vouches for.

Keys are on the curve P-256: the TLS library inside gRPC offers no Ed25519, and RSA keys are large and slow to make.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.x509 import Certificate, CertificateBuilder, Name
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvferry.core.certificates import parse_certificates, parse_key
from kvferry.core.errors import ConfigError
from kvferry.core.tokens import NAME_PATTERN

AUTHORITY_DAYS = 3650
NODE_DAYS = 365
MAX_DAYS = 36_500
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
# Clocks of two machines differ; a certificate made on one is valid on the other at once.
_CLOCK_SKEW = datetime.timedelta(hours=1)

Validity = tuple[datetime.datetime, datetime.datetime]


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Facts:
    """What a certificate says, for people. Times are ISO 8601 in UTC; ``fingerprint`` is SHA-256, as openssl has it."""

    subject: str
    issuer: str
    hosts: tuple[str, ...]
    is_authority: bool
    not_before: str
    not_after: str
    expired: bool
    fingerprint: str


def check_name(name: str, setting: str) -> str:
    """Return a name that is safe as part of a file's name.

    Raises:
        ConfigError: when it holds anything but lower-case letters, digits and hyphens between them.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{setting}: {name!r}: use up to 64 lower-case letters, digits and hyphens", field=setting, value=name
        )
    return name


def create(days: int = AUTHORITY_DAYS, now: datetime.datetime | None = None) -> Pair:
    """Make an authority.

    Args:
        days: how long it is valid.
        now: from when on, the present by default.

    Raises:
        ConfigError: when ``days`` is impossible.
    """
    key = _new_key()
    name = _name("kvferry authority")
    builder = _builder(name, name, key, _validity(days, now))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return _signed(builder, key, key)


def issue(
    authority: Pair, name: str, hosts: tuple[str, ...], days: int = NODE_DAYS, now: datetime.datetime | None = None
) -> Pair:
    """Make a certificate for a daemon or a client, good for either end of a connection.

    Args:
        authority: who signs.
        name: who it is for.
        hosts: DNS names and IP addresses under which others reach it.
        days: how long it is valid; never longer than the authority.
        now: from when on, the present by default.

    Raises:
        ConfigError: when a value is impossible, or the authority is none or has expired.
    """
    check_name(name, "name")
    if not hosts:
        raise ConfigError("host: at least one is needed", field="host")
    alternatives = [_alternative(host) for host in dict.fromkeys(hosts)]
    signer, signer_key = _authority(authority)
    key = _new_key()
    start, end = _validity(days, now)
    builder = _builder(_name(name), signer.subject, key, (start, min(end, signer.not_valid_after_utc)))
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for extension, critical in (
        (x509.SubjectAlternativeName(alternatives), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(usages), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return _signed(builder, key, signer_key)


def describe(data: bytes, source: str) -> list[Facts]:
    """Say what the certificates of a PEM file are.

    Raises:
        ConfigError: naming ``source`` when it holds none.
    """
    return [_facts(certificate) for certificate in parse_certificates(data, source)]


def _facts(certificate: Certificate) -> Facts:
    hosts: list[str] = []
    is_authority = False
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.SubjectAlternativeName):
            hosts = [str(getattr(name, "value", name)) for name in extension.value]
        elif isinstance(extension.value, x509.BasicConstraints):
            is_authority = extension.value.ca
    return Facts(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        hosts=tuple(hosts),
        is_authority=is_authority,
        not_before=certificate.not_valid_before_utc.isoformat(),
        not_after=certificate.not_valid_after_utc.isoformat(),
        expired=datetime.datetime.now(datetime.UTC) > certificate.not_valid_after_utc,
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(":").upper(),
    )


def _authority(pair: Pair) -> tuple[Certificate, EllipticCurvePrivateKey]:
    certificate = parse_certificates(pair.certificate, "authority")[0]
    key = parse_key(pair.key, "authority key")
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError("authority: its key and its certificate do not belong together", field="authority")
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    if not is_authority:
        raise ConfigError("authority: its certificate may not sign others", field="authority")
    if datetime.datetime.now(datetime.UTC) > certificate.not_valid_after_utc:
        raise ConfigError(f"authority: expired on {certificate.not_valid_after_utc:%Y-%m-%d}", field="authority")
    return certificate, key


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise ConfigError(
                f"host: {host!r} is neither a DNS name nor an IP address", field="host", value=host
            ) from None
        return x509.DNSName(host)


def _validity(days: int, now: datetime.datetime | None) -> Validity:
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"days: {days}, must be 1 to {MAX_DAYS}", field="days", value=days, limit=MAX_DAYS)
    start = now or datetime.datetime.now(datetime.UTC)
    return start - _CLOCK_SKEW, start + datetime.timedelta(days=days)


def _new_key() -> EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name(common_name: str) -> Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: Name, issuer: Name, key: EllipticCurvePrivateKey, validity: Validity) -> CertificateBuilder:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: CertificateBuilder, key: EllipticCurvePrivateKey, signer: EllipticCurvePrivateKey) -> Pair:
    certificate = builder.sign(signer, hashes.SHA256())
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
