"""The error tree: everything that kvferry raises on purpose.

    KvferryError
    ├── ConfigError            a configuration file, environment variable or option is wrong
    ├── InvalidRequestError    a request names an impossible value
    │   └── UnknownMethodError
    ├── ManifestError          a manifest is malformed or not canonical
    ├── ContainerError         a payload is not what its manifest declares
    │   └── IntegrityError     a digest differs
    ├── RefusedError           the receiver's verdict is "refused"
    ├── TransferError          a transfer stopped before it was complete
    ├── StoreError             the artifact store cannot read or write
    │   └── QuarantinedError   an artifact was put aside because it could not be trusted
    ├── ParityError            a rebuilt cache does not give what the sender's gave
    ├── ModelError             a model cannot be loaded, fetched, converted or used
    ├── NotFoundError          no such artifact or document
    ├── TooLargeError          a size or count is over its limit
    │   └── ContextOverflowError
    ├── AuthenticationError    a token is missing, unknown, revoked or expired
    ├── QuotaError             a token's share of the store is used up
    ├── BusyError              too many calls are running
    ├── CancelledError         the caller gave up
    ├── LookUpError            passages that an answer needs cannot be had from the sender
    └── PeerError              the other daemon failed
        ├── UnavailableError   it cannot be reached
        └── DeadlineError      it did not answer in time

Each class has a ``code`` that is stable across versions and a gRPC ``status`` name; both ends rebuild the same class
from the code. ``fields`` holds the values behind the message, for programs.
"""

from __future__ import annotations

from typing import ClassVar

FieldValue = str | int | float | None
# A message is one line: what ends one is a space, and other control characters are spelt out.
_CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}
_ONE_LINE = _CONTROLS | dict.fromkeys(map(ord, "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"), " ")


class KvferryError(Exception):
    """Base of every error that kvferry raises on purpose.

    Attributes:
        message: one clear line for a person.
        fields: the names and values that the message speaks of.
        retryable: whether the same call may succeed later without a change.
    """

    code: ClassVar[str] = "ERROR"
    status: ClassVar[str] = "INTERNAL"
    retryable: bool = False

    def __init__(self, message: str, **fields: FieldValue) -> None:
        # A peer's words may stand in it, which must not write lines of their own in a log or move a terminal's cursor.
        self.message = message.translate(_ONE_LINE)
        super().__init__(self.message)
        self.fields: dict[str, FieldValue] = fields


class ConfigError(KvferryError):
    """Raised when a configuration file, an environment variable or an option is wrong."""

    code = "CONFIG"
    status = "INVALID_ARGUMENT"


class InvalidRequestError(KvferryError):
    """Raised when a request names an impossible value."""

    code = "INVALID_REQUEST"
    status = "INVALID_ARGUMENT"


class UnknownMethodError(InvalidRequestError):
    """Raised when a method id is not in the registry."""

    code = "UNKNOWN_METHOD"


class ManifestError(KvferryError):
    """Raised when manifest bytes are malformed, not canonical, or contradict themselves."""

    code = "MANIFEST"
    status = "INVALID_ARGUMENT"


class ContainerError(KvferryError):
    """Raised when payload bytes are not what the manifest declares."""

    code = "CONTAINER"
    status = "DATA_LOSS"


class IntegrityError(ContainerError):
    """Raised when a digest differs. The fields name the chunk or section and both digests."""

    code = "INTEGRITY"
    retryable = True


class RefusedError(KvferryError):
    """Raised when a receiver refuses an artifact. ``verdict_json`` in the fields holds every reason."""

    code = "REFUSED"
    status = "FAILED_PRECONDITION"


class TransferError(KvferryError):
    """Raised when a transfer stops before everything that was promised has arrived."""

    code = "TRANSFER"
    status = "ABORTED"
    retryable = True


class StoreError(KvferryError):
    """Raised when the artifact store cannot read or write."""

    code = "STORE"
    status = "INTERNAL"


class QuarantinedError(StoreError):
    """Raised when an artifact was put aside because it could not be trusted. The message says why."""

    code = "QUARANTINED"
    status = "FAILED_PRECONDITION"


class ParityError(KvferryError):
    """Raised when a rebuilt cache does not give what the sender's gave. The fields hold the figures."""

    code = "PARITY"
    status = "DATA_LOSS"


class ModelError(KvferryError):
    """Raised when a model cannot be loaded, fetched, converted or used."""

    code = "MODEL"
    status = "FAILED_PRECONDITION"


class NotFoundError(KvferryError):
    """Raised when an artifact or a document is not here."""

    code = "NOT_FOUND"
    status = "NOT_FOUND"


class TooLargeError(KvferryError):
    """Raised when a size or a count is over its limit. The fields give the value and the limit."""

    code = "TOO_LARGE"
    status = "RESOURCE_EXHAUSTED"


class ContextOverflowError(TooLargeError):
    """Raised when prompt and answer do not fit the model's context."""

    code = "CONTEXT_OVERFLOW"
    status = "INVALID_ARGUMENT"


class AuthenticationError(KvferryError):
    """Raised when a call shows no token, or one that the daemon does not take."""

    code = "AUTHENTICATION"
    status = "UNAUTHENTICATED"


class QuotaError(KvferryError):
    """Raised when a token's share of the store is used up. The fields give limit, what is used and what was asked."""

    code = "QUOTA"
    status = "RESOURCE_EXHAUSTED"


class BusyError(KvferryError):
    """Raised when as many calls are running as may. ``retry_after_ms`` in the fields says when to try again."""

    code = "BUSY"
    status = "RESOURCE_EXHAUSTED"
    retryable = True


class CancelledError(KvferryError):
    """Raised when the caller gave up and the work was stopped."""

    code = "CANCELLED"
    status = "CANCELLED"


class LookUpError(KvferryError):
    """Raised when the passages that a question needs cannot be had from the sender that read the document.

    ``references`` in the fields says what is missing, ``sender`` where it was looked for, and ``reason`` is the code of
    what went wrong there: where that may pass by itself, so may this.
    """

    code = "LOOK_UP"
    status = "UNAVAILABLE"

    def __init__(self, message: str, **fields: FieldValue) -> None:
        super().__init__(message, **fields)
        cause = error_classes().get(str(fields.get("reason")))
        self.retryable = cause is not None and cause.retryable


class PeerError(KvferryError):
    """Raised when the other daemon failed in a way that has no better name."""

    code = "PEER"
    status = "UNKNOWN"


class UnavailableError(PeerError):
    """Raised when the other daemon cannot be reached."""

    code = "UNAVAILABLE"
    status = "UNAVAILABLE"
    retryable = True


class DeadlineError(PeerError):
    """Raised when the other daemon did not answer in time."""

    code = "DEADLINE"
    status = "DEADLINE_EXCEEDED"
    retryable = True


def error_classes() -> dict[str, type[KvferryError]]:
    """Return every class of the tree by its stable code."""
    found: dict[str, type[KvferryError]] = {}
    pending: list[type[KvferryError]] = [KvferryError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found
