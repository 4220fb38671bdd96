"""Errors over a real connection: the same class, line and fields at the other end, whatever the other end is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import errors, rpc
from kvferry.core.errors import KvferryError
from kvferry.proto.v1 import receiver_service_pb2 as receiver_pb

CLOSED_AT_ONCE = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
METHOD = "/test.Service/Call"
VALUES = st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
FIELDS = st.recursive(
    VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary(), inner), max_leaves=5
)
Handler = Callable[[bytes, Any], Awaitable[bytes]]


@contextlib.asynccontextmanager
async def serving(handler: Handler, parse: Any = None) -> AsyncIterator[Callable[..., Awaitable[bytes]]]:
    """Serve one unary method and yield a function that calls it."""
    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_unary(METHOD, response_deserializer=parse)
    finally:
        await server.stop(None)


async def carried(error: KvferryError) -> tuple[KvferryError, str]:
    """Raise an error in a server and return what a client gets, with the status's name."""

    async def fail(_: bytes, context: Any) -> bytes:
        async with rpc.reporting(context):
            raise error

    async with serving(fail) as call:
        with pytest.raises(KvferryError) as caught, rpc.translating("peer:1", "Call"):
            await call(b"")
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    return caught.value, cause.code().name


async def failing_with(code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, Any], ...] = ()) -> KvferryError:
    """Return what a client of ours makes of a status that no kvferry daemon made."""

    async def fail(_: bytes, context: Any) -> bytes:
        await context.abort(code, details, trailing_metadata=metadata)
        return b""

    async with serving(fail) as call:
        with pytest.raises(KvferryError) as caught, rpc.translating("peer:1", "Call"):
            await call(b"")
    return caught.value


@pytest.mark.parametrize("cls", errors.error_classes().values(), ids=lambda cls: cls.__name__)
async def test_every_error_is_rebuilt(cls: type[KvferryError]) -> None:
    sent = cls("chunk 3: digest 12…, expected 34… — 門", chunk=3, ratio=0.5, expected="34", nothing=None)
    got, status = await carried(sent)
    assert type(got) is cls
    assert (got.message, got.fields, got.retryable) == (sent.message, sent.fields, sent.retryable)
    assert status == cls.status


def test_codes_are_distinct_and_statuses_exist() -> None:
    classes = errors.error_classes()
    assert all(code == cls.code and hasattr(grpc.StatusCode, cls.status) for code, cls in classes.items())
    pending, count = [KvferryError], 0
    while pending:
        count += 1
        pending.extend(pending.pop().__subclasses__())
    assert len(classes) == count


@pytest.mark.parametrize(
    "text", ["x" * 20_000, "門" * 20_000, "🚢" * 20_000, "line\n" * 5000, "%" * 20_000, "\x00" * 9000]
)
async def test_a_long_value_is_shortened_and_the_error_stays_what_it_is(text: str) -> None:
    got, _ = await carried(errors.UnknownMethodError(f"method: {text!r}", field="method", value=text, other="kept"))
    assert type(got) is errors.UnknownMethodError
    assert got.message.startswith("method: ")
    assert 200 < len(got.message) < 3100
    assert got.fields["field"] == "method"
    assert got.fields["other"] == "kept"


async def test_reasons_travel_whole() -> None:
    verdict = '[{"code":"WEIGHTS_MISMATCH"}]' * 100
    got, _ = await carried(errors.RefusedError("refused", verdict_json=verdict, reasons=100))
    assert got.fields == {"verdict_json": verdict, "reasons": 100}


async def test_more_fields_than_fit_leave_the_first_ones() -> None:
    fields: dict[str, Any] = {f"field{index}": "v" * 100 for index in range(500)}
    got, _ = await carried(errors.StoreError("many", **fields))
    assert type(got) is errors.StoreError
    assert got.fields["field0"] == "v" * 100
    assert 10 < len(got.fields) < 500


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.CancelledError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.TooLargeError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.PeerError),
        (grpc.StatusCode.NOT_FOUND, errors.PeerError),
        (grpc.StatusCode.INTERNAL, errors.PeerError),
        (grpc.StatusCode.UNKNOWN, errors.PeerError),
    ],
)
async def test_a_foreign_status_becomes_the_nearest_error(code: grpc.StatusCode, expected: type[KvferryError]) -> None:
    got = await failing_with(code, "some detail")
    assert type(got) is expected
    assert "peer:1" in got.message
    assert "Call" in got.message


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        msgpack.packb([1, 2]),
        msgpack.packb({"code": "INTEGRITY"}),
        msgpack.packb({"code": "OF_A_NEWER_VERSION", "fields": {}}),
        msgpack.packb({"code": "INTEGRITY", "fields": [1]}),
    ],
)
async def test_metadata_that_is_not_ours_is_no_error_of_ours(packed: bytes) -> None:
    got = await failing_with(grpc.StatusCode.DATA_LOSS, "broken", (("kvferry-error-bin", packed),))
    assert type(got) is errors.PeerError
    assert got.fields == {"status": "DATA_LOSS", "peer": "peer:1", "method": "Call"}


async def test_fields_of_a_stranger_cannot_touch_the_exception() -> None:
    fields = {"self": 1, "message": "other", "chunk": 3, "nested": {"a": 1}, "list": [1]}
    packed = msgpack.packb({"code": "INTEGRITY", "fields": fields})
    got = await failing_with(grpc.StatusCode.DATA_LOSS, "broken", (("kvferry-error-bin", packed),))
    assert type(got) is errors.IntegrityError
    assert got.message == "broken"
    assert got.fields == {"chunk": 3}


@settings(max_examples=50)
@given(st.binary() | FIELDS.map(lambda fields: msgpack.packb({"code": "INTEGRITY", "fields": fields})))
def test_no_metadata_raises_anything_of_its_own(packed: bytes) -> None:
    rebuilt = rpc._unpack(packed, "details")
    assert rebuilt is None or (rebuilt.message == "details" and isinstance(rebuilt, KvferryError))


async def test_a_call_that_takes_too_long_names_peer_and_method() -> None:
    async def slow(_: bytes, _context: Any) -> bytes:
        await asyncio.sleep(30)
        return b""

    async with serving(slow) as call:
        with (
            pytest.raises(errors.DeadlineError, match=r"^peer:1: no answer to Call in time"),
            rpc.translating("peer:1", "Call"),
        ):
            await call(b"", timeout=0.05)


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    # Bound but not listening: nobody else can take the port meanwhile.
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary(METHOD)
            with pytest.raises(errors.UnavailableError, match="cannot be reached") as caught, rpc.translating("p", "C"):
                await call(b"", timeout=10)
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ("Cancelling all calls", "peer:1: is stopping, and ended Call"),
        (
            "Stream removed (Socket closed)",
            "peer:1: the connection broke during Call (Stream removed (Socket closed)); did the daemon end?",
        ),
        (
            "recvmsg:Connection reset by peer",
            "peer:1: the connection broke during Call (recvmsg:Connection reset by peer); did the daemon end?",
        ),
        ("no such luck", "peer:1: cannot be reached for Call (no such luck)"),
        (
            CLOSED_AT_ONCE,
            (
                f"peer:1: cannot be reached for Call ({CLOSED_AT_ONCE}); the peer closed the connection at once: it "
                "may ask for TLS, or refuse the client certificate that was shown"
            ),
        ),
    ],
)
async def test_a_call_that_broke_is_told_from_one_that_never_began(details: str, text: str) -> None:
    error = await failing_with(grpc.StatusCode.UNAVAILABLE, details)
    assert type(error) is errors.UnavailableError
    assert error.retryable
    assert error.message == text


async def test_a_message_comes_as_it_is_and_a_failed_call_as_its_error() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        async with rpc.reporting(context):
            if not request:
                raise errors.NotFoundError("artifact: gone")
        return request

    async with serving(echo) as call:
        assert await rpc.answer(call(b"abc"), "peer:1", "Call") == b"abc"
        with pytest.raises(errors.NotFoundError, match="^artifact: gone$"):
            await rpc.answer(call(b""), "peer:1", "Call")


async def test_what_is_no_message_is_a_peer_error() -> None:
    async def garbage(_: bytes, _context: Any) -> bytes:
        return b"\xff\xff\xff"

    async with serving(garbage, receiver_pb.ListResponse.FromString) as call:
        with pytest.raises(errors.PeerError) as caught:
            await rpc.answer(call(b""), "peer:1", "List")
    assert type(caught.value) is errors.PeerError
    assert caught.value.message == "peer:1: List was answered with something else"
    assert caught.value.fields == {"peer": "peer:1", "method": "List"}


def test_threads_get_the_same_errors_as_coroutines() -> None:
    class Failed(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.DATA_LOSS

        def details(self) -> str:
            return "chunk 3"

        def trailing_metadata(self) -> tuple[tuple[str, Any], ...]:
            return (("other", "x"), ("kvferry-error-bin", msgpack.packb({"code": "INTEGRITY", "fields": {"chunk": 3}})))

    with pytest.raises(errors.IntegrityError) as caught, rpc.translating("p:1", "Put"):
        raise Failed
    assert caught.value.fields == {"chunk": 3}


async def test_what_is_no_error_of_ours_is_not_dressed_up() -> None:
    async def fail(_: bytes, context: Any) -> bytes:
        async with rpc.reporting(context):
            raise ZeroDivisionError

    async with serving(fail) as call:
        with pytest.raises(errors.PeerError) as caught, rpc.translating("peer:1", "Call"):
            await call(b"")
    assert type(caught.value) is errors.PeerError
    assert caught.value.fields["status"] == "UNKNOWN"
