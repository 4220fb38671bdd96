"""The ledger: what one answer cost, in bytes, tokens, look-ups and milliseconds. docs/ledger.md explains each field."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.core import json_records
from kvferry.core.choice import AutoChoice
from kvferry.core.manifest import Scalar

# An account comes from another machine, and its numbers go into sums, ratios and metrics.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Duration = Annotated[float, Meta(ge=0, le=1e12)]


# Receivers of before these know no such names, and refuse an account that has them.
_LATER = ("tokenizer_bytes", "tokenizer_ms")


class SenderAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an artifact cost its sender. Travels with Commit.

    Attributes:
        prefill_tokens: tokens that the sender's model read when the artifact was made; 0 for text.
        dense_bf16_bytes: the document's dense bf16 cache: the yardstick of every ratio.
        prefill_ms, method_ms, encode_ms: spent when the artifact was made.
        transfer_ms: from Offer to the last acknowledged chunk, over every attempt, without the pauses between them.
        fallback_reason: why this was sent in place of the cache that was asked for.
        auto: what was weighed, where the sender chose the method.
        tokenizer_bytes, tokenizer_ms: asking the receiver for its tokenizer, where a budget counts with it.
    """

    prefill_tokens: Count
    dense_bf16_bytes: Count
    prefill_ms: Duration
    method_ms: Duration
    encode_ms: Duration
    transfer_ms: Duration
    fallback_reason: Annotated[str, Meta(max_length=65_536)] | None = None
    auto: AutoChoice | None = None
    tokenizer_bytes: Count = 0
    tokenizer_ms: Duration = 0.0


class Traffic(msgspec.Struct, frozen=True):
    """What crossed for an artifact, counted by the receiver over every attempt.

    Attributes:
        manifest_bytes, payload_bytes: the artifact's own size.
        received_bytes: chunk bytes that arrived, repeats and rejected ones included.
        control_bytes: protocol messages both ways, less manifest and chunk bytes; HTTP/2 framing is not counted.
    """

    manifest_bytes: int
    payload_bytes: int
    received_bytes: int
    control_bytes: int

    @property
    def resent_bytes(self) -> int:
        """Chunk bytes beyond the payload's own length."""
        return max(self.received_bytes - self.payload_bytes, 0)

    @property
    def wire_bytes(self) -> int:
        """Everything that crossed for this artifact."""
        return self.manifest_bytes + self.received_bytes + self.control_bytes


class Lookups(msgspec.Struct, frozen=True):
    """Passages fetched from the sender at answer time.

    Attributes:
        count: references whose passages came whole.
        calls: to the sender; a repeated one counts again.
        bytes: their messages, requests and responses.
        text_bytes: UTF-8 of the passages.
        ms: from the first request to the last response.
        hit: whether any reference has to do with the question; None where the artifact holds no references.
        missing: references whose passages could not be had.
        left_out: references that were to be followed and had no room among the bytes that one question may fetch.
    """

    count: int = 0
    calls: int = 0
    bytes: int = 0
    text_bytes: int = 0
    ms: float = 0.0
    hit: bool | None = None
    missing: tuple[str, ...] = ()
    left_out: int = 0


class Tokens(msgspec.Struct, frozen=True):
    """``reused`` prefix tokens came from a cache at hand; the receiver read ``receiver_prefill`` itself.

    ``material`` of these were sent in the document's place, by the receiver's own tokenizer.
    """

    sender_prefill: int
    receiver_prefill: int
    reused: int
    generated: int
    material: int


class Milliseconds(msgspec.Struct, frozen=True):
    """Durations. Up to ``transfer`` they were spent at the sender, the rest at the receiver.

    ``first_token`` runs from the moment the question is accepted to the first text; ``tokenizer`` is what the sender
    waited for the receiver's tokenizer.
    """

    prefill: float
    method: float
    encode: float
    transfer: float
    verify: float
    reconstruct: float
    receiver_prefill: float
    first_token: float | None
    total: float
    tokenizer: float = 0.0


class Rows(msgspec.Struct, frozen=True):
    """Cache rows kept per layer of the prefix."""

    min: int = 0
    mean: float = 0.0
    max: int = 0


class ParityFigures(msgspec.Struct, frozen=True):
    """What the parity probe found on the rebuilt cache: KL in nats, whether the first token agrees, what is allowed."""

    kl: float
    top1: bool
    bound: float


class AutoAccount(msgspec.Struct, frozen=True):
    """What a choice of the sender's led to one to expect, beside what happened.

    Attributes:
        expected_ms: until the first token of the first answer.
        happened_ms: the same of this answer: failed attempts, making the artifact if this send made it, transfer,
            verification, and from the question to the first text. None for an empty answer.
        choice: what was weighed.
    """

    expected_ms: float
    happened_ms: float | None
    choice: AutoChoice


class Ledger(msgspec.Struct, frozen=True):
    """The account of one answer. ``ratio`` is dense bf16 bytes over wire bytes: how many times less crossed.

    ``wire_bytes`` is what crossed for the artifact, and for this answer's look-ups.

    ``request_id`` is that of the question's call; the logs of the answer carry it.

    ``outcome`` is what became of the method on the document, as the manifest says it.

    ``tokenizer_bytes`` crossed when the sender asked for the receiver's tokenizer. They serve every artifact, and are
    not in ``wire_bytes``.
    """

    artifact_id: str
    method: str
    form: str
    verdict: str
    fallback: str | None
    fallback_reason: str | None
    manifest_bytes: int
    payload_bytes: int
    resent_bytes: int
    control_bytes: int
    lookups: Lookups
    wire_bytes: int
    dense_bf16_bytes: int
    ratio: float
    tokens: Tokens
    ms: Milliseconds
    rows: Rows
    parity: ParityFigures | None
    resident_bytes: int
    finish_reason: str
    prompt_version: int
    system: str
    runtime: dict[str, str]
    request_id: str = ""
    auto: AutoAccount | None = None
    outcome: dict[str, Scalar] = {}
    tokenizer_bytes: int = 0


def auto_account(account: SenderAccount, verify_ms: float, first_token_ms: float | None) -> AutoAccount | None:
    """Return what the sender's choice promised and what came of it; None where the sender did not choose."""
    choice = account.auto
    if choice is None:
        return None
    happened = None
    if first_token_ms is not None:
        made_ms = 0.0 if choice.reused else account.prefill_ms + account.method_ms + account.encode_ms
        lost_ms = sum(item.spent_ms for item in choice.passed_over)
        happened = lost_ms + made_ms + account.transfer_ms + verify_ms + first_token_ms
    return AutoAccount(choice.chosen.first_token_ms, happened, choice)


def to_json(record: Ledger | SenderAccount) -> str:
    """Return one line of JSON. An account is silent on a tokenizer that was not asked for."""
    if not isinstance(record, SenderAccount):
        return msgspec.json.encode(record).decode("utf-8")
    said = {name: value for name, value in msgspec.structs.asdict(record).items() if value or name not in _LATER}
    return msgspec.json.encode(said).decode("utf-8")


def ledger_from_json(text: str) -> Ledger:
    """Parse a ledger line.

    Raises:
        msgspec.DecodeError: when it is no JSON, a field is missing (ValidationError) or has the wrong type, or it nests
            too deeply.
    """
    return json_records.decode(text, Ledger)


def account_from_json(text: str) -> SenderAccount:
    """Parse a sender's account.

    Raises:
        msgspec.DecodeError: when it is no JSON, a field is missing or unknown (ValidationError) or has the wrong type,
            or it nests too deeply.
    """
    return json_records.decode(text, SenderAccount)
