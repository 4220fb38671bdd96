"""The blocking client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, Unpack

import grpc

from kvferry.client import _documents, _peers, _references, _requests, _responses, _types
from kvferry.client._documents import DocumentSource
from kvferry.client._references import ArtifactReference
from kvferry.client._responses import AnswerReader, SendReader
from kvferry.client._streams import AnswerStream, Cancellation, finish_all, read
from kvferry.client._values import Answer, Artifact, AskOptions, Piece, Progress, SendResult
from kvferry.core import channel, rpc, wire
from kvferry.core.addresses import Address
from kvferry.core.manifest import Scalar
from kvferry.core.wire import MethodInfo, NodeInfo
from kvferry.proto.v1 import receiver_service_pb2, sender_service_pb2
from kvferry.proto.v1.receiver_service_pb2_grpc import ReceiverServiceStub
from kvferry.proto.v1.sender_service_pb2_grpc import SenderServiceStub


@dataclass(frozen=True, kw_only=True)
class SendReport(SendResult):
    """What a send came to; questions can be asked of it directly."""

    _client: Client = field(repr=False, compare=False)

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Ask the artifact that was sent, see ``Client.ask``."""
        return self._client.ask(self, question, **options)

    def stream(self, question: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Ask the artifact that was sent and read the answer as it comes, see ``Client.stream``."""
        return self._client.stream(self, question, **options)


class Client:
    """Sends documents and asks questions. May be used from several threads.

    Every method raises a subclass of KvferryError on failure: UnavailableError when a daemon cannot be reached,
    DeadlineError when it is silent for too long, and whatever the daemon itself reports.

        with Client(sender="localhost:7411", receiver="localhost:7412") as kv:
            report = kv.send("report.txt", method="B1")
            print(report.ask("What is the access code of the north warehouse?").text)
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
        sender_channel: grpc.Channel | None = None,
        receiver_channel: grpc.Channel | None = None,
    ) -> None:
        """Prepare connections; they are made when first used.

        Args:
            sender: the sender's host:port.
            receiver: the receiver's host:port.
            deliver_to: host:port under which the sender reaches the receiver, if that is another than ``receiver``;
                "" is the one in the sender's configuration.
            look_up_at: host:port under which the receiver reaches the sender, if that is another than ``sender``; "" is
                the one in the receiver's configuration. Only artifacts of references need it.
            timeout: seconds that a call without a stream may take.
            idle_timeout: seconds of silence that a send or an answer may have.
            authority: PEM file of the authority that signed the daemons' certificates; None speaks without TLS.
            certificate: PEM file to show to daemons that ask for a client's certificate.
            key: PEM file of its key.
            token: secret to present with every call.
            insecure: let the token cross a network without TLS.
            sender_channel: a channel to use instead; the client does not close it.
            receiver_channel: a channel to use instead; the client does not close it.

        Raises:
            ConfigError: when an address or a time is impossible, a file cannot be used, or the token would cross a
                network unencrypted.
        """
        self._peers = _peers.Peers.parse(
            sender, receiver, deliver_to=deliver_to, look_up_at=look_up_at, timeout=timeout, idle_timeout=idle_timeout
        )
        self._security = _peers.security(authority, certificate, key, token, insecure=insecure)
        self._guard = _peers.Guard()
        self._owned: list[grpc.Channel] = []
        self._sender = SenderServiceStub(sender_channel or self._open(self._peers.sender))
        self._receiver = ReceiverServiceStub(receiver_channel or self._open(self._peers.receiver))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; calls in flight end with CancelledError. May be called twice."""
        self._guard.close()
        for opened in self._owned:
            opened.close()
        self._owned.clear()

    def send(
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
    ) -> SendReport:
        """Have the sender read a document and deliver it to the receiver.

        Args:
            document: a path object, an open file, UTF-8 bytes, or a str: the file of that name if there is one, else
                the text itself. A str that looks like the name of a missing file is refused.
            text: the text itself, whatever it looks like, in place of ``document``.
            method: id or name of the method, see ``methods``; or "auto", with which the sender takes the one that is
                expected to give the first token soonest, within the bound ``quality``: "exact" (the default), "near" or
                "reduced". ``SendReport.account.auto`` then says what was weighed.
            question: for methods that look at the question.
            system: the system prompt; None is the default one.
            fallback: send the text instead when the receiver refuses the cache. ``SendReport.fallback_reason`` and the
                ledgers of all answers then say so. Method "auto" does that by itself.
            progress: called as the work proceeds.
            **parameters: the method's own.

        Raises:
            InvalidRequestError: when the document or a value is impossible.
            TooLargeError: when the document is over the limit.
            RefusedError: when the receiver's verdict is against the artifact, and against the text that may replace it.
            TransferError: when the send stops before its end.
        """
        _types.check_progress(progress)
        source = _documents.read(document, text)
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
        self._guard.check()
        messages = read(
            lambda: self._sender.Send(_requests.send_parts(start, source)), peer, "Send", self._peers.idle_timeout
        )
        with contextlib.closing(messages):
            for message in messages:
                event = reader.take(message)
                if event is not None and progress is not None:
                    progress(event)
        return SendReport(**vars(reader.result), _client=self)

    def ask(
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
        """Ask a question and wait for the whole answer.

        Args:
            artifact: what ``send`` returned, an entry of ``artifacts``, or an artifact id, of which the first 8 or more
                digits are enough.
            question: the question.
            max_tokens: most tokens to generate.
            temperature: 0 takes the most likely token every time.
            top_p: nucleus mass in (0, 1]; 1 keeps every token.
            seed: of the sampler, when the temperature is above 0.
            fallback: have the receiver read the prefix again when the cache that it keeps cannot be trusted any more,
                and do without passages that cannot be looked up. The answer's ledger then says so and why.

        Raises:
            InvalidRequestError: when an argument is impossible.
            NotFoundError: when the receiver does not hold the artifact.
            ContainerError: when what the receiver keeps is damaged; it puts the artifact aside. Another send mends it.
            ParityError: when the rebuilt cache does not give what the sender's gave; likewise.
            QuarantinedError: when the artifact was put aside before.
            LookUpError: when the passages that the artifact refers to cannot be had from the sender.
            TransferError: when the answer stops before its end.
        """
        with self.stream(
            artifact,
            question,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            fallback=fallback,
        ) as stream:
            return stream.finish()

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
    ) -> AnswerStream:
        """Ask a question and read the answer as it comes. Arguments and errors are those of ``ask``.

        with kv.stream(report, "Who keeps the keys?") as stream:
            for piece in stream:
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
        cancellation = Cancellation()
        return AnswerStream(self._pieces(artifact, request, reader, cancellation), reader, cancellation)

    def ask_many(
        self,
        artifact: ArtifactReference,
        questions: Iterable[str],
        *,
        concurrency: int = 4,
        **options: Unpack[AskOptions],
    ) -> list[Answer]:
        """Ask several questions of one artifact and return the answers in the order of the questions.

        Args:
            artifact: see ``ask``.
            questions: any number of them.
            concurrency: most questions in flight at a time.
            **options: see ``ask``; the same for every question.

        Raises:
            KvferryError: the first failure; the other questions are given up.
        """
        _peers.check_concurrency(concurrency)
        _types.check_questions(questions)
        whole = self._resolve(artifact)
        streams = [self.stream(whole, question, **options) for question in questions]
        return finish_all(streams, concurrency) if streams else []

    def artifacts(self) -> list[Artifact]:
        """Return what the receiver holds, and what it has put aside."""
        peer = str(self._peers.receiver)
        self._guard.check()
        with rpc.translating(peer, "List"):
            response = self._receiver.List(receiver_service_pb2.ListRequest(), timeout=self._peers.timeout)
        return _responses.artifacts(response, peer)

    def drop(self, artifact: ArtifactReference) -> None:
        """Have the receiver remove an artifact, committed or not.

        Raises:
            NotFoundError: when it holds no such artifact.
        """
        request = receiver_service_pb2.DropRequest(artifact_id=bytes.fromhex(self._resolve(artifact)))
        self._guard.check()
        with rpc.translating(str(self._peers.receiver), "Drop"):
            self._receiver.Drop(request, timeout=self._peers.timeout)

    def methods(self) -> list[MethodInfo]:
        """Return the methods that the sender knows."""
        return [wire.method_from_message(item) for item in self._describe_sender().methods]

    def describe_sender(self) -> NodeInfo:
        """Return what the sender is and runs."""
        return wire.node_from_message(self._describe_sender().node)

    def describe_receiver(self) -> NodeInfo:
        """Return what the receiver is and runs."""
        self._guard.check()
        with rpc.translating(str(self._peers.receiver), "Describe"):
            response = self._receiver.Describe(
                receiver_service_pb2.ReceiverServiceDescribeRequest(), timeout=self._peers.timeout
            )
        return wire.node_from_message(response.node)

    def fetch_spans(self, document_digest: str, spans: Sequence[tuple[int, int]]) -> list[str]:
        """Look passages up in a document that the sender has read.

        Args:
            document_digest: ``SendReport.document_digest``.
            spans: half-open ranges of code points.

        Returns:
            One text a span, in order.

        Raises:
            NotFoundError: when the sender has not read the document.
            InvalidRequestError: when a span is not inside it.
            TooLargeError: when it is too much for one call.
        """
        request = _requests.fetch_spans(document_digest, spans)
        peer = str(self._peers.sender)
        self._guard.check()
        with rpc.translating(peer, "FetchSpans"):
            response = self._sender.FetchSpans(request, timeout=self._peers.timeout)
        return _responses.texts(response, len(spans), peer)

    def _open(self, address: Address) -> grpc.Channel:
        opened = channel.open_blocking(address, self._security)
        self._owned.append(opened)
        return opened

    def _describe_sender(self) -> sender_service_pb2.SenderServiceDescribeResponse:
        self._guard.check()
        with rpc.translating(str(self._peers.sender), "Describe"):
            return self._sender.Describe(sender_service_pb2.SenderServiceDescribeRequest(), timeout=self._peers.timeout)

    def _resolve(self, artifact: ArtifactReference) -> str:
        given = _references.digits(artifact)
        if _references.is_whole(given):
            return given
        known = [item.artifact_id for item in self.artifacts()]
        return _references.match(given, known, str(self._peers.receiver))

    def _pieces(
        self,
        artifact: ArtifactReference,
        request: receiver_service_pb2.AskRequest,
        reader: AnswerReader,
        cancellation: Cancellation,
    ) -> Generator[Piece, None, None]:
        request.artifact_id = bytes.fromhex(self._resolve(artifact))
        self._guard.check()
        messages = read(
            lambda: self._receiver.Ask(request),
            str(self._peers.receiver),
            "Ask",
            self._peers.idle_timeout,
            cancellation,
        )
        with contextlib.closing(messages):
            for message in messages:
                piece = reader.take(message)
                if piece is not None:
                    yield piece
        reader.check_complete()
