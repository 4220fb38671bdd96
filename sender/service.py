"""The sender's gRPC service: a thin layer between messages and the sender's own parts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial

import grpc

from kvferry.core import addresses, limits, rpc, security, wire
from kvferry.core.digests import Hasher
from kvferry.core.errors import InvalidRequestError, TooLargeError, TransferError, UnknownMethodError
from kvferry.core.manifest import Scalar
from kvferry.core.threads import off_loop
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.sender import registry
from kvferry.sender.auto import choosing
from kvferry.sender.auto.choosing import Choosing
from kvferry.sender.parts import SenderParts
from kvferry.sender.reading import Reading, asked
from kvferry.sender.sending import Send, Sending
from kvferry.sender.span_service import SpanServicer

Steps = Callable[[Send], AsyncGenerator[pb.SendResponse, None]]
_UPLOAD_IDLE_SECONDS = 60.0


class SenderServicer(SpanServicer):
    """Describe, Send, FetchSpans."""

    def __init__(self, parts: SenderParts) -> None:
        super().__init__(parts.documents, parts.metrics)
        self._parts = parts
        self._sending = Sending(parts)
        self._choosing = Choosing(parts, self._sending)

    async def Describe(  # noqa: N802  (the name is gRPC's)
        self,
        request: pb.SenderServiceDescribeRequest,
        context: grpc.aio.ServicerContext[pb.SenderServiceDescribeRequest, pb.SenderServiceDescribeResponse],
    ) -> pb.SenderServiceDescribeResponse:
        """Say what this sender runs and which methods it knows."""
        model = self._parts.model
        speed = model.speed.prefill_tokens_per_second
        return pb.SenderServiceDescribeResponse(
            node=wire.node_to_message("sender", model.profile, self._parts.versions, speed),
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

    async def _send(self, start: pb.SendStart, text: str) -> AsyncGenerator[pb.SendResponse, None]:
        parts = self._parts
        given = wire.parameters_from_message(start.parameters)
        receiver = addresses.parse_receiver(start.receiver or parts.config.receiver, "receiver")
        steps = self._chosen(given, receiver) if choosing.is_meant(start.method) else self._asked_for(start, given)
        configured = addresses.parse_receiver(parts.config.receiver, "receiver")
        # Read anew for every send, so that a token can be replaced while the daemon runs.
        reached = security.for_peer(parts.config, receiver, configured)
        system = start.system if start.HasField("system") else DEFAULT_SYSTEM
        reading = partial(Reading, parts.model, parts.residency, text, system, start.question or None)
        async with (
            off_loop(parts.documents.kept(text.encode("utf-8"))),
            contextlib.aclosing(steps(Send(reading, receiver, reached))) as responses,
        ):
            async for response in responses:
                yield response

    def _chosen(self, given: Mapping[str, Scalar], receiver: addresses.Address) -> Steps:
        quality = choosing.check(given, receiver)
        return lambda send: self._choosing.run(send, quality)

    def _asked_for(self, start: pb.SendStart, given: Mapping[str, Scalar]) -> Steps:
        try:
            method = registry.find(start.method)
        except UnknownMethodError as error:
            raise UnknownMethodError(f"{error.message}, or auto", **error.fields) from error
        parameters = registry.check_parameters(method, given)
        if method.info.aware:
            asked(start.question, method.info.id)
        fallback = start.allow_fallback
        return lambda send: self._sending.asked_for(send, method, parameters, allow_fallback=fallback)

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
