"""The sender's gRPC service: a thin layer between messages and the sender's own parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import msgspec

from kvferry.core import addresses, limits, rpc, security, verification, wire
from kvferry.core.config import SenderConfig
from kvferry.core.digests import Hasher
from kvferry.core.errors import ContainerError, InvalidRequestError, RefusedError, TooLargeError, TransferError
from kvferry.core.ledger import SenderAccount, to_json
from kvferry.core.logs import logger
from kvferry.core.metrics import SenderMetrics
from kvferry.core.progress import Progress
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.core.threads import off_loop
from kvferry.core.tls import PeerSecurity
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.engine.worker import Worker
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.proto.v1 import sender_service_pb2_grpc as pb_grpc
from kvferry.sender import registry
from kvferry.sender.artifacts import Artifact, ArtifactMaker
from kvferry.sender.documents import DocumentStore
from kvferry.sender.method import Method, NoParameters
from kvferry.sender.reading import Reading, asked
from kvferry.sender.registry import FALLBACK_METHOD
from kvferry.sender.transfer import Transfer

_UPLOAD_IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class SenderParts:
    """What the service works with."""

    config: SenderConfig
    model: LoadedModel
    store: ArtifactStore
    maker: ArtifactMaker
    documents: DocumentStore
    residency: Residency
    worker: Worker
    versions: dict[str, str]
    metrics: SenderMetrics


@dataclass
class _Send:
    """One request on its way. ``replaces`` and ``fallback_reason`` are set once a cache was refused."""

    reading: Reading
    receiver: addresses.Address
    security: PeerSecurity
    replaces: str = ""
    fallback_reason: str = ""


class SenderServicer(pb_grpc.SenderServiceServicer):
    """Describe, Send, FetchSpans."""

    def __init__(self, parts: SenderParts) -> None:
        self._parts = parts
        self._log = logger("sender")

    async def Describe(  # noqa: N802  (the name is gRPC's)
        self,
        request: pb.SenderServiceDescribeRequest,
        context: grpc.aio.ServicerContext[pb.SenderServiceDescribeRequest, pb.SenderServiceDescribeResponse],
    ) -> pb.SenderServiceDescribeResponse:
        """Say what this sender runs and which methods it knows."""
        return pb.SenderServiceDescribeResponse(
            node=wire.node_to_message("sender", self._parts.model.profile, self._parts.versions),
            methods=[wire.method_to_message(method.info) for method in registry.METHODS],
        )

    async def Send(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.SendRequest],
        context: grpc.aio.ServicerContext[pb.SendRequest, pb.SendResponse],
    ) -> AsyncIterator[pb.SendResponse]:
        """Take a document in, make the artifact, deliver it."""
        async with rpc.reporting(context):
            start, text = await self._receive_document(request_iterator)
            async with contextlib.aclosing(self._send(start, text)) as events:
                async for event in events:
                    yield event

    async def FetchSpans(  # noqa: N802
        self,
        request: pb.FetchSpansRequest,
        context: grpc.aio.ServicerContext[pb.FetchSpansRequest, pb.FetchSpansResponse],
    ) -> pb.FetchSpansResponse:
        """Look passages up."""
        async with rpc.reporting(context):
            spans = [(span.start, span.end) for span in request.spans]
            document = wire.check_digest(request.document_digest, "document_digest")
            texts = await asyncio.to_thread(self._parts.documents.spans, document, spans)
            self._parts.metrics.sent("lookups", sum(len(text.encode("utf-8")) for text in texts))
        return pb.FetchSpansResponse(texts=texts)

    async def _send(self, start: pb.SendStart, text: str) -> AsyncGenerator[pb.SendResponse, None]:
        parts = self._parts
        method = registry.find(start.method)
        parameters = registry.check_parameters(method, wire.parameters_from_message(start.parameters))
        receiver = addresses.parse_receiver(start.receiver or parts.config.receiver, "receiver")
        configured = addresses.parse_receiver(parts.config.receiver, "receiver")
        # Read anew for every send, so that a token can be replaced while the daemon runs.
        reached = security.for_peer(parts.config, receiver, configured)
        if method.info.aware:
            asked(start.question, method.info.id)
        await asyncio.to_thread(parts.documents.keep, text.encode("utf-8"))
        system = start.system if start.HasField("system") else DEFAULT_SYSTEM
        reading = partial(Reading, parts.model, parts.residency, text, system, start.question or None)
        send = _Send(reading(), receiver, reached)
        try:
            async with contextlib.aclosing(self._carry(send, method, parameters)) as steps:
                async for progress in steps:
                    yield progress
        except RefusedError as error:
            if not start.allow_fallback or method.info.form == FALLBACK_METHOD.info.form:
                raise
            self._log.warning("fallback", method=method.info.id, receiver=str(receiver), reason=error.message)
            send.replaces, send.fallback_reason = method.info.id, error.message
            # What the refused cache cost is not the text's.
            send.reading = reading()
            async with contextlib.aclosing(self._carry(send, FALLBACK_METHOD, NoParameters())) as steps:
                async for progress in steps:
                    yield progress

    async def _carry(
        self, send: _Send, method: Method[Any], parameters: msgspec.Struct
    ) -> AsyncGenerator[pb.SendResponse, None]:
        """Make an artifact and deliver it; the last response is the end of the send."""
        parts = self._parts
        stream = parts.worker.stream(parts.maker.make(method, send.reading, parameters, send.replaces))
        try:
            async for progress in stream:
                yield _progress(progress)
        finally:
            await stream.aclose()
        artifact = stream.result
        if artifact is None:
            raise TransferError("send: stopped before the artifact was made")
        if not artifact.reused:
            parts.metrics.made(artifact.account)
        account = msgspec.structs.replace(artifact.account, fallback_reason=send.fallback_reason or None)
        transfer = Transfer(
            artifact.stored, account, send.receiver, parts.config.rpc_seconds, parts.metrics, security=send.security
        )
        async with off_loop(parts.store.pinned(artifact.stored.artifact_id)):
            try:
                async with contextlib.aclosing(transfer.run()) as steps:
                    async for progress in steps:
                        yield _progress(progress)
            except ContainerError:
                await asyncio.to_thread(self._put_aside_if_damaged, artifact.stored)
                raise
        delivery = transfer.delivery
        parts.metrics.delivered(method.info.id, delivery.transfer_ms if delivery.traffic else None)
        self._log.info(
            "sent",
            artifact=artifact.stored.artifact_id.hex(),
            method=method.info.id,
            receiver=str(send.receiver),
            payload_bytes=artifact.stored.manifest.payload.length,
            moved_bytes=delivery.moved_bytes,
            reused=artifact.reused,
        )
        yield pb.SendResponse(end=_end(artifact, account, transfer, send))

    def _put_aside_if_damaged(self, stored: Stored) -> None:
        """Look whether it is our own copy that went bad; then the next send makes the artifact anew."""
        found = next(verification.damage(stored.manifest, stored.plan, stored), None)
        if found is not None:
            self._log.error("quarantined", artifact=stored.artifact_id.hex(), reason=found.message)
            self._parts.store.quarantine(stored.artifact_id, found.message)

    async def _receive_document(self, requests: AsyncIterator[pb.SendRequest]) -> tuple[pb.SendStart, str]:
        first = await _next(requests)
        if first is None or first.WhichOneof("part") != "start":
            raise InvalidRequestError("start: the first message of Send must carry it", field="start")
        start = first.start
        limit = self._parts.config.max_document_bytes
        if start.text_bytes > limit:
            raise TooLargeError(
                f"document: {start.text_bytes} bytes, the limit is {limit}", value=start.text_bytes, limit=limit
            )
        if len(start.question.encode()) > limits.MAX_QUESTION_BYTES:
            raise TooLargeError(f"question: over {limits.MAX_QUESTION_BYTES} bytes", limit=limits.MAX_QUESTION_BYTES)
        data = await _receive_text(requests, start.text_bytes)
        hasher = Hasher()
        hasher.update(data)
        if hasher.digest() != start.text_digest:
            raise TransferError(
                f"document: digest {hasher.digest().hex()[:16]}…, announced {start.text_digest.hex()[:16]}…",
                field="text_digest",
            )
        try:
            return start, data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"document: not UTF-8 at byte {error.start} (0x{data[error.start]:02x})",
                field="document",
                byte=error.start,
            ) from error


async def _receive_text(requests: AsyncIterator[pb.SendRequest], expected: int) -> bytes:
    data = bytearray()
    while True:
        request = await _next(requests)
        if request is None:
            break
        if request.WhichOneof("part") != "text":
            raise InvalidRequestError("text: every message of Send after the first must carry it", field="text")
        data += request.text
        if len(data) > expected:
            raise TransferError(f"document: more than the {expected} bytes that were announced", expected=expected)
    if len(data) != expected:
        raise TransferError(
            f"document: ended after {len(data)} of {expected} bytes", value=len(data), expected=expected
        )
    return bytes(data)


async def _next(requests: AsyncIterator[pb.SendRequest]) -> pb.SendRequest | None:
    try:
        async with asyncio.timeout(_UPLOAD_IDLE_SECONDS):
            return await anext(requests, None)
    except TimeoutError as error:
        raise TransferError(f"document: nothing came for {_UPLOAD_IDLE_SECONDS:g} s") from error


def _progress(progress: Progress) -> pb.SendResponse:
    return pb.SendResponse(progress=pb.SendProgress(stage=progress.stage, done=progress.done, total=progress.total))


def _end(artifact: Artifact, account: SenderAccount, transfer: Transfer, send: _Send) -> pb.SendEnd:
    stored, delivery = artifact.stored, transfer.delivery
    spent = msgspec.structs.replace(account, transfer_ms=delivery.transfer_ms)
    return pb.SendEnd(
        artifact_id=stored.artifact_id,
        method=stored.manifest.method.id,
        form=stored.manifest.form,
        receiver=str(send.receiver),
        account_json=to_json(spent),
        manifest_bytes=len(stored.encoded),
        payload_bytes=stored.manifest.payload.length,
        moved_bytes=delivery.moved_bytes,
        wire_bytes=delivery.traffic.wire_bytes if delivery.traffic else 0,
        reused=artifact.reused,
        fallback_reason=send.fallback_reason,
    )
