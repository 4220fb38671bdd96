"""Reading responses, for both clients. A stream is complete only with its terminal message."""

from __future__ import annotations

import msgspec

from kvferry.client._documents import Document
from kvferry.client._values import Answer, Artifact, Piece, Progress, SendResult
from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.errors import PeerError, TransferError
from kvferry.core.ledger import account_from_json, ledger_from_json
from kvferry.proto.v1 import receiver_service_pb2, sender_service_pb2


class AnswerReader:
    """Follows one answer's messages, which end with the answer."""

    def __init__(self, peer: str, request: receiver_service_pb2.AskRequest) -> None:
        self._peer = peer
        self._request = request
        self._seen: list[int] = []
        self._answer: Answer | None = None

    def take(self, message: receiver_service_pb2.AskResponse) -> Piece | None:
        """Take the next message in; a piece is returned.

        Raises:
            TransferError: when the terminal message does not fit what came before, or something comes after it.
            PeerError: when it cannot be read.
        """
        kind = message.WhichOneof("event")
        if kind is not None and self._answer is not None:
            raise TransferError(f"{self._peer}: the answer went on after its end")
        if kind == "end":
            self._answer = self._finish(message.end)
        if kind != "piece":
            return None
        token_id = message.piece.token_id if message.piece.HasField("token_id") else None
        if token_id is not None:
            self._seen.append(token_id)
        return Piece(token_id, message.piece.text)

    def check_complete(self) -> None:
        """Check, at the end of the stream, that the terminal message has come.

        Raises:
            TransferError: when it has not.
        """
        _ = self.answer

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            TransferError: when the terminal message has not come.
        """
        if self._answer is None:
            raise TransferError(
                f"{self._peer}: the answer is not complete: {len(self._seen)} tokens came, its end did not",
                peer=self._peer,
                tokens=len(self._seen),
            )
        return self._answer

    def _finish(self, end: receiver_service_pb2.AnswerEnd) -> Answer:
        count = len(end.token_ids)
        if list(end.token_ids) != self._seen:
            raise TransferError(
                f"{self._peer}: the answer's {count} tokens are not the {len(self._seen)} that were streamed",
                peer=self._peer,
                expected=count,
                value=len(self._seen),
            )
        try:
            ledger = ledger_from_json(end.ledger_json)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{self._peer}: the answer's ledger cannot be read ({error})", peer=self._peer) from error
        asked = self._request.artifact_id.hex()
        if ledger.artifact_id != asked:
            raise TransferError(
                f"{self._peer}: asked about artifact {asked[:16]}…, answered about {ledger.artifact_id[:16]}…",
                peer=self._peer,
                expected=asked,
                value=ledger.artifact_id,
            )
        return Answer(end.text, tuple(end.token_ids), end.finish_reason, ledger)


class SendReader:
    """Follows one send's messages, which end with the result."""

    def __init__(self, peer: str, document: Document) -> None:
        self._peer = peer
        self._document = document
        self._result: SendResult | None = None

    def take(self, message: sender_service_pb2.SendResponse) -> Progress | None:
        """Take the next message in; progress is returned.

        Raises:
            TransferError: when something comes after the terminal message.
            PeerError: when the message cannot be read.
        """
        kind = message.WhichOneof("event")
        if kind is not None and self._result is not None:
            raise TransferError(f"{self._peer}: the send went on after its end")
        if kind == "end":
            self._result = self._finish(message.end)
        if kind != "progress":
            return None
        return Progress(message.progress.stage, message.progress.done, message.progress.total)

    @property
    def result(self) -> SendResult:
        """What the send came to.

        Raises:
            TransferError: when the terminal message has not come.
        """
        if self._result is None:
            raise TransferError(f"{self._peer}: the send stopped before its end", peer=self._peer)
        return self._result

    def _finish(self, end: sender_service_pb2.SendEnd) -> SendResult:
        try:
            account = account_from_json(end.account_json)
        except msgspec.MsgspecError as error:
            raise PeerError(f"{self._peer}: the send's account cannot be read ({error})", peer=self._peer) from error
        return SendResult(
            artifact_id=_hexadecimal(end.artifact_id, self._peer),
            method=end.method,
            form=end.form,
            receiver=end.receiver,
            document_digest=self._document.digest.hex(),
            document_bytes=len(self._document.data),
            document_characters=self._document.characters,
            manifest_bytes=end.manifest_bytes,
            payload_bytes=end.payload_bytes,
            moved_bytes=end.moved_bytes,
            wire_bytes=end.wire_bytes,
            reused=end.reused,
            account=account,
            fallback_reason=end.fallback_reason or None,
        )


def artifacts(response: receiver_service_pb2.ListResponse, peer: str) -> list[Artifact]:
    """Return what a receiver holds and what it has put aside.

    Raises:
        PeerError: when an id is not a digest.
    """
    return [
        Artifact(
            _hexadecimal(item.artifact_id, peer),
            item.method,
            item.form,
            item.payload_bytes,
            item.prefix_tokens,
            item.committed_at,
            item.used_at,
            item.quarantined or None,
        )
        for item in response.artifacts
    ]


def texts(response: sender_service_pb2.FetchSpansResponse, asked: int, peer: str) -> list[str]:
    """Return the passages of a look-up.

    Raises:
        TransferError: when there are not as many as were asked for.
    """
    if len(response.texts) != asked:
        raise TransferError(
            f"{peer}: {len(response.texts)} passages came, {asked} were asked for",
            peer=peer,
            value=len(response.texts),
            expected=asked,
        )
    return list(response.texts)


def _hexadecimal(artifact_id: bytes, peer: str) -> str:
    if len(artifact_id) != DIGEST_BYTES:
        raise PeerError(
            f"{peer}: an artifact id of {len(artifact_id)} bytes came, it has {DIGEST_BYTES}",
            peer=peer,
            value=len(artifact_id),
            expected=DIGEST_BYTES,
        )
    return artifact_id.hex()
