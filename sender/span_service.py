"""The part of the sender's service that looks passages up."""

from __future__ import annotations

import asyncio

import grpc

from kvferry.core import rpc, wire
from kvferry.core.metrics import SenderMetrics
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.proto.v1 import sender_service_pb2_grpc as pb_grpc
from kvferry.sender.documents import DocumentStore


class SpanServicer(pb_grpc.SenderServiceServicer):
    """FetchSpans."""

    def __init__(self, documents: DocumentStore, metrics: SenderMetrics) -> None:
        self._documents = documents
        self._metrics = metrics

    async def FetchSpans(  # noqa: N802  (the name is gRPC's)
        self,
        request: pb.FetchSpansRequest,
        context: grpc.aio.ServicerContext[pb.FetchSpansRequest, pb.FetchSpansResponse],
    ) -> pb.FetchSpansResponse:
        """Look passages up."""
        self._metrics.received("lookups", request.ByteSize())
        async with rpc.reporting(context):
            spans = [(span.start, span.end) for span in request.spans]
            document = wire.check_digest(request.document_digest, "document_digest")
            texts = await asyncio.to_thread(self._documents.spans, document, spans, request.max_bytes)
        response = pb.FetchSpansResponse(texts=texts)
        self._metrics.sent("lookups", response.ByteSize())
        return response
