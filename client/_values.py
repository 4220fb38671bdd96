"""What the SDK hands out. Plain values: no protobuf type is among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from kvferry.core.ledger import Ledger, SenderAccount


@dataclass(frozen=True)
class Progress:
    """How far a stage of a send is.

    Attributes:
        stage: "tokenise", "prefill", "method", "encode", "offer", "transfer" or "commit".
        done, total: tokens or bytes, by the stage.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Piece:
    """A generated token and the text it completes.

    Attributes:
        token_id: None for text that was held back until the end.
        text: empty while a character is incomplete.
    """

    token_id: int | None
    text: str


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: the whole of it.
        token_ids: as the receiver's model chose them, the end of turn left out.
        finish_reason: "stop" (the model ended its turn) or "length" (``max_tokens`` reached).
        ledger: what the answer cost.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    ledger: Ledger


@dataclass(frozen=True)
class Artifact:
    """An artifact that a receiver holds, or has put aside.

    Attributes:
        artifact_id: 64 hexadecimal digits.
        method: id of the method that made it, such as "B1"; empty when its manifest cannot be read any more.
        form: text, evidence, references or kv; likewise.
        payload_bytes: size of the payload.
        prefix_tokens: tokens of the prefix; 0 for a form that has no tokens of its own.
        committed_at: seconds since the Unix epoch, by the receiver's clock.
        used_at: when a question last used it; likewise.
        quarantined: why it was put aside; None for one that can be asked.
    """

    artifact_id: str
    method: str
    form: str
    payload_bytes: int
    prefix_tokens: int
    committed_at: float
    used_at: float = 0.0
    quarantined: str | None = None


@dataclass(frozen=True, kw_only=True)
class SendResult:
    """What a send came to.

    Attributes:
        artifact_id: 64 hexadecimal digits.
        method: id of the method that made the artifact.
        form: text, evidence, references or kv.
        receiver: where the sender delivered it, as the sender addresses it.
        document_digest: BLAKE3 of the document's UTF-8 bytes, 64 hexadecimal digits.
        document_bytes, document_characters: size of the document in UTF-8 bytes and in code points.
        manifest_bytes, payload_bytes: the artifact's own size.
        moved_bytes: chunk bytes that this send moved; 0 when the receiver had them all.
        wire_bytes: everything that crossed for the artifact over all sends; 0 when it was already committed.
        reused: the artifact was made by an earlier send, and nothing was read again.
        account: what it cost the sender to make it, and what it weighed, if it chose the method.
        fallback_reason: why this was sent in place of the cache that was asked for; None when it was not.
    """

    artifact_id: str
    method: str
    form: str
    receiver: str
    document_digest: str
    document_bytes: int
    document_characters: int
    manifest_bytes: int
    payload_bytes: int
    moved_bytes: int
    wire_bytes: int
    reused: bool
    account: SenderAccount
    fallback_reason: str | None = None


class AskOptions(TypedDict, total=False):
    """Options of a question, see ``Client.ask``."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    fallback: bool
