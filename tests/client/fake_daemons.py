"""A sender and a receiver that speak the protocol and do what a test tells them. No model, no store.

Everything on the wire is written out here (metadata keys, JSON, digests) rather than taken from the product, so that
both sides cannot be wrong in the same way.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc
import msgpack
from blake3 import blake3

from kvferry.proto.v1 import common_pb2, receiver_service_pb2, sender_service_pb2
from kvferry.proto.v1.receiver_service_pb2_grpc import (
    ReceiverServiceServicer,
    add_ReceiverServiceServicer_to_server,
)
from kvferry.proto.v1.sender_service_pb2_grpc import SenderServiceServicer, add_SenderServiceServicer_to_server

ARTIFACT = blake3(b"an artifact").digest()
OTHER = blake3(b"another artifact").digest()
TOKENS = (("The", 11), (" code", 12), ("", 13), (" is", 14))
TAIL = " 4417."
TEXT = "The code is 4417."
ACCOUNT = {
    "prefill_tokens": 40,
    "dense_bf16_bytes": 9000,
    "prefill_ms": 1.5,
    "method_ms": 0.5,
    "encode_ms": 0.25,
    "transfer_ms": 2.0,
    "fallback_reason": None,
    "tokenizer_bytes": 120,
    "tokenizer_ms": 3.5,
}
NODE = common_pb2.NodeDescription(
    role="receiver",
    kvferry_version="0.1.0",
    device="cpu",
    model=common_pb2.ModelDescription(id="tiny", weights="ab" * 32, layers=2, context_length=4096, dtype="F32"),
)


def ledger(artifact_id: bytes, **changes: Any) -> str:
    """Return a ledger as a receiver writes it."""
    record = {
        "artifact_id": artifact_id.hex(),
        "method": "B1",
        "form": "kv",
        "verdict": "accepted",
        "fallback": None,
        "fallback_reason": None,
        "manifest_bytes": 100,
        "payload_bytes": 1000,
        "resent_bytes": 0,
        "control_bytes": 20,
        "tokenizer_bytes": 120,
        "lookups": {
            "count": 0,
            "calls": 0,
            "bytes": 0,
            "text_bytes": 0,
            "ms": 0.0,
            "hit": None,
            "missing": [],
            "left_out": 0,
        },
        "wire_bytes": 1120,
        "dense_bf16_bytes": 9000,
        "ratio": 8.03,
        "tokens": {"sender_prefill": 40, "receiver_prefill": 9, "reused": 40, "generated": 4, "material": 0},
        "ms": {
            "tokenizer": 3.5,
            "prefill": 1.5,
            "method": 0.5,
            "encode": 0.25,
            "transfer": 2.0,
            "verify": 0.1,
            "reconstruct": 0.2,
            "receiver_prefill": 0.3,
            "first_token": 4.0,
            "total": 9.0,
        },
        "rows": {"min": 40, "mean": 40.0, "max": 40},
        "parity": None,
        "resident_bytes": 9000,
        "finish_reason": "stop",
        "prompt_version": 1,
        "system": "cd" * 32,
        "runtime": {"kvferry": "0.1.0"},
    }
    return json.dumps(record | changes)


def piece(text: str, token_id: int | None) -> receiver_service_pb2.AskResponse:
    return receiver_service_pb2.AskResponse(piece=receiver_service_pb2.AnswerPiece(text=text, token_id=token_id))


def answer_end(request: receiver_service_pb2.AskRequest, **changes: Any) -> receiver_service_pb2.AskResponse:
    """Return the terminal message of the answer below."""
    values = {
        "text": TEXT,
        "token_ids": [token_id for _, token_id in TOKENS],
        "finish_reason": "stop",
        "ledger_json": ledger(request.artifact_id),
    }
    return receiver_service_pb2.AskResponse(end=receiver_service_pb2.AnswerEnd(**(values | changes)))


def send_end(start: sender_service_pb2.SendStart, **changes: Any) -> sender_service_pb2.SendResponse:
    """Return the terminal message of a send."""
    values = {
        "artifact_id": ARTIFACT,
        "method": start.method,
        "form": "kv",
        "receiver": start.receiver,
        "account_json": json.dumps(ACCOUNT),
        "manifest_bytes": 100,
        "payload_bytes": 1000,
        "moved_bytes": 1000,
        "wire_bytes": 1120,
        "reused": False,
    }
    return sender_service_pb2.SendResponse(end=sender_service_pb2.SendEnd(**(values | changes)))


def send_progress(stage: str, done: int, total: int) -> sender_service_pb2.SendResponse:
    return sender_service_pb2.SendResponse(
        progress=sender_service_pb2.SendProgress(stage=stage, done=done, total=total)
    )


def abort(context: grpc.ServicerContext, status: str, message: str, code: str, fields: dict[str, Any]) -> NoReturn:
    """End a call with one of our errors, as docs/wire.md says that it travels."""
    context.set_trailing_metadata((("kvferry-error-bin", msgpack.packb({"code": code, "fields": fields})),))
    context.abort(grpc.StatusCode[status], message)
    raise AssertionError


class FakeSender(SenderServiceServicer):
    """``script`` makes a send's responses from its start and the text that arrived."""

    def __init__(self) -> None:
        self.start = sender_service_pb2.SendStart()
        self.pieces: list[bytes] = []
        self.spans: list[tuple[int, int]] = []
        self.passages = ["first", "second"]
        self.methods = [
            common_pb2.MethodDescription(
                id="B1", name="serialised", form="kv", label="custom", aware=False, source="here", summary="All of it."
            )
        ]
        self.script: Callable[[sender_service_pb2.SendStart, Any], Iterator[Any]] = self.deliver
        self.before_text: Callable[[Any], None] = lambda _: None
        self.before: Callable[[Any], None] = lambda _: None
        self.looked_up = ""

    def deliver(self, start: sender_service_pb2.SendStart, context: grpc.ServicerContext) -> Iterator[Any]:
        yield send_progress("prefill", 0, 40)
        yield send_progress("prefill", 40, 40)
        yield send_progress("transfer", 1000, 1000)
        yield send_end(start)

    def Send(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        self.start = next(request_iterator).start
        self.before_text(context)
        self.pieces = [request.text for request in request_iterator]
        text = b"".join(self.pieces)
        if (len(text), blake3(text).digest()) != (self.start.text_bytes, self.start.text_digest):
            abort(context, "ABORTED", "document: not what was announced", "TRANSFER", {})
        yield from self.script(self.start, context)

    def Describe(self, request: Any, context: Any) -> Any:
        self.before(context)
        return sender_service_pb2.SenderServiceDescribeResponse(node=NODE, methods=self.methods)

    def FetchSpans(self, request: Any, context: Any) -> Any:
        self.before(context)
        self.looked_up = request.document_digest.hex()
        self.spans = [(span.start, span.end) for span in request.spans]
        return sender_service_pb2.FetchSpansResponse(texts=self.passages)


class FakeReceiver(ReceiverServiceServicer):
    """``script`` makes an answer's messages."""

    def __init__(self) -> None:
        self.held = [ARTIFACT, OTHER]
        self.put_aside: dict[bytes, str] = {}
        self.requests: list[Any] = []
        self.dropped: list[bytes] = []
        self.begun = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.running = 0
        self.most_running = 0
        self._lock = threading.Lock()
        self.script: Callable[[Any, Any], Iterator[Any]] = self.answer
        self.before: Callable[[Any], None] = lambda _: None

    def answer(self, request: Any, context: Any) -> Iterator[Any]:
        for text, token_id in TOKENS:
            yield piece(text, token_id)
        yield piece(TAIL, None)
        yield answer_end(request)

    def endless(self, request: Any, context: Any) -> Iterator[Any]:
        """Send one piece, then nothing more as long as the call lives."""
        yield piece("The", 11)
        while context.is_active():
            time.sleep(0.005)

    def silent(self, request: Any, context: Any) -> Iterator[Any]:
        """Send nothing as long as the call lives."""
        while context.is_active():
            time.sleep(0.005)
        yield from ()

    def Ask(self, request: Any, context: Any) -> Iterator[Any]:
        with self._lock:
            self.requests.append(request)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.begun.release()
        if not context.add_callback(self.ended.release):
            self.ended.release()
        try:
            yield from self.script(request, context)
        finally:
            with self._lock:
                self.running -= 1

    def Describe(self, request: Any, context: Any) -> Any:
        self.before(context)
        return receiver_service_pb2.ReceiverServiceDescribeResponse(node=NODE)

    def List(self, request: Any, context: Any) -> Any:
        self.before(context)
        return receiver_service_pb2.ListResponse(
            artifacts=[
                receiver_service_pb2.ArtifactSummary(
                    artifact_id=artifact_id,
                    method="B1",
                    form="kv",
                    payload_bytes=1000,
                    prefix_tokens=40,
                    committed_at=1.5,
                    quarantined=self.put_aside.get(artifact_id, ""),
                    used_at=2.5,
                )
                for artifact_id in self.held
            ]
        )

    def Drop(self, request: Any, context: Any) -> Any:
        self.before(context)
        if request.artifact_id not in self.held:
            hexadecimal = request.artifact_id.hex()
            abort(context, "NOT_FOUND", f"artifact {hexadecimal}: not here", "NOT_FOUND", {"artifact": hexadecimal})
        self.dropped.append(request.artifact_id)
        return receiver_service_pb2.DropResponse()

    def Offer(self, request: Any, context: Any) -> NoReturn:
        raise AssertionError

    Put = Commit = Offer


class FakeDaemons:
    """Both on one free loopback port."""

    def __init__(self) -> None:
        self.sender = FakeSender()
        self.receiver = FakeReceiver()
        self._pool = ThreadPoolExecutor(12)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        add_SenderServiceServicer_to_server(self.sender, self._server)
        add_ReceiverServiceServicer_to_server(self.receiver, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()


def text_of(pieces: Sequence[Any]) -> str:
    return "".join(item.text for item in pieces)
