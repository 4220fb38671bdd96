"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from kvferry.client import _documents, _peers, _references, _requests, _responses, _types
from kvferry.client._async_streams import AsyncAnswerStream, read
from kvferry.client._documents import DocumentSource
from kvferry.client._references import ArtifactReference
from kvferry.client._responses import AnswerReader, SendReader
from kvferry.client._values import Answer, Artifact, AskOptions, Piece, Progress, SendResult
from kvferry.core import channel, rpc, wire
from kvferry.core.addresses import Address
from kvferry.core.errors import InvalidRequestError
from kvferry.core.manifest import Scalar
from kvferry.core.wire import MethodInfo, NodeInfo
from kvferry.proto.v1 import receiver_service_pb2, sender_service_pb2
from kvferry.proto.v1.receiver_service_pb2_grpc import ReceiverServiceStub
from kvferry.proto.v1.sender_service_pb2_grpc import SenderServiceStub

if TYPE_CHECKING:
    from kvferry.proto.v1.receiver_service_pb2_grpc import ReceiverServiceAsyncStub
    from kvferry.proto.v1.sender_service_pb2_grpc import SenderServiceAsyncStub


@dataclass(frozen=True, kw_only=True)
class AsyncSendReport(SendResult):
    """What a send came to; questions can be asked of it directly."""

    _client: AsyncClient = field(repr=False, compare=False)

    async def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Ask the artifact that was sent, see ``AsyncClient.ask``."""
        return await self._client.ask(self, question, **options)

    def stream(self, question: str, **options: Unpack[AskOptions]) -> AsyncAnswerStream:
        """Ask the artifact that was sent and read the answer as it comes, see ``AsyncClient.stream``."""
        return self._client.stream(self, question, **options)


@dataclass(frozen=True)
class _Connection:
    """What belongs to the event loop that first used the client."""

    loop: asyncio.AbstractEventLoop
    owned: list[grpc.aio.Channel]
    sender: SenderServiceAsyncStub
    receiver: ReceiverServiceAsyncStub


class AsyncClient:
    """Sends documents and asks questions from one event loop. For another loop make another client.

    Arguments, results and errors are those of ``Client``.

        async with AsyncClient(sender="localhost:7411", receiver="localhost:7412") as kv:
            report = await kv.send("report.txt", method="B1")
            print((await report.ask("What is the access code of the north warehouse?")).text)
    """

    def __init__(
        self,
        *,
        sender: str = _peers.DEFAULT_SENDER,
        receiver: str = _peers.DEFAULT_RECEIVER,
        deliver_to: str | None = None,
        look_up_at: str | None = None,
        timeout: float = _peers.DEFAULT_TIMEOUT,
        idle_timeout: float = _peers.DEFAULT_IDLE_TIMEOUT,
        authority: _peers.PathLike | None = None,
        certificate: _peers.PathLike | None = None,
        key: _peers.PathLike | None = None,
        token: str | None = None,
        insecure: bool = False,
        sender_channel: grpc.aio.Channel | None = None,
        receiver_channel: grpc.aio.Channel | None = None,
    ) -> None:
        """Prepare a client; the first call connects it to the running event loop. Arguments as of ``Client``."""
        self._peers = _peers.Peers.parse(
            sender, receiver, deliver_to=deliver_to, look_up_at=look_up_at, timeout=timeout, idle_timeout=idle_timeout
        )
        self._security = _peers.security(authority, certificate, key, token, insecure=insecure)
        self._guard = _peers.Guard()
        self._sender_channel = sender_channel
        self._receiver_channel = receiver_channel
        self._connection: _Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in flight end with our CancelledError, not asyncio's. May be called twice."""
        self._guard.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            for opened in connection.owned:
                await opened.close()

    async def send(
        self,
        document: DocumentSource | None = None,
        *,
        text: str | None = None,
        method: str = "B1",
        question: str | None = None,
        system: str | None = None,
        fallback: bool = False,
        progress: Callable[[Progress], None] | None = None,
        **parameters: Scalar,
    ) -> AsyncSendReport:
        """Have the sender read a document and deliver it to the receiver, see ``Client.send``."""
        _types.check_progress(progress)
        source = await asyncio.to_thread(_documents.read, document, text)
        start = _requests.send_start(
            source,
            method=method,
            receiver=self._peers.delivery_address,
            question=question,
            system=system,
            fallback=fallback,
            parameters=parameters,
        )
        peer = str(self._peers.sender)
        reader = SendReader(peer, source)
        stub = self._connected().sender
        messages = read(lambda: stub.Send(_requests.send_parts(start, source)), peer, "Send", self._peers.idle_timeout)
        async with contextlib.aclosing(messages):
            async for message in messages:
                event = reader.take(message)
                if event is not None and progress is not None:
                    progress(event)
        return AsyncSendReport(**vars(reader.result), _client=self)

    async def ask(
        self,
        artifact: ArtifactReference,
        question: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        fallback: bool = False,
    ) -> Answer:
        """Ask a question and wait for the whole answer, see ``Client.ask``."""
        async with self.stream(
            artifact,
            question,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            fallback=fallback,
        ) as stream:
            return await stream.finish()

    def stream(
        self,
        artifact: ArtifactReference,
        question: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        fallback: bool = False,
    ) -> AsyncAnswerStream:
        """Ask a question and read the answer as it comes. Arguments and errors are those of ``ask``.

        async with kv.stream(report, "Who keeps the keys?") as stream:
            async for piece in stream:
                print(piece.text, end="", flush=True)
        print(stream.answer.ledger.wire_bytes)
        """
        request = _requests.ask(
            question,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            fallback=fallback,
            sender=self._peers.look_up_address,
        )
        reader = AnswerReader(str(self._peers.receiver), request)
        return AsyncAnswerStream(self._pieces(artifact, request, reader), reader)

    async def ask_many(
        self,
        artifact: ArtifactReference,
        questions: Iterable[str],
        *,
        concurrency: int = 4,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """Ask several questions of one artifact, see ``Client.ask_many``."""
        _peers.check_concurrency(concurrency)
        _types.check_questions(questions)
        whole = await self._resolve(artifact)
        streams = [self.stream(whole, question, **options) for question in questions]
        turns = asyncio.Semaphore(concurrency)

        async def finish(stream: AsyncAnswerStream) -> Answer:
            async with turns, stream:
                return await stream.finish()

        tasks = [asyncio.ensure_future(finish(stream)) for stream in streams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def artifacts(self) -> list[Artifact]:
        """Return what the receiver holds, and what it has put aside."""
        peer = str(self._peers.receiver)
        stub = self._connected().receiver
        call = stub.List(receiver_service_pb2.ListRequest(), timeout=self._peers.timeout)
        response = await rpc.answer(call, peer, "List")
        return _responses.artifacts(response, peer)

    async def drop(self, artifact: ArtifactReference) -> None:
        """Have the receiver remove an artifact, see ``Client.drop``."""
        request = receiver_service_pb2.DropRequest(artifact_id=bytes.fromhex(await self._resolve(artifact)))
        stub = self._connected().receiver
        await rpc.answer(stub.Drop(request, timeout=self._peers.timeout), str(self._peers.receiver), "Drop")

    async def methods(self) -> list[MethodInfo]:
        """Return the methods that the sender knows."""
        return [wire.method_from_message(item) for item in (await self._describe_sender()).methods]

    async def describe_sender(self) -> NodeInfo:
        """Return what the sender is and runs."""
        return wire.node_from_message((await self._describe_sender()).node)

    async def describe_receiver(self) -> NodeInfo:
        """Return what the receiver is and runs."""
        stub = self._connected().receiver
        call = stub.Describe(receiver_service_pb2.ReceiverServiceDescribeRequest(), timeout=self._peers.timeout)
        response = await rpc.answer(call, str(self._peers.receiver), "Describe")
        return wire.node_from_message(response.node)

    async def fetch_spans(self, document_digest: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Look passages up in a document that the sender has read, see ``Client.fetch_spans``."""
        request = _requests.fetch_spans(document_digest, spans)
        peer = str(self._peers.sender)
        stub = self._connected().sender
        response = await rpc.answer(stub.FetchSpans(request, timeout=self._peers.timeout), peer, "FetchSpans")
        return _responses.texts(response, len(spans), peer)

    def _connected(self) -> _Connection:
        """Return the connection, made on the loop that is running now."""
        self._guard.check()
        loop = asyncio.get_running_loop()
        if self._connection is None:
            self._connection = self._connect(loop)
        if self._connection.loop is not loop:
            raise InvalidRequestError(
                "client: belongs to another event loop; make one AsyncClient a loop", field="client"
            )
        return self._connection

    def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        owned: list[grpc.aio.Channel] = []

        def opened(address: Address) -> grpc.aio.Channel:
            owned.append(channel.open_async(address, self._security))
            return owned[-1]

        return _Connection(
            loop,
            owned,
            SenderServiceStub(self._sender_channel or opened(self._peers.sender)),
            ReceiverServiceStub(self._receiver_channel or opened(self._peers.receiver)),
        )

    async def _describe_sender(self) -> sender_service_pb2.SenderServiceDescribeResponse:
        stub = self._connected().sender
        call = stub.Describe(sender_service_pb2.SenderServiceDescribeRequest(), timeout=self._peers.timeout)
        return await rpc.answer(call, str(self._peers.sender), "Describe")

    async def _resolve(self, artifact: ArtifactReference) -> str:
        given = _references.digits(artifact)
        if _references.is_whole(given):
            return given
        known = [item.artifact_id for item in await self.artifacts()]
        return _references.match(given, known, str(self._peers.receiver))

    async def _pieces(
        self, artifact: ArtifactReference, request: receiver_service_pb2.AskRequest, reader: AnswerReader
    ) -> AsyncGenerator[Piece, None]:
        request.artifact_id = bytes.fromhex(await self._resolve(artifact))
        stub = self._connected().receiver
        messages = read(lambda: stub.Ask(request), str(self._peers.receiver), "Ask", self._peers.idle_timeout)
        async with contextlib.aclosing(messages):
            async for message in messages:
                piece = reader.take(message)
                if piece is not None:
                    yield piece
        reader.check_complete()
