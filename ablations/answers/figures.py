"""What one answer from a method's message says, and what it cost."""

from __future__ import annotations

import msgspec

from kvferry.ablations.harness.records import Record
from kvferry.core.errors import StoreError
from kvferry.core.manifest import OUTCOME, Scalar


class AnswerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished cell found. Beside these a record's figures hold the ledger's ``outcome``, as ``outcome.*``.

    Attributes:
        artifact: id of what the answer was given from, in hexadecimal.
        name, label, aware, form: of the method.
        prediction: the answer. Whether it is right is judged when a table is made.
        finish_reason: "stop" or "length".
        fallback: what was done instead of what was asked for, "" for nothing.
        document_bytes: of the text, UTF-8.
        artifact_bytes: manifest, payload, repeats and protocol messages of the artifact that the answer is from.
        manifest_bytes, payload_bytes, control_bytes: of these.
        lookups, lookup_bytes, lookup_ms: passages fetched for this answer.
        wire_bytes: artifact and look-ups.
        sender_prefill_tokens, receiver_prefill_tokens, reused_tokens, generated_tokens: see docs/ledger.md.
        sender_prefill_ms: reading, when the artifact was made; 0 when what was read for an earlier one was at hand.
        sender_ms: method and encoding.
        transfer_ms, total_ms: see docs/ledger.md.
        first_token_ms: from the accepted question to the first text; None for an empty answer.
        first_ask: whether no question had been asked of the artifact since it crossed.
    """

    artifact: str
    name: str
    label: str
    aware: bool
    form: str
    prediction: str
    finish_reason: str
    fallback: str
    document_bytes: int
    artifact_bytes: int
    manifest_bytes: int
    payload_bytes: int
    control_bytes: int
    lookups: int
    lookup_bytes: int
    lookup_ms: float
    wire_bytes: int
    sender_prefill_tokens: int
    receiver_prefill_tokens: int
    reused_tokens: int
    generated_tokens: int
    sender_prefill_ms: float
    sender_ms: float
    transfer_ms: float
    total_ms: float
    first_token_ms: float | None
    first_ask: bool


def of_record(record: Record) -> AnswerFigures:
    """Return the figures of a finished record.

    Raises:
        StoreError: when they are another experiment's.
    """
    try:
        return msgspec.convert(record.figures, AnswerFigures)
    except msgspec.ValidationError as error:
        raise StoreError(f"record {record.id}: {error}", record=record.id) from error


def outcome(record: Record) -> dict[str, Scalar]:
    """Return what became of the method's rule, by names without their beginning."""
    return {name.removeprefix(OUTCOME): value for name, value in record.figures.items() if name.startswith(OUTCOME)}
