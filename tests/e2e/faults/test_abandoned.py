"""Peers that stop in the middle and never say so: a frozen one is found out, at either end, by what it does not answer.

Its kernel still answers for it, so that only a ping within the protocol tells.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.core import addresses, channel, errors, limits, rpc
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.receiver.intake import Intake

QUICK, HELD = 40, 30
# Messages of 1 MiB between a caller and a handler that stops: the one that it works on and the one that it has read
# ahead; gRPC's window, which it renews once after the last read; and the one that the caller cannot finish. What lies
# in the sockets is within the window.
AHEAD = 2 + 2 * limits.MAX_MESSAGE_BYTES // limits.MIB + 1

CALLER = """
import sys, threading, time
from kvferry.core import addresses, channel
from kvferry.proto.v1 import receiver_service_pb2_grpc as grpc

def nothing():
    time.sleep(1000)
    yield

with channel.open_blocking(addresses.parse(sys.argv[1], "receiver")) as opened:
    call = grpc.ReceiverServiceStub(opened).Put(nothing())
    call.initial_metadata()
    print("open", flush=True)
    time.sleep(1000)
"""


SERVER = """
import asyncio
import grpc
from kvferry.core import channel

async def wait(requests, context):
    await context.send_initial_metadata(())
    await asyncio.sleep(1000)

async def serve():
    server = grpc.aio.server(options=channel.server_options())
    handler = grpc.stream_unary_rpc_method_handler(wait)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.Slow", {"Call": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.sleep(1000)

asyncio.run(serve())
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_MS", 500)


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a program and yield it with the first line that it prints."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_caller_that_is_frozen_loses_its_place(
    impatient: None, here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    receiver = here("receiver", tiny_model_dir(), max_calls=1)
    with running(CALLER, receiver.address) as (caller, said):
        assert said == "open"
        driver = peers(receiver=receiver.address)
        # As long as it lives it keeps its place, however long it says nothing.
        deadline = time.monotonic() + 1.8
        while time.monotonic() < deadline:
            with pytest.raises(errors.BusyError, match="max_calls: this daemon has 1 calls running") as caught:
                driver.listed()
            assert caught.value.fields["retry_after_ms"] == 500
            time.sleep(0.2)
        caller.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        while True:
            try:
                driver.listed()
                break
            except errors.BusyError:
                # Far less than the minute that a silent upload is given.
                assert time.monotonic() - start < 20
                time.sleep(0.1)


def test_a_daemon_that_is_frozen_ends_the_call(impatient: None) -> None:
    with running(SERVER) as (server, port), channel.open_blocking(addresses.parse(f"127.0.0.1:{port}", "t")) as opened:
        call = opened.stream_unary("/t.Slow/Call").future(iter(()))
        assert call.initial_metadata() is not None
        with pytest.raises(grpc.FutureTimeoutError):
            call.exception(timeout=1.8)
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.UnavailableError), rpc.translating(f"127.0.0.1:{port}", "Call"):
            call.result(timeout=20)


def test_a_daemon_pings_its_callers_as_they_ping_it() -> None:
    of_a_channel, of_a_server = dict(channel.channel_options()), dict(channel.server_options())
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms"):
        assert of_a_channel[name] == of_a_server[name] > 0
    # Neither end runs out of pings, nor takes the other's for abuse.
    assert of_a_channel["grpc.http2.max_pings_without_data"] == of_a_server["grpc.http2.max_pings_without_data"] == 0
    assert of_a_server["grpc.http2.max_ping_strikes"] == 0
    assert of_a_server["grpc.http2.min_ping_interval_without_data_ms"] <= of_a_channel["grpc.keepalive_time_ms"]


def call(opened: grpc.Channel, seconds: float = 5.0) -> grpc.StatusCode:
    """Ask for a call that no such server has, and return how that ended."""
    try:
        opened.unary_unary("/t.Slow/Nothing")(b"", timeout=seconds)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code
    raise AssertionError("somebody answered")


def test_a_daemon_that_starts_again_is_found_at_once() -> None:
    """What an older channel learned of it while it was down holds no new one up; the older one looks again soon."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    address = addresses.parse(f"127.0.0.1:{port}", "t")
    with channel.open_blocking(address) as older:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert call(older) is grpc.StatusCode.UNAVAILABLE
            time.sleep(0.1)
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        server.add_insecure_port(str(address))
        server.start()
        with channel.open_blocking(address) as newer:
            assert call(newer) is grpc.StatusCode.UNIMPLEMENTED
        until = time.monotonic() + 10
        while call(older) is grpc.StatusCode.UNAVAILABLE:
            assert time.monotonic() < until
            time.sleep(0.05)
        server.stop(None).wait()
    # After a longer absence gRPC would look every two minutes.
    assert dict(channel.channel_options())["grpc.max_reconnect_backoff_ms"] <= 2000


def test_a_slow_receiver_slows_its_sender(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks wait at the sender, not in a queue of the receiver's."""
    sent, go_on = 0, threading.Event()

    def hold(_: Intake, artifact_id: bytes, index: int, *__: object) -> None:
        # Quick at first, so that gRPC would open its window where it may.
        if index >= QUICK:
            go_on.wait(60)

    def chunks() -> Iterator[pb.PutRequest]:
        nonlocal sent
        for index in range(QUICK + HELD):
            sent += 1
            yield pb.PutRequest(artifact_id=bytes(32), index=index, data=bytes(limits.MIB))

    monkeypatch.setattr(Intake, "put", hold)
    driver = peers(receiver=here("receiver", tiny_model_dir()).address)
    acknowledged = driver.receiving.Put(chunks(), timeout=60)
    try:
        before = -1
        while acknowledged.is_active() and (sent < QUICK or sent != before):
            before = sent
            time.sleep(0.3)
    finally:
        go_on.set()
    assert before - QUICK <= AHEAD
    assert [response.index for response in acknowledged] == list(range(QUICK + HELD))
