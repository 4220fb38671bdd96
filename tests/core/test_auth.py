"""The gate: who is let in, how many at once, how long a request may take; and that refusals are one line each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from kvferry.core import auth, channel, rpc
from kvferry.core.addresses import Address
from kvferry.core.admission import LINES_PER_WINDOW, CallLimits, RefusalLog
from kvferry.core.auth import Gate
from kvferry.core.errors import (
    AuthenticationError,
    BusyError,
    InvalidRequestError,
    PeerError,
)
from kvferry.core.request_ids import RequestIdInterceptor
from kvferry.core.tls import PeerSecurity
from kvferry.core.tokens import Token, TokenFile, digest_of

SERVICE = "kvferry.test.EchoService"
SECRET = "kvf_a-secret-of-the-studio"  # noqa: S105
GREEDY = "kvf_a-secret-of-the-crowd"
KINDS = ("Unary", "Answers", "Uploads", "Both")
SECONDS = 10.0


@dataclass
class Running:
    """A server behind a gate, and what its handlers saw."""

    address: Address
    callers: list[str | None] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @contextlib.asynccontextmanager
    async def channel(self, secret: str | None = SECRET) -> AsyncIterator[grpc.aio.Channel]:
        async with channel.open_async(self.address, PeerSecurity(token=secret)) as peer:
            yield peer

    async def call(self, kind: str = "Unary", secret: str | None = SECRET, **options: Any) -> bytes:
        """Call one of the four kinds. On gRPC's blocking stack: the asyncio one may lose the status of a refusal."""

        def invoke_blocking() -> bytes:
            security = PeerSecurity(token=secret)
            with channel.open_blocking(self.address, security) as peer, rpc.translating("peer:1", kind):
                return invoke(peer, kind, **options)

        return await asyncio.to_thread(invoke_blocking)


def invoke(peer: grpc.Channel, kind: str, **options: Any) -> bytes:
    """Call one of the four kinds with b"ab" and return everything that comes back."""
    method, requests = f"/{SERVICE}/{kind}", iter([b"a", b"b"])
    if kind == "Unary":
        return bytes(peer.unary_unary(method)(b"ab", timeout=SECONDS, **options))
    if kind == "Uploads":
        return bytes(peer.stream_unary(method)(requests, timeout=SECONDS, **options))
    if kind == "Answers":
        return b"".join(peer.unary_stream(method)(b"ab", timeout=SECONDS, **options))
    return b"".join(peer.stream_stream(method)(requests, timeout=SECONDS, **options))


Start = Callable[..., "contextlib.AbstractAsyncContextManager[Running]"]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(
        f'[[tokens]]\nname = "studio"\ndigest = "{digest_of(SECRET)}"\n'
        f'[[tokens]]\nname = "crowd"\ndigest = "{digest_of(GREEDY)}"\nmax_calls = 2\n'
        f'[[tokens]]\nname = "old"\ndigest = "{digest_of("kvf_old")}"\nexpires = 2020-01-01\n'
    )
    return path


@pytest.fixture
def start(token_file: Path) -> Start:
    """Return a function that serves all four kinds of calls behind a gate; a call of Held waits to be released."""

    @contextlib.asynccontextmanager
    async def run(
        max_calls: int = 8, request_seconds: float = SECONDS, *, with_tokens: bool = True
    ) -> AsyncIterator[Running]:
        gate = Gate(TokenFile(token_file) if with_tokens else None, max_calls, request_seconds)
        server = grpc.aio.server(interceptors=[RequestIdInterceptor(), gate], options=channel.server_options())
        running = Running(Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0")))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers(running)),))
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        try:
            yield running
        finally:
            running.hold.set()
            await server.stop(None)

    return run


def handlers(running: Running) -> dict[str, Any]:
    def seen() -> None:
        caller = auth.caller()
        running.callers.append(caller.name if caller else None)

    async def unary(request: bytes, _: object) -> bytes:
        seen()
        return request

    async def answers(request: bytes, _: object) -> AsyncIterator[bytes]:
        seen()
        for byte in request:
            yield bytes([byte])

    async def uploads(requests: AsyncIterator[bytes], _: object) -> bytes:
        seen()
        return b"".join([request async for request in requests])

    async def both(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        seen()
        async for request in requests:
            yield request

    async def held(_: bytes, __: object) -> AsyncIterator[bytes]:
        running.entered.release()
        yield b"held"
        await running.hold.wait()

    async def fails(_: bytes, context: Any) -> bytes:
        async with rpc.reporting(context):
            raise InvalidRequestError("request: is wrong")

    return {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Answers": grpc.unary_stream_rpc_method_handler(answers),
        "Uploads": grpc.stream_unary_rpc_method_handler(uploads),
        "Both": grpc.stream_stream_rpc_method_handler(both),
        "Held": grpc.unary_stream_rpc_method_handler(held),
        "Fails": grpc.unary_unary_rpc_method_handler(fails),
        "Parsed": grpc.unary_unary_rpc_method_handler(
            unary, request_deserializer=health_pb2.HealthCheckRequest.FromString
        ),
    }


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


def refusals(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "refused"]


class TestTokens:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_a_token_opens_every_kind_of_call_and_names_its_caller(
        self, start: Start, logs: list[Any], kind: str
    ) -> None:
        async with start() as running:
            assert await running.call(kind) == b"ab"
            assert running.callers == ["studio"]
            # One call's caller never shows in another's.
            await running.call(kind, GREEDY)
            assert running.callers == ["studio", "crowd"]
        assert refusals(logs) == []

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("secret", "reason"),
        [
            (None, "token: this daemon asks for one, and the call shows none"),
            ("kvf_wrong", "token: not one that this daemon accepts"),
            ("kvf_old", "token: old expired after 2020-01-01"),
        ],
    )
    async def test_without_a_good_one_no_handler_runs_and_one_line_says_so(
        self, start: Start, logs: list[Any], kind: str, secret: str | None, reason: str
    ) -> None:
        async with start() as running:
            with pytest.raises(AuthenticationError) as caught:
                await running.call(kind, secret)
            assert caught.value.message == reason
            assert running.callers == []
            assert await running.call(kind) == b"ab"
        (line,) = refusals(logs)
        assert (line["reason"], line["method"], line["log_level"]) == (reason, f"/{SERVICE}/{kind}", "warning")
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        assert not [secret for secret in (SECRET, "kvf_wrong", "kvf_old") if secret in repr(logs)]

    @pytest.mark.parametrize(
        "entries",
        [
            [("authorization", SECRET)],
            [("authorization", f"Basic {SECRET}")],
            [("authorization", "Bearer")],
            [("authorization", "Bearer ")],
            [("authorization", f"Bearer {SECRET}"), ("authorization", f"Bearer {SECRET}")],
            [("x-authorization", f"Bearer {SECRET}")],
        ],
    )
    async def test_what_is_not_one_bearer_token_is_refused(
        self, start: Start, logs: list[Any], entries: list[tuple[str, str]]
    ) -> None:
        async with start() as running:
            with pytest.raises(AuthenticationError):
                await running.call(secret=None, metadata=tuple(entries))
        assert len(refusals(logs)) == 1
        assert SECRET not in repr(logs)

    async def test_the_scheme_is_read_as_http_reads_it(self, start: Start) -> None:
        async with start() as running:
            assert await running.call(secret=None, metadata=(("authorization", f"bearer  {SECRET}"),)) == b"ab"

    async def test_a_token_that_is_taken_away_is_refused_at_the_next_call(self, start: Start, token_file: Path) -> None:
        async with start() as running, running.channel() as peer:
            call = peer.unary_unary(f"/{SERVICE}/Unary")
            assert await call(b"ab", timeout=SECONDS) == b"ab"
            await asyncio.to_thread(token_file.write_text, "")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"ab", timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_where_no_tokens_are_asked_for_everybody_is_nobody(self, start: Start) -> None:
        async with start(with_tokens=False) as running:
            assert await running.call(secret=None) == b"ab"
            assert await running.call(secret="kvf_whatever") == b"ab"  # noqa: S106
            assert running.callers == [None, None]

    async def test_health_checks_need_no_token_and_watching_does(self, start: Start) -> None:
        async with start() as running, running.channel(None) as peer:
            stub = health_pb2_grpc.HealthStub(peer)
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert await watch.code() is grpc.StatusCode.UNAUTHENTICATED
        async with start() as running, running.channel() as peer:
            watch = health_pb2_grpc.HealthStub(peer).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()

    async def test_a_method_that_is_not_there_is_one_line_and_no_handler(self, start: Start, logs: list[Any]) -> None:
        async with start() as running, running.channel() as peer:
            with pytest.raises(PeerError, match="UNIMPLEMENTED"), rpc.translating("peer:1", "x"):
                await peer.unary_unary(f"/{SERVICE}/{'x' * 500}")(b"", timeout=SECONDS)
        (line,) = refusals(logs)
        assert line["reason"] == "no such method"
        assert len(line["method"]) == 120

    async def test_an_error_of_the_handler_is_its_own(self, start: Start, logs: list[Any]) -> None:
        async with start() as running:
            with pytest.raises(InvalidRequestError, match="request: is wrong"):
                await unary(running, "Fails")
        assert refusals(logs) == []


async def unary(running: Running, method: str, request: bytes = b"", secret: str | None = SECRET) -> bytes:
    async with running.channel(secret) as peer:
        with rpc.translating("peer:1", method):
            answer: bytes = await peer.unary_unary(f"/{SERVICE}/{method}")(request, timeout=SECONDS)
            return answer


@contextlib.asynccontextmanager
async def held(running: Running, secret: str, count: int) -> AsyncIterator[list[Any]]:
    """Have ``count`` calls running."""
    async with running.channel(secret) as peer:
        calls = [peer.unary_stream(f"/{SERVICE}/Held")(b"") for _ in range(count)]
        for call in calls:
            assert await call.read() == b"held"
        try:
            yield calls
        finally:
            for call in calls:
                call.cancel()


async def until_free(running: Running, secret: str) -> bytes:
    """Call until there is room again: the server hears of a cancelled call a moment after the client."""
    async with asyncio.timeout(SECONDS):
        while True:
            with contextlib.suppress(BusyError):
                return await running.call(secret=secret)
            await asyncio.sleep(0.01)


class TestLimits:
    async def test_a_token_has_no_more_calls_than_its_own_limit(self, start: Start, logs: list[Any]) -> None:
        async with start() as running:
            async with held(running, GREEDY, 2):
                with pytest.raises(BusyError) as caught:
                    await running.call(secret=GREEDY)
                assert caught.value.fields == {
                    "field": "token.max_calls",
                    "value": 2,
                    "limit": 2,
                    "retry_after_ms": 500,
                }
                assert caught.value.retryable
                assert await running.call(secret=SECRET) == b"ab"
            assert await until_free(running, GREEDY) == b"ab"
        assert "crowd" in refusals(logs)[0]["reason"]

    async def test_a_daemon_has_no_more_calls_than_its_limit_and_health_is_not_counted(self, start: Start) -> None:
        async with start(max_calls=3) as running:
            async with held(running, SECRET, 3):
                for kind in KINDS:
                    with pytest.raises(BusyError, match="max_calls: this daemon has 3 calls running, the limit is 3"):
                        await running.call(kind, GREEDY)
                async with running.channel(None) as peer:
                    stub = health_pb2_grpc.HealthStub(peer)
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert await until_free(running, GREEDY) == b"ab"

    async def test_a_refused_call_takes_no_place(self, start: Start) -> None:
        async with start(max_calls=1) as running:
            for _ in range(20):
                with pytest.raises(AuthenticationError):
                    await running.call(secret="kvf_wrong")  # noqa: S106
            with pytest.raises(InvalidRequestError):
                await unary(running, "Fails")
            assert await running.call() == b"ab"

    @pytest.mark.parametrize("caller", [None, Token(name="a", digest="0" * 64, max_calls=2)])
    def test_places_are_given_back_whatever_happens(self, caller: Token | None) -> None:
        limits = CallLimits(2)
        for error in (None, ValueError, asyncio.CancelledError, GeneratorExit):
            with contextlib.suppress(BaseException), limits.running(caller):
                if error:
                    raise error
        with limits.running(caller), limits.running(caller), pytest.raises(BusyError), limits.running(caller):
            pass
        with limits.running(caller):
            pass


class TestRefusalLog:
    def test_a_flood_is_cut_and_counted(self, logs: list[Any]) -> None:
        now = 0.0
        log = RefusalLog(clock=lambda: now)
        for _ in range(LINES_PER_WINDOW + 50):
            log.refused("no token", method="/a/b", peer="ipv4:192.0.2.1:1")
        assert len(logs) == LINES_PER_WINDOW
        now = 10.0
        log.refused("no token", method="/a/b", peer="ipv4:192.0.2.1:1")
        log.refused("no token", method="/a/b", peer="ipv4:192.0.2.1:1")
        assert [line.get("left_out") for line in logs[-2:]] == [50, None]


# --- Strangers that speak HTTP/2 by hand ------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(path: str, *more: tuple[str, str]) -> bytes:
    """Encode request headers as HPACK literals that enter no table."""
    pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    pairs += [("content-type", "application/grpc"), ("te", "trailers"), *more]
    return b"".join(b"\x00" + text(name) + text(value) for name, value in pairs)


def text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
END_HEADERS = 4


async def open_call(address: Address, path: str, *more: tuple[str, str]) -> tuple[Any, Any]:
    """Begin a call of which not one byte of a message comes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(HELLO + frame(1, END_HEADERS, 1, header_block(path, *more)))
    await writer.drain()
    return reader, writer


async def answered(reader: Any, word: bytes, seconds: float = SECONDS) -> bytes:
    """Read until a word arrives. The statuses and messages that gRPC sends are not compressed."""
    data = b""
    async with asyncio.timeout(seconds):
        while word not in data:
            more = await reader.read(65536)
            assert more, data
            data += more
    return data


class TestRequestsThatDoNotCome:
    async def test_a_stranger_is_refused_before_its_request_has_come(self, start: Start, logs: list[Any]) -> None:
        async with start() as running:
            reader, writer = await open_call(running.address, f"/{SERVICE}/Unary")
            await answered(reader, b"shows none")
            writer.close()
        assert len(refusals(logs)) == 1

    @pytest.mark.parametrize("method", ["Unary", "Answers"])
    async def test_a_request_that_does_not_come_gives_its_place_back(
        self, start: Start, logs: list[Any], method: str
    ) -> None:
        async with start(max_calls=1, request_seconds=0.2) as running:
            token = ("authorization", f"Bearer {SECRET}")
            reader, writer = await open_call(running.address, f"/{SERVICE}/{method}", token)
            # Half of a message of 100 bytes.
            writer.write(frame(0, 0, 1, b"\x00" + struct.pack(">I", 100) + b"x" * 50))
            await answered(reader, b"not complete after 0.2 s")
            writer.close()
            assert await running.call() == b"ab"
        assert [line["reason"] for line in refusals(logs)] == ["request: not complete after 0.2 s"]

    async def test_a_health_check_that_does_not_come_is_cut_off_too(self, start: Start) -> None:
        async with start(request_seconds=0.1) as running:
            reader, writer = await open_call(running.address, auth.HEALTH_CHECK)
            await answered(reader, b"not complete")
            writer.close()

    async def test_a_caller_that_goes_away_gives_its_place_back(self, start: Start) -> None:
        async with start(max_calls=1) as running:
            token = ("authorization", f"Bearer {SECRET}")
            _, writer = await open_call(running.address, f"/{SERVICE}/Unary", token)
            async with asyncio.timeout(SECONDS):
                while not await is_busy(running):
                    pass
            writer.transport.abort()
            assert await until_free(running, SECRET) == b"ab"

    async def test_a_call_that_ends_without_a_request_is_refused(self, start: Start) -> None:
        async with start() as running, running.channel() as peer:
            call = peer.stream_unary(f"/{SERVICE}/Unary")(iter([]), timeout=SECONDS)
            with pytest.raises(InvalidRequestError, match="ended without one"), rpc.translating("peer:1", "Unary"):
                await call

    async def test_a_request_that_is_no_message_is_refused_in_one_line(self, start: Start, logs: list[Any]) -> None:
        async with start() as running:
            with pytest.raises(InvalidRequestError, match="not a message"):
                await unary(running, "Parsed", b"\xff\xff\xff")
        assert len(refusals(logs)) == 1


async def is_busy(running: Running) -> bool:
    try:
        await running.call()
    except BusyError:
        return True
    return False


async def test_silent_connections_are_closed_and_meanwhile_harm_nobody(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 300)
    async with start() as running:
        silent = [socket.create_connection((running.address.host, running.address.port)) for _ in range(20)]
        try:
            assert await running.call() == b"ab"
            for connection in silent:
                connection.settimeout(SECONDS)
                # Settings come at once, and then the end.
                await asyncio.to_thread(drain, connection)
        finally:
            for connection in silent:
                connection.close()
        assert await running.call() == b"ab"


def drain(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
