"""Carrying an artifact over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from kvferry.core import channel, put_messages, request_ids, rpc, wire
from kvferry.core.addresses import Address
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender.carrier import Chunks, Counting, Offered, Receipt
from kvferry.sender.put_call import acknowledgements


@contextlib.asynccontextmanager
async def connected(
    receiver: Address, security: PeerSecurity, seconds: float, metrics: Counting
) -> AsyncIterator[GrpcCarrier]:
    """Open a channel for the block; gRPC connects at the first call.

    Args:
        receiver: where to.
        security: how.
        seconds: how long a call without payload, or one acknowledgement, may take.
        metrics: of the sender.

    Raises:
        ConfigError: when a file of ``security`` cannot be used, or the token would cross a network in the clear.
    """
    async with channel.open_async(receiver, security) as peer:
        yield GrpcCarrier(pb_grpc.ReceiverServiceStub(peer), receiver, security, seconds, metrics)


class GrpcCarrier:
    """The three calls of a transfer; see ``Carrier``."""

    def __init__(
        self,
        stub: pb_grpc.ReceiverServiceAsyncStub,
        receiver: Address,
        security: PeerSecurity,
        seconds: float,
        metrics: Counting,
    ) -> None:
        self._stub = stub
        self._receiver = receiver
        self._security = security
        self._seconds = seconds
        self._metrics = metrics

    async def offer(self, manifest: bytes) -> Offered:
        """Call Offer."""
        request = pb.OfferRequest(manifest=manifest)
        self._metrics.sent("manifest", len(manifest))
        self._metrics.sent("control", request.ByteSize() - len(manifest))
        call = self._stub.Offer(request, timeout=self._seconds, metadata=request_ids.outgoing())
        response = await rpc.answer(call, str(self._receiver), "Offer")
        self._metrics.received("control", response.ByteSize())
        return Offered(
            response.artifact_id,
            response.verdict.accepted,
            wire.verdict_from_message(response.verdict),
            wire.ranges_from_message(response.missing),
            response.committed,
        )

    async def put(self, chunks: Chunks, wanted: list[int]) -> AsyncGenerator[int, None]:
        """Call Put."""
        responses = acknowledgements(self._receiver, self._security, self._messages(chunks, wanted), self._seconds)
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._metrics.received("control", response.ByteSize())
                yield response.index

    async def commit(self, artifact_id: bytes, account_json: str, seconds: float) -> Receipt:
        """Call Commit."""
        request = pb.CommitRequest(artifact_id=artifact_id, account_json=account_json)
        self._metrics.sent("control", request.ByteSize())
        call = self._stub.Commit(request, timeout=seconds, metadata=request_ids.outgoing())
        response = await rpc.answer(call, str(self._receiver), "Commit")
        self._metrics.received("control", response.ByteSize())
        receipt = response.receipt
        return Receipt(receipt.payload_digest, receipt.received_bytes, receipt.control_bytes)

    def _messages(self, chunks: Chunks, wanted: list[int]) -> Iterator[bytes]:
        for index, data in chunks.read(wanted):
            message = put_messages.encode(chunks.artifact_id, index, data)
            self._metrics.sent("control", len(message) - len(data))
            yield message
