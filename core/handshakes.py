"""What a failed TLS handshake means, in words that say what to do. gRPC reports all of them as UNAVAILABLE."""

from __future__ import annotations

_UNSIGNED = "the peer's TLS certificate was not signed by the authority that was given"
_OTHER_HOST = "the peer's TLS certificate is for another host name than the one that was dialled"
_CLOSED = "the peer closed the connection at once: it may ask for TLS, or refuse the client certificate that was shown"

# Pieces of OpenSSL's and gRPC's own texts, from the particular to the general: the first that occurs decides.
_MEANINGS = (
    ("certificate has expired", "the peer's TLS certificate has expired"),
    ("certificate is not yet valid", "the peer's TLS certificate is not valid yet; is one of the clocks wrong?"),
    ("Hostname Verification", _OTHER_HOST),
    ("Hostname mismatch", _OTHER_HOST),
    ("IP address mismatch", _OTHER_HOST),
    ("WRONG_VERSION_NUMBER", "the peer does not speak TLS on that port, and an authority was given"),
    ("CERTIFICATE_REQUIRED", "the peer asks for a client certificate (mutual TLS); give certificate and key"),
    ("certificate signature failure", _UNSIGNED),
    ("local issuer certificate", _UNSIGNED),
    ("self-signed certificate", _UNSIGNED),
    ("self signed certificate", _UNSIGNED),
    ("CERTIFICATE_VERIFY_FAILED", "the peer's TLS certificate cannot be verified"),
    ("handshake failed", "the TLS handshake failed"),
    ("Socket closed", _CLOSED),
    ("Connection reset", _CLOSED),
)
_CONNECTING = "failed to connect"


def explain(details: str) -> str:
    """Say what a failed connection has to do with TLS.

    Args:
        details: gRPC's text of an UNAVAILABLE status.

    Returns:
        One sentence without a full stop, or "" when TLS has no part in it.
    """
    # A connection that breaks later says "Socket closed" as well, and then it is no handshake.
    if _CONNECTING not in details:
        return ""
    return _meaning(details)


def explain_socket(details: str) -> str:
    """Say the same of a connection without gRPC that ended before the peer said a word.

    Args:
        details: the error's text, with OpenSSL's in it where that has a part.
    """
    return _meaning(details) or _CLOSED


def _meaning(details: str) -> str:
    return next((meaning for piece, meaning in _MEANINGS if piece in details), "")
