"""Request ids: taken from the caller or made, the same in logs, metadata and what is called further on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import request_ids
from kvferry.core.logs import logger
from kvferry.core.request_ids import HEADER, RequestIdInterceptor, choose

SERVICE = "kvferry.test.NamedService"
LEGAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"


@given(st.text(alphabet=LEGAL, min_size=1, max_size=64))
def test_a_legal_id_is_the_callers(given_id: str) -> None:
    assert choose([("user-agent", "x"), (HEADER, given_id)]) == given_id


@given(st.text(max_size=80).filter(lambda text: not text or len(text) > 64 or set(text) - set(LEGAL)))
def test_any_other_is_replaced(given_id: str) -> None:
    made = choose([(HEADER, given_id)])
    assert made != given_id
    assert len(made) == 16
    assert set(made) <= set("0123456789abcdef")


@pytest.mark.parametrize("metadata", [None, [], [(HEADER, "a"), (HEADER, "b")], [(HEADER, b"a")], [("x-request", "a")]])
def test_none_or_more_than_one_gets_a_new_one(metadata: Any) -> None:
    assert {len(choose(metadata)) for _ in range(3)} == {16}
    assert choose(metadata) != choose(metadata)


def test_outside_of_a_call_there_is_none() -> None:
    assert request_ids.current() == ""
    assert request_ids.outgoing() == ()


@contextlib.asynccontextmanager
async def serving(*interceptors: Any, **handlers: Any) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[RequestIdInterceptor(), *interceptors])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def returned(call: Any) -> Any:
    return dict(await call.initial_metadata()).get(HEADER)


async def test_the_id_comes_back_also_with_an_error() -> None:
    async def fine(request: bytes, _: Any) -> bytes:
        return request

    async def failing(_: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "nothing", (("more", "1"),))
        return b""

    unary = grpc.unary_unary_rpc_method_handler
    async with serving(Fine=unary(fine), Failing=unary(failing)) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Fine")(b"x", metadata=((HEADER, "mine"),))
        assert (await call, await returned(call)) == (b"x", "mine")
        call = channel.unary_unary(f"/{SERVICE}/Failing")(b"x", metadata=((HEADER, "bad id"),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert dict(caught.value.trailing_metadata())["more"] == "1"
        assert len(dict(caught.value.initial_metadata())[HEADER]) == 16


async def test_concurrent_calls_keep_their_own_ids_in_logs_and_threads() -> None:
    async def handle(request: bytes, _: Any) -> AsyncIterator[bytes]:
        yield request_ids.current().encode()
        await asyncio.sleep(0.05)
        logger("test").info("seen", sent=request.decode())
        yield (await asyncio.to_thread(request_ids.current)).encode()
        yield dict(request_ids.outgoing())[HEADER].encode()

    names = [f"call-{index}" for index in range(8)]

    async def call(channel: grpc.aio.Channel, name: str) -> None:
        stream = channel.unary_stream(f"/{SERVICE}/Handle")(name.encode(), metadata=((HEADER, name),))
        assert {item async for item in stream} == {name.encode()}

    # The capture replaces the processors, so the one that merges the context has to be asked for.
    merge = structlog.contextvars.merge_contextvars
    with structlog.testing.capture_logs(processors=[merge]) as captured:
        async with serving(Handle=grpc.unary_stream_rpc_method_handler(handle)) as channel:
            await asyncio.gather(*(call(channel, name) for name in names))
    seen = {entry["sent"]: entry["request_id"] for entry in captured if entry["event"] == "seen"}
    assert seen == {name: name for name in names}


async def test_streams_in_both_directions_pass_through_unchanged() -> None:
    async def total(requests: AsyncIterator[bytes], _: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def echo(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.upper()

    handlers = {
        "Total": grpc.stream_unary_rpc_method_handler(total),
        "Echo": grpc.stream_stream_rpc_method_handler(echo, response_serializer=lambda item: item + b"!"),
    }
    async with serving(**handlers) as channel:
        assert await channel.stream_unary(f"/{SERVICE}/Total")(iter([b"a", b"b"])) == b"ab"
        stream = channel.stream_stream(f"/{SERVICE}/Echo")(iter([b"a", b"b"]))
        assert [item async for item in stream] == [b"A!", b"B!"]


async def test_a_handler_that_writes_to_its_context_still_works() -> None:
    async with serving() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), metadata=((HEADER, "w"),))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await returned(watch) == "w"
        watch.cancel()


async def test_an_interceptor_behind_it_refuses_under_the_id() -> None:
    seen: list[str] = []

    class Refusing(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            async def refuse(_: Any, context: Any) -> None:
                seen.append(request_ids.current())
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

            return grpc.unary_unary_rpc_method_handler(refuse)

    async with serving(Refusing()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Any")(b"", metadata=((HEADER, "r-1"),))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert dict(caught.value.initial_metadata())[HEADER] == "r-1"
    assert seen == ["r-1"]
