"""A daemon's server: it says where it listens, answers health and reflection, and ends without cutting calls off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.core import channel, limits, serving
from kvferry.core.addresses import Address, parse
from kvferry.core.config import NodeConfig, ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError

SERVICE = "kvferry.test.EchoService"
SECONDS = 10.0


@dataclass
class Running:
    """A server in this process, and the calls that reached it."""

    task: asyncio.Task[None]
    address: Address
    entered: asyncio.Event
    release: asyncio.Event

    async def stop(self) -> None:
        """Send the signal that a service manager sends, and wait for the end."""
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            await self.task


async def announced(task: asyncio.Task[None], capsys: pytest.CaptureFixture[str]) -> str:
    """Wait for the line that names the address; log lines may stand before it."""
    lines: list[str] = []
    async with asyncio.timeout(SECONDS):
        while not lines:
            if task.done():
                await task
            await asyncio.sleep(0.005)
            lines = [line for line in capsys.readouterr().out.splitlines() if "listening" in line]
    assert len(lines) == 1
    return lines[0]


Start = Callable[[NodeConfig], "contextlib.AbstractAsyncContextManager[Running]"]


@pytest.fixture
def start(capsys: pytest.CaptureFixture[str]) -> Start:
    """Return a function that serves one streaming method, which answers twice and waits in between."""

    @contextlib.asynccontextmanager
    async def run(config: NodeConfig) -> AsyncIterator[Running]:
        entered, release = asyncio.Event(), asyncio.Event()

        async def echo(request: bytes, _: object) -> AsyncIterator[bytes]:
            yield request
            entered.set()
            await release.wait()
            yield request[::-1]

        def register(server: grpc.aio.Server) -> Iterable[str]:
            handlers = {"Echo": grpc.unary_stream_rpc_method_handler(echo)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
            return [SERVICE]

        task = asyncio.create_task(serving.serve(config, register, announce_json=True))
        try:
            line = await announced(task, capsys)
            yield Running(task, parse(json.loads(line)["address"], "listen"), entered, release)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConfigError):
                await task

    return run


def receiver(listen: str = "127.0.0.1:0", grace: float = 5.0) -> ReceiverConfig:
    return ReceiverConfig(listen=listen, grace_seconds=grace)


async def health(address: Address, name: str) -> int:
    async with channel.open_async(address) as peer:
        request = health_pb2.HealthCheckRequest(service=name)
        response = await health_pb2_grpc.HealthStub(peer).Check(request, timeout=SECONDS)
        return int(response.status)


async def test_health_answers_for_the_daemon_and_for_each_service(start: Start) -> None:
    async with start(receiver()) as running:
        for name in ("", SERVICE, "grpc.health.v1.Health"):
            assert await health(running.address, name) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(running.address, "kvferry.test.Other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(start: Start) -> None:
    async with start(receiver()) as running, channel.open_async(running.address) as peer:
        call = reflection_pb2_grpc.ServerReflectionStub(peer).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        response = await call.read()
        call.cancel()
        names = {service.name for service in response.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_watcher_sees_the_daemon_leave(start: Start) -> None:
    async with start(receiver(grace=0.2)) as running, channel.open_async(running.address) as peer:
        watch = health_pb2_grpc.HealthStub(peer).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(running.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping


async def test_sigterm_lets_a_call_finish_and_takes_no_new_one(start: Start) -> None:
    async with start(receiver()) as running, channel.open_async(running.address) as peer:
        call = peer.unary_stream(f"/{SERVICE}/Echo")(b"abc")
        assert await call.read() == b"abc"
        await running.entered.wait()
        stopping = asyncio.create_task(running.stop())
        async with asyncio.timeout(SECONDS):
            while await accepts_calls(running.address):
                pass
        assert not running.task.done()
        running.release.set()
        assert await call.read() == b"cba"
        assert await call.code() is grpc.StatusCode.OK
        await stopping


async def accepts_calls(address: Address) -> bool:
    try:
        await health(address, "")
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_a_call_that_never_ends_is_cut_off_after_the_grace_period(start: Start) -> None:
    async with start(receiver(grace=0.1)) as running, channel.open_async(running.address) as peer:
        call = peer.unary_stream(f"/{SERVICE}/Echo")(b"abc")
        assert await call.read() == b"abc"
        await running.stop()
        assert await call.code() is not grpc.StatusCode.OK


async def test_handlers_of_signals_are_given_back(start: Start) -> None:
    async with start(receiver()) as running:
        await running.stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        assert asyncio.get_running_loop().remove_signal_handler(number) is False


async def test_a_port_in_use_is_one_clear_error(start: Start) -> None:
    async with start(receiver()) as first:
        with pytest.raises(ConfigError, match=f"^listen: {first.address} cannot be bound") as caught:
            async with asyncio.timeout(SECONDS):
                await serving.serve(receiver(str(first.address)), lambda _: [])
        assert caught.value.fields == {"field": "listen", "value": str(first.address)}
        assert caught.value.message.endswith("Address already in use; is another daemon there?")
        assert await health(first.address, SERVICE) == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_that_another_program_holds_is_refused() -> None:
    with socket.socket() as other:
        # gRPC sets SO_REUSEPORT by default, and two of its servers would then share the port's connections.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^listen: {address} cannot be bound"):
            async with asyncio.timeout(SECONDS):
                await serving.serve(receiver(address), lambda _: [])


async def test_a_freed_port_can_be_taken_again_at_once(start: Start) -> None:
    async with start(receiver()) as first:
        assert await health(first.address, "") == health_pb2.HealthCheckResponse.SERVING
        await first.stop()
    async with start(receiver(str(first.address))) as second:
        assert second.address == first.address


@pytest.mark.parametrize(
    ("config", "as_json", "expected"),
    [
        (SenderConfig(listen="127.0.0.1:0"), False, "kvferry sender: listening on 127.0.0.1:"),
        (ReceiverConfig(listen="[::1]:0"), False, "kvferry receiver: listening on [::1]:"),
        (SenderConfig(listen="127.0.0.1:0"), True, '{"event": "listening", "role": "sender", "address": "127.0.0.1:'),
    ],
)
async def test_the_line_names_the_port_that_was_taken(
    config: NodeConfig, expected: str, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    task = asyncio.create_task(serving.serve(config, lambda _: [], announce_json=as_json))
    line = await announced(task, capsys)
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert line.startswith(expected)
    assert int(line.rstrip('"}').rpartition(":")[2]) > 0


class Door:
    """A companion that notes when it is closed."""

    def __init__(self) -> None:
        self.address = Address("127.0.0.1", 7413)
        self.closed: list[float] = []

    def close(self, grace_seconds: float) -> None:
        self.closed.append(grace_seconds)


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_tcp_worker_is_announced_and_closed_with_the_server(
    capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    door = Door()
    task = asyncio.create_task(serving.serve(receiver(grace=0.25), lambda _: [], tcp=door, announce_json=as_json))
    line = await announced(task, capsys)
    if as_json:
        assert json.loads(line)["tcp"] == "127.0.0.1:7413"
    else:
        assert ", tcp://127.0.0.1:7413" in line
    assert door.closed == []
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert door.closed == [0.25]


@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_a_message_may_be_as_large_as_the_limit_and_no_larger(start: Start, extra: int) -> None:
    async with start(receiver()) as running:
        running.release.set()
        # A client without a limit of its own: the server's is the one on trial.
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(str(running.address), options=options) as peer:
            request = bytes(limits.MAX_MESSAGE_BYTES + extra)
            call = peer.unary_stream(f"/{SERVICE}/Echo")(request)
            if extra <= 0:
                assert [len(answer) async for answer in call] == [len(request)] * 2
            else:
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await health(running.address, "") == health_pb2.HealthCheckResponse.SERVING


async def test_no_channel_goes_through_a_proxy(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    async with start(receiver()) as running:
        assert await health(running.address, "") == health_pb2.HealthCheckResponse.SERVING
        with channel.open_blocking(running.address) as peer:
            stub = health_pb2_grpc.HealthStub(peer)
            response = await asyncio.to_thread(stub.Check, health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert response.status == health_pb2.HealthCheckResponse.SERVING


@contextlib.contextmanager
def standard_error(path: Path) -> Iterator[None]:
    """Write what the process says on standard error, gRPC's C core included, into a file."""
    before = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


async def test_a_connection_that_has_had_its_time_is_closed_without_a_word(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Closing idle connections makes gRPC write about each to the caller's standard error.
    assert "grpc.max_connection_idle_ms" not in dict(channel.server_options())
    monkeypatch.setattr(channel, "CONNECTION_AGE_MS", 300)
    with standard_error(tmp_path / "said"):
        async with start(receiver()) as running, channel.open_async(running.address) as peer:
            call = peer.unary_stream(f"/{SERVICE}/Echo")(b"abc")
            assert await call.read() == b"abc"
            with channel.open_blocking(running.address) as other:
                stub = health_pb2_grpc.HealthStub(other)
                for _ in range(3):
                    await asyncio.sleep(0.5)
                    # A call that began on the first connection goes on, and a new one takes another.
                    again = peer.unary_stream(f"/{SERVICE}/Echo")(b"xy")
                    assert await again.read() == b"xy"
                    again.cancel()
                    await asyncio.to_thread(stub.Check, health_pb2.HealthCheckRequest(), timeout=SECONDS)
                running.release.set()
                assert await call.read() == b"cba"
                await asyncio.sleep(0.5)
    assert (tmp_path / "said").read_bytes() == b""


def test_keepalive_of_a_channel_is_what_a_server_allows() -> None:
    client, server = dict(channel.channel_options()), dict(channel.server_options())
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0
    assert client["grpc.http2.max_pings_without_data"] == 0
    for end in (client, server):
        assert end["grpc.max_receive_message_length"] == end["grpc.max_send_message_length"] == 4 * 2**20
