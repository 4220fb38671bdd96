"""The receiver's gRPC service: a thin layer between messages and the receiver's own parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc

from kvferry.core import addresses, limits, request_ids, rpc, wire, zstd_frames
from kvferry.core import stored as stored_files
from kvferry.core.config import ReceiverConfig
from kvferry.core.errors import (
    InvalidRequestError,
    KvferryError,
    NotFoundError,
    QuarantinedError,
    StoreError,
    TooLargeError,
    TransferError,
)
from kvferry.core.ledger import Ledger, to_json
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.engine.generate import Sampling
from kvferry.engine.model import LoadedModel
from kvferry.engine.worker import Worker
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.receiver.answering import Account, Answerer
from kvferry.receiver.intake import Intake
from kvferry.receiver.intake_service import IntakeServicer
from kvferry.receiver.ledger_file import LedgerFile
from kvferry.receiver.looking_up import Question
from kvferry.receiver.preparing import Preparer
from kvferry.receiver.span_client import SpanClient

_TOKENIZER_LEVEL = 3


@dataclass(frozen=True)
class ReceiverParts:
    """What the service works with."""

    config: ReceiverConfig
    model: LoadedModel
    store: ArtifactStore
    intake: Intake
    answerer: Answerer
    ledger: LedgerFile
    worker: Worker
    versions: dict[str, str]
    metrics: ReceiverMetrics
    spans: SpanClient


class ReceiverServicer(IntakeServicer):
    """Describe, Offer, Put, Commit, Ask, Tokenizer, Measure, List, Drop."""

    def __init__(self, parts: ReceiverParts) -> None:
        super().__init__(parts.intake, parts.metrics)
        self._parts = parts
        self._preparer = Preparer(parts.store, parts.answerer, parts.worker, parts.metrics, parts.spans)

    async def Describe(  # noqa: N802  (the names are gRPC's)
        self,
        request: pb.ReceiverServiceDescribeRequest,
        context: grpc.aio.ServicerContext[pb.ReceiverServiceDescribeRequest, pb.ReceiverServiceDescribeResponse],
    ) -> pb.ReceiverServiceDescribeResponse:
        """Say what this receiver runs."""
        model = self._parts.model
        speed = model.speed.prefill_tokens_per_second
        node = wire.node_to_message("receiver", model.profile, self._parts.versions, speed)
        return pb.ReceiverServiceDescribeResponse(node=node)

    async def Ask(  # noqa: N802
        self, request: pb.AskRequest, context: grpc.aio.ServicerContext[pb.AskRequest, pb.AskResponse]
    ) -> AsyncIterator[pb.AskResponse]:
        """Answer a question."""
        accepted_at = time.perf_counter()
        async with rpc.reporting(context):
            sampling = self._check_question(request)
            artifact_id = wire.check_digest(request.artifact_id, "artifact_id")
            stored, preparation = await self._preparer.prepare(artifact_id, _question(request))
            account = Account(accepted_at, preparation, request_ids.current())
            stream = self._parts.worker.stream(self._parts.answerer.answer(stored, request.question, sampling, account))
            try:
                async for token in stream:
                    # What is no news gave other work its turn.
                    if token.is_news:
                        yield pb.AskResponse(piece=pb.AnswerPiece(token_id=token.token_id, text=token.text))
            finally:
                await stream.aclose()
            if stream.result is None:
                raise TransferError("answer: stopped before its end")
            answer, ledger = stream.result
            await asyncio.to_thread(self._note, ledger)
            self._metrics.answered(ledger)
            end = pb.AnswerEnd(
                text=answer.text,
                token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                ledger_json=to_json(ledger),
            )
            yield pb.AskResponse(end=end)

    async def Tokenizer(  # noqa: N802
        self, request: pb.TokenizerRequest, context: grpc.aio.ServicerContext[pb.TokenizerRequest, pb.TokenizerResponse]
    ) -> AsyncIterator[pb.TokenizerResponse]:
        """Bring the model's tokenizer, unless the caller has it."""
        self._metrics.received("tokenizer", request.ByteSize())
        content = self._parts.model.prompt.content
        frame = b""
        if content.vocab not in request.known:
            frame = await asyncio.to_thread(zstd_frames.compress, content.description, _TOKENIZER_LEVEL)
        first, rest = frame[: limits.MIB], range(limits.MIB, len(frame), limits.MIB)
        yield self._counted(pb.TokenizerResponse(digest=content.vocab, length=len(content.description), data=first))
        for start in rest:
            yield self._counted(pb.TokenizerResponse(data=frame[start : start + limits.MIB]))

    async def Measure(  # noqa: N802
        self, request: pb.MeasureRequest, context: grpc.aio.ServicerContext[pb.MeasureRequest, pb.MeasureResponse]
    ) -> pb.MeasureResponse:
        """Take bytes and throw them away: what a sender measures the link with."""
        response = pb.MeasureResponse(received=len(request.padding))
        self._metrics.received("measure", request.ByteSize())
        self._metrics.sent("measure", response.ByteSize())
        return response

    async def List(  # noqa: N802
        self, request: pb.ListRequest, context: grpc.aio.ServicerContext[pb.ListRequest, pb.ListResponse]
    ) -> pb.ListResponse:
        """List committed artifacts, and those that were put aside."""
        async with rpc.reporting(context):
            listed = await asyncio.to_thread(lambda: list(self._list()))
        return pb.ListResponse(artifacts=listed)

    async def Drop(  # noqa: N802
        self, request: pb.DropRequest, context: grpc.aio.ServicerContext[pb.DropRequest, pb.DropResponse]
    ) -> pb.DropResponse:
        """Remove an artifact."""
        async with rpc.reporting(context):
            artifact_id = wire.check_digest(request.artifact_id, "artifact_id")
            await asyncio.to_thread(self._parts.store.drop, artifact_id)
            await self._parts.worker.run(lambda: self._parts.answerer.forget(artifact_id))
            self._metrics.dropped()
            self._log.info("dropped", artifact=artifact_id.hex())
        return pb.DropResponse()

    def _counted(self, response: pb.TokenizerResponse) -> pb.TokenizerResponse:
        self._metrics.sent("tokenizer", response.ByteSize())
        return response

    def _note(self, ledger: Ledger) -> None:
        """Append to the ledger. The asker has the account as well, and shall not lose a whole answer to a full disk."""
        try:
            self._parts.ledger.append(ledger)
        except StoreError as error:
            self._log.error("answer not in the ledger", reason=error.message)

    def _list(self) -> Iterator[pb.ArtifactSummary]:
        store = self._parts.store
        for artifact_id in store.ids():
            yield from _summary(store.get, artifact_id, "")
        for artifact_id, reason in store.quarantined().items():
            yield from _summary(store.get_quarantined, artifact_id, reason)

    def _check_question(self, request: pb.AskRequest) -> Sampling:
        if not request.question.strip():
            raise InvalidRequestError("question: is empty", field="question")
        size = len(request.question.encode("utf-8"))
        if size > limits.MAX_QUESTION_BYTES:
            raise TooLargeError(
                f"question: {size} bytes, the limit is {limits.MAX_QUESTION_BYTES}",
                value=size,
                limit=limits.MAX_QUESTION_BYTES,
            )
        limit = self._parts.config.max_answer_tokens
        if request.max_tokens > limit:
            raise TooLargeError(
                f"max_tokens: {request.max_tokens}, the limit is {limit}", value=request.max_tokens, limit=limit
            )
        return Sampling(request.max_tokens, request.temperature, request.top_p, request.seed)


def _question(request: pb.AskRequest) -> Question:
    sender = addresses.parse(request.sender, "sender", addresses.SENDER_PORT) if request.sender else None
    return Question(request.question, sender, request.allow_fallback)


def _summary(get: Callable[[bytes], Stored], artifact_id: bytes, quarantined: str) -> Iterator[pb.ArtifactSummary]:
    try:
        stored = get(artifact_id)
        used_at = stored_files.used_at(stored.path)
    except (NotFoundError, QuarantinedError, FileNotFoundError):
        # Gone since the ids were listed.
        return
    except KvferryError as error:
        # One damaged manifest must not hide everything else.
        yield pb.ArtifactSummary(artifact_id=artifact_id, quarantined=quarantined or error.message)
        return
    yield pb.ArtifactSummary(
        artifact_id=stored.artifact_id,
        method=stored.manifest.method.id,
        form=stored.manifest.form,
        payload_bytes=stored.manifest.payload.length,
        prefix_tokens=stored.manifest.prefix.tokens if stored.manifest.prefix else 0,
        committed_at=stored.record.committed_at,
        quarantined=quarantined,
        used_at=used_at,
    )
