"""Offer, Put and Commit over gRPC: a thin layer between messages and the intake."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from kvferry.core import auth, put_messages, rpc, wire
from kvferry.core.errors import TransferError
from kvferry.core.logs import logger
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.put_messages import PutMessage
from kvferry.core.stored import Stored
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.receiver.intake import Intake

SERVICE: str = pb.DESCRIPTOR.services_by_name["ReceiverService"].full_name
_PUT_IDLE_SECONDS = 60.0


def register(servicer: pb_grpc.ReceiverServiceServicer, server: grpc.aio.Server) -> None:
    """Add a receiver's service to a server, with the quick reader of chunks in place of the generated one."""
    pb_grpc.add_ReceiverServiceServicer_to_server(servicer, server)
    put = grpc.stream_stream_rpc_method_handler(
        servicer.Put,
        request_deserializer=put_messages.decode,
        response_serializer=pb.PutResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE, {"Put": put})


class IntakeServicer(pb_grpc.ReceiverServiceServicer):
    """The calls that take artifacts in."""

    def __init__(self, intake: Intake, metrics: ReceiverMetrics) -> None:
        self._intake = intake
        self._metrics = metrics
        self._log = logger("receiver")

    async def Offer(  # noqa: N802
        self, request: pb.OfferRequest, context: grpc.aio.ServicerContext[pb.OfferRequest, pb.OfferResponse]
    ) -> pb.OfferResponse:
        """Judge a manifest."""
        async with rpc.reporting(context):
            self._metrics.received("manifest", len(request.manifest))
            self._metrics.received("control", request.ByteSize() - len(request.manifest))
            judgement = await asyncio.to_thread(self._intake.offer, request.manifest, auth.caller())
            response = pb.OfferResponse(
                artifact_id=judgement.artifact_id,
                verdict=wire.verdict_to_message(judgement.verdict),
                missing=wire.ranges_to_message(judgement.missing),
                committed=judgement.committed,
            )
            self._metrics.sent("control", response.ByteSize())
            if judgement.verdict.accepted and not judgement.committed:
                control = request.ByteSize() - len(request.manifest) + response.ByteSize()
                await asyncio.to_thread(self._intake.charge_offer, judgement.artifact_id, control)
        return response

    async def Put(  # type: ignore[override]  # noqa: N802  (``register`` puts another class in the message's place)
        self,
        request_iterator: AsyncIterator[PutMessage],
        context: grpc.aio.ServicerContext[PutMessage, pb.PutResponse],
    ) -> AsyncIterator[pb.PutResponse]:
        """Take chunks in and acknowledge each one once it is written."""
        async with rpc.reporting(context), contextlib.aclosing(_ahead(request_iterator)) as messages:
            async for message in messages:
                artifact_id = wire.check_digest(message.artifact_id, "artifact_id")
                response = pb.PutResponse(index=message.index)
                sent = response.ByteSize()
                self._metrics.received("control", message.control_bytes)
                control = message.control_bytes + sent
                await asyncio.to_thread(self._intake.put, artifact_id, message.index, message.data, control)
                self._metrics.sent("control", sent)
                yield response

    async def Commit(  # noqa: N802
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext[pb.CommitRequest, pb.CommitResponse]
    ) -> pb.CommitResponse:
        """Verify and publish an artifact."""
        async with rpc.reporting(context):
            self._metrics.received("control", request.ByteSize())
            artifact_id = wire.check_digest(request.artifact_id, "artifact_id")
            stored = await asyncio.to_thread(self._intake.commit, artifact_id, request.account_json, request.ByteSize())
        response = pb.CommitResponse(receipt=_receipt(stored))
        self._metrics.sent("control", response.ByteSize())
        return response


async def _ahead(messages: AsyncIterator[PutMessage]) -> AsyncGenerator[PutMessage, None]:
    """Yield messages; the next one is on its way in while the last one is worked on."""
    coming = asyncio.create_task(_next(messages))
    try:
        while (message := await coming) is not None:
            coming = asyncio.create_task(_next(messages))
            yield message
    finally:
        coming.cancel()
        await asyncio.wait([coming])
        if not coming.cancelled():
            # Nobody asks for it any more; asyncio would complain that its error was not looked at.
            coming.exception()


async def _next(messages: AsyncIterator[PutMessage]) -> PutMessage | None:
    try:
        async with asyncio.timeout(_PUT_IDLE_SECONDS):
            return await anext(messages, None)
    except TimeoutError as error:
        raise TransferError(f"chunks: nothing came for {_PUT_IDLE_SECONDS:g} s") from error


def _receipt(stored: Stored) -> pb.Receipt:
    traffic = stored.record.traffic
    return pb.Receipt(
        artifact_id=stored.artifact_id,
        payload_bytes=stored.manifest.payload.length,
        payload_digest=stored.manifest.payload.digest,
        verify_ms=stored.record.verify_ms,
        received_bytes=traffic.received_bytes if traffic else 0,
        control_bytes=traffic.control_bytes if traffic else 0,
    )
