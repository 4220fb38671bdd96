"""What a look-up costs: FetchSpans as a receiver calls a sender, against a bare gRPC call with as many bytes.

All servers run in one process of their own, and take turns; a row is the median of its turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvferry.ablations.speed import synthetic
from kvferry.core import channel, logs, security
from kvferry.core.addresses import Address
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.digests import digest
from kvferry.core.metrics import SenderMetrics
from kvferry.core.request_ids import RequestIdInterceptor
from kvferry.core.rpc_metrics import MetricsInterceptor
from kvferry.core.store import ArtifactStore
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.proto.v1 import sender_service_pb2_grpc as pb_grpc
from kvferry.receiver import lookups
from kvferry.receiver.lookups import Place
from kvferry.receiver.span_client import SpanClient, Spent
from kvferry.sender.documents import CACHE_BYTES, DocumentStore
from kvferry.sender.span_service import SpanServicer

PATHS = ("bare", "at hand", "from disk")
WORDS = 50_000
_BARE = "/kvferry.bench.Bare/Call"
_VOCABULARY = ("the", "ferry", "leaves", "at", "dawn", "and", "carries", "crates", "of", "paper", "Größe", "12 m²")
_REFERENCE = 30
_WARM_UP = 20
_SECONDS = 30.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Row:
    """One way to ask.

    Attributes:
        path: "bare"; "at hand", a document that was just looked up; or "from disk", one that is verified first.
        ms: median over the turns.
        ratio: to the bare call's median.
        request_bytes, response_bytes: of the messages.
    """

    path: str
    ms: float
    ratio: float
    request_bytes: int
    response_bytes: int


def run(turns: int, advance: Callable[[str, float], None]) -> list[Row]:
    """Measure every way.

    Args:
        turns: how often each is measured; the median counts.
        advance: told what happens and which share of the whole is done.
    """
    text = document()
    request = _request(text)
    response = pb.FetchSpansResponse(texts=[text[span.start : span.end] for span in request.spans])
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        server = context.Process(target=_serve, args=(Path(folder), text, response.SerializeToString(), there))
        server.start()
        try:
            times = asyncio.run(_measure(here.recv(), request, response, turns, advance))
            here.send("stop")
        finally:
            server.join(_SECONDS)
            server.kill()
    medians = {path: statistics.median(seconds) * 1000 for path, seconds in times.items()}
    sizes = request.ByteSize(), response.ByteSize()
    return [Row(path, ms, ms / medians["bare"], *sizes) for path, ms in medians.items()]


def document() -> str:
    """Return a text of 50,000 words, not all of them ASCII, the same every time."""
    chosen = np.random.default_rng(0).choice(_VOCABULARY, WORDS)
    return " ".join(chosen.tolist())


def _request(text: str) -> pb.FetchSpansRequest:
    """Return what a question with six hits asks for, spread over the document."""
    step = len(text) // lookups.MAX_LOOKUPS
    length = lookups.BEFORE + _REFERENCE + lookups.AFTER
    return pb.FetchSpansRequest(
        document_digest=digest(text.encode("utf-8")),
        spans=[pb.Span(start=at * step, end=at * step + length) for at in range(lookups.MAX_LOOKUPS)],
        max_bytes=lookups.MAX_BYTES,
    )


async def _measure(
    ports: Sequence[int],
    request: pb.FetchSpansRequest,
    response: pb.FetchSpansResponse,
    turns: int,
    advance: Callable[[str, float], None],
) -> dict[str, list[float]]:
    bare, *senders = (Address(_LOOPBACK, port) for port in ports)
    places = [Place(span.start, span.end) for span in request.spans]
    encoded, expected = request.SerializeToString(), response.SerializeToString()
    async with SpanClient(ReceiverConfig()) as client, channel.open_async(bare) as opened:
        call: Any = opened.unary_unary(_BARE)

        async def plain() -> bool:
            return bool(await call(encoded, timeout=_SECONDS) == expected)

        async def look_up(sender: Address) -> bool:
            texts = await client.fetch(sender, request.document_digest, places, request.max_bytes, Spent())
            return texts == list(response.texts)

        ways: list[Callable[[], Awaitable[bool]]] = [plain, *(partial(look_up, sender) for sender in senders)]
        paths = dict(zip(PATHS, ways, strict=True))
        times: dict[str, list[float]] = {path: [] for path in paths}
        for turn in range(-_WARM_UP, turns):
            for path, ask in paths.items():
                start = time.perf_counter()
                right = await ask()
                seconds = time.perf_counter() - start
                if not right:
                    raise RuntimeError(f"{path}: another answer than the document's")
                if turn >= 0:
                    times[path].append(seconds)
            advance("look-ups", max(turn, 0) / turns)
    return times


def _serve(folder: Path, text: str, response: bytes, control: Connection) -> None:
    """Serve until a word comes. Says the ports first, in the order of ``PATHS``."""
    logs.configure("warning", "text")
    asyncio.run(_serve_all(folder, text, response, control))


async def _serve_all(folder: Path, text: str, response: bytes, control: Connection) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(ArtifactStore(folder)))
        at_hand, from_disk = (DocumentStore(store, cache_bytes) for cache_bytes in (CACHE_BYTES, 0))
        stack.enter_context(at_hand.kept(text.encode("utf-8")))
        servers = [_bare(response), _sender(at_hand), _sender(from_disk)]
        ports = [server.add_insecure_port(f"{_LOOPBACK}:0") for server in servers]
        for server in servers:
            await server.start()
        control.send(ports)
        await asyncio.to_thread(control.recv)
        for server in servers:
            await server.stop(0)


def _sender(documents: DocumentStore) -> grpc.aio.Server:
    """Return a server with everything that stands before a call in the daemon."""
    metrics = SenderMetrics("synthetic", synthetic.VERSIONS)
    gate = security.for_server(SenderConfig()).gate
    server = grpc.aio.server(
        interceptors=[RequestIdInterceptor(), MetricsInterceptor(metrics), gate], options=channel.server_options()
    )
    servicer = SpanServicer(documents, metrics)  # type: ignore[abstract]  # the other calls are not measured
    pb_grpc.add_SenderServiceServicer_to_server(servicer, server)
    return server


def _bare(response: bytes) -> grpc.aio.Server:
    async def answer(_request: bytes, _context: Any) -> bytes:
        return response

    service, method = _BARE.strip("/").split("/")
    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    return server
