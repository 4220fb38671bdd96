"""Offer, Put and Commit over gRPC: a thin layer between messages and the intake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from kvferry.core import auth, rpc, wire
from kvferry.core.errors import TransferError
from kvferry.core.logs import logger
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.stored import Stored
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.receiver.intake import Intake

_PUT_IDLE_SECONDS = 60.0


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
            if not judgement.verdict.accepted:
                self._log.warning(
                    "refused", artifact=judgement.artifact_id.hex(), verdict=str(judgement.verdict)[:1000]
                )
            response = pb.OfferResponse(
                artifact_id=judgement.artifact_id,
                verdict=wire.verdict_to_message(judgement.verdict),
                missing=wire.ranges_to_message(judgement.missing),
                committed=judgement.committed,
            )
            self._metrics.sent("control", response.ByteSize())
            if judgement.verdict.accepted and not judgement.committed:
                control = request.ByteSize() - len(request.manifest) + response.ByteSize()
                await asyncio.to_thread(
                    self._intake.charge_offer, judgement.artifact_id, len(request.manifest), control
                )
        return response

    async def Put(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.PutRequest],
        context: grpc.aio.ServicerContext[pb.PutRequest, pb.PutResponse],
    ) -> AsyncIterator[pb.PutResponse]:
        """Take chunks in and acknowledge each one once it is written."""
        async with rpc.reporting(context):
            while True:
                request = await _next(request_iterator)
                if request is None:
                    return
                artifact_id = wire.check_digest(request.artifact_id, "artifact_id")
                response = pb.PutResponse(index=request.index)
                received, sent = request.ByteSize() - len(request.data), response.ByteSize()
                self._metrics.received("control", received)
                await asyncio.to_thread(self._intake.put, artifact_id, request.index, request.data, received + sent)
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
            self._log.info("committed", artifact=artifact_id.hex(), method=stored.manifest.method.id)
        response = pb.CommitResponse(receipt=_receipt(stored))
        self._metrics.sent("control", response.ByteSize())
        return response


async def _next(requests: AsyncIterator[pb.PutRequest]) -> pb.PutRequest | None:
    try:
        async with asyncio.timeout(_PUT_IDLE_SECONDS):
            return await anext(requests, None)
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
