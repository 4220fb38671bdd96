"""Calls without a stream, connections, and the places where a client must not be used."""

from __future__ import annotations

import asyncio
import os
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

from kvferry.client import (
    AsyncClient,
    CancelledError,
    Client,
    DeadlineError,
    InvalidRequestError,
    MethodInfo,
    NotFoundError,
    TransferError,
    UnavailableError,
)


@pytest.fixture
def nobody() -> Any:
    """Return an address where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_methods_and_nodes(kv: Any) -> None:
    assert kv.methods() == [MethodInfo("B1", "serialised", "kv", "custom", False, "here", "All of it.")]  # noqa: FBT003
    for node in (kv.describe_sender(), kv.describe_receiver()):
        assert (node.model, node.weights, node.layers, node.context_length) == ("tiny", "ab" * 32, 2, 4096)


def test_drop(kv: Any, daemons: Any, fakes: Any) -> None:
    assert kv.drop(fakes.OTHER.hex()) is None
    assert daemons.receiver.dropped == [fakes.OTHER]
    with pytest.raises(NotFoundError) as caught:
        kv.drop("0" * 64)
    assert caught.value.fields == {"artifact": "0" * 64}


def test_spans(kv: Any, daemons: Any) -> None:
    assert kv.fetch_spans("ab" * 32, [(0, 5), (5, 5)]) == ["first", "second"]
    assert (daemons.sender.looked_up, daemons.sender.spans) == ("ab" * 32, [(0, 5), (5, 5)])
    with pytest.raises(TransferError, match="2 passages came, 1 were asked for"):
        kv.fetch_spans("ab" * 32, [(0, 5)])


@pytest.mark.parametrize("call", ["artifacts", "describe_receiver", "describe_sender", "methods", "ask", "send"])
def test_an_unreachable_daemon_is_named(open_client: Any, nobody: str, call: str) -> None:
    client = open_client(sender=nobody, receiver=nobody)
    arguments: dict[str, tuple[Any, ...]] = {"ask": ("0" * 64, "Which?"), "send": (b"x",)}
    with pytest.raises(UnavailableError, match=f"^{nobody}: cannot be reached for ") as caught:
        getattr(client, call)(*arguments.get(call, ()))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("Describe", lambda kv: kv.describe_receiver()),
        ("Describe", lambda kv: kv.methods()),
        ("List", lambda kv: kv.artifacts()),
        ("Drop", lambda kv: kv.drop("ab" * 32)),
        ("FetchSpans", lambda kv: kv.fetch_spans("ab" * 32, [(0, 5)])),
    ],
)
def test_a_slow_daemon_is_a_deadline(open_client: Any, daemons: Any, method: str, call: Callable[[Any], Any]) -> None:
    released = threading.Event()
    daemons.receiver.before = daemons.sender.before = lambda _: released.wait(5)
    try:
        with pytest.raises(DeadlineError, match=f"{daemons.address}: no answer to {method} in time"):
            call(open_client(timeout=0.1))
    finally:
        released.set()


def test_a_closed_client_says_so(open_client: Any, fakes: Any) -> None:
    client = open_client()
    client.artifacts()
    client.close()
    client.close()
    calls = [
        client.artifacts,
        client.methods,
        client.describe_sender,
        client.describe_receiver,
        lambda: client.drop(fakes.ARTIFACT.hex()),
        lambda: client.fetch_spans("ab" * 32, [(0, 5)]),
        lambda: client.send(text="x"),
        lambda: client.ask(fakes.ARTIFACT.hex(), "Which?"),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match="client: is closed"):
            call()


def test_closing_ends_what_is_in_flight(daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.endless
    client = Client(receiver=daemons.address)
    stream = client.stream(fakes.ARTIFACT.hex(), "Which?")
    next(stream)
    client.close()
    with pytest.raises(CancelledError):
        next(stream)


async def test_closing_ends_what_is_in_flight_without_cancelling_the_task(daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.endless
    client = AsyncClient(receiver=daemons.address)
    stream = client.stream(fakes.ARTIFACT.hex(), "Which?")
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(CancelledError):
        await reading


CALLS: dict[str, Callable[[AsyncClient], Any]] = {
    "artifacts": lambda kv: kv.artifacts(),
    "drop": lambda kv: kv.drop("ab" * 32),
    "drop, by a prefix": lambda kv: kv.drop("ab" * 4),
    "ask, by a prefix": lambda kv: kv.ask("ab" * 4, "Which?"),
    "ask_many, by a prefix": lambda kv: kv.ask_many("ab" * 4, ["Which?"]),
    "methods": lambda kv: kv.methods(),
    "describe_sender": lambda kv: kv.describe_sender(),
    "describe_receiver": lambda kv: kv.describe_receiver(),
    "fetch_spans": lambda kv: kv.fetch_spans("ab" * 32, [(0, 5)]),
    "ask": lambda kv: kv.ask("ab" * 32, "Which?"),
    "ask_many": lambda kv: kv.ask_many("ab" * 32, ["Which?", "And who?"]),
    "send": lambda kv: kv.send(text="x"),
}


class Held:
    """Holds every call at the daemons until it is let go."""

    def __init__(self, daemons: Any) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        daemons.receiver.before = daemons.sender.before = self.hold
        daemons.receiver.script = daemons.sender.script = self.hold

    def hold(self, *_: object) -> Any:
        self.reached.set()
        self.released.wait(10)
        return iter(())


@pytest.fixture
def held(daemons: Any) -> Iterator[Held]:
    made = Held(daemons)
    yield made
    made.released.set()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_closing_ends_every_call_without_cancelling_its_task(
    daemons: Any, held: Held, call: Callable[[AsyncClient], Any]
) -> None:
    client = AsyncClient(sender=daemons.address, receiver=daemons.address)
    calling = asyncio.ensure_future(call(client))
    assert await asyncio.to_thread(held.reached.wait, 5)
    await client.close()
    with pytest.raises(CancelledError, match=f"^{daemons.address}: [A-Z][A-Za-z]+ was cancelled$"):
        await calling
    assert not calling.cancelled()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_task_that_is_cancelled_stays_cancelled(
    daemons: Any, held: Held, call: Callable[[AsyncClient], Any]
) -> None:
    async with AsyncClient(sender=daemons.address, receiver=daemons.address) as client:
        calling = asyncio.ensure_future(call(client))
        assert await asyncio.to_thread(held.reached.wait, 5)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert calling.cancelled()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_closing_ends_every_blocking_call(daemons: Any, held: Held, call: Callable[[Any], Any]) -> None:
    client = Client(sender=daemons.address, receiver=daemons.address)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, client)
        assert held.reached.wait(5)
        client.close()
        # Of several questions, one that another thread was about to ask may be the first to fail.
        with pytest.raises((CancelledError, InvalidRequestError), match=r"was cancelled$|^client: is closed$"):
            calling.result(5)


def test_a_channel_that_is_closed_before_the_call_is_a_call_that_was_cancelled() -> None:
    channel = grpc.insecure_channel("127.0.0.1:1")
    client = Client(sender_channel=channel, receiver_channel=channel)
    channel.close()
    calls: list[Callable[[], Any]] = [
        client.artifacts,
        client.methods,
        client.describe_receiver,
        lambda: client.drop("ab" * 32),
        lambda: client.fetch_spans("ab" * 32, [(0, 5)]),
        lambda: client.send(text="x"),
        lambda: client.ask("ab" * 32, "Which?"),
        lambda: client.ask_many("ab" * 32, ["Which?", "And who?"]),
    ]
    for call in calls:
        with pytest.raises(CancelledError, match=r"^127\.0\.0\.1:\d+: [A-Z][A-Za-z]+ was cancelled$"):
            call()


@pytest.mark.parametrize("call", ["ask", "ask_many", "send"])
async def test_an_asyncio_stream_that_begins_on_a_closed_channel_is_a_call_that_was_cancelled(call: str) -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    client = AsyncClient(sender_channel=channel, receiver_channel=channel)
    await channel.close()
    with pytest.raises(CancelledError, match=r"^127\.0\.0\.1:\d+: [A-Z][A-Za-z]+ was cancelled$"):
        await CALLS[call](client)


async def test_a_cancelled_task_cancels_its_call(daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.endless
    async with AsyncClient(receiver=daemons.address) as client:
        asking = asyncio.ensure_future(client.ask(fakes.ARTIFACT.hex(), "Which?"))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(daemons.receiver.ended.acquire, timeout=5)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_asyncio_timeouts_work_around_every_call(
    daemons: Any, held: Held, call: Callable[[AsyncClient], Any]
) -> None:
    async with AsyncClient(sender=daemons.address, receiver=daemons.address) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call(client)
        assert not held.released.is_set()


def test_given_channels_are_used_and_left_open(daemons: Any, nobody: str) -> None:
    with grpc.insecure_channel(daemons.address) as channel:
        with Client(sender=nobody, receiver=nobody, sender_channel=channel, receiver_channel=channel) as client:
            assert client.methods()[0].id == "B1"
            assert len(client.artifacts()) == 2
        with Client(receiver=nobody, receiver_channel=channel) as client:
            assert len(client.artifacts()) == 2


async def test_given_asyncio_channels_are_used_and_left_open(daemons: Any, nobody: str) -> None:
    async with grpc.aio.insecure_channel(daemons.address) as channel:
        for _ in range(2):
            async with AsyncClient(
                sender=nobody, receiver=nobody, sender_channel=channel, receiver_channel=channel
            ) as client:
                assert (await client.methods())[0].id == "B1"
                assert len(await client.artifacts()) == 2


def test_no_proxy_stands_between_peers(open_client: Any, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{nobody}")
    assert len(open_client().artifacts()) == 2


def test_another_event_loop_is_refused(daemons: Any) -> None:
    loops = [asyncio.new_event_loop() for _ in range(2)]
    client = AsyncClient(receiver=daemons.address)
    loops[0].run_until_complete(client.artifacts())
    with pytest.raises(InvalidRequestError, match="belongs to another event loop"):
        loops[1].run_until_complete(client.artifacts())
    loops[0].run_until_complete(client.close())
    for loop in loops:
        loop.close()


def test_one_client_serves_four_threads(daemons: Any, fakes: Any) -> None:
    with Client(receiver=daemons.address) as client, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: client.ask(fakes.ARTIFACT.hex(), f"{number}?"), range(40)))
    assert {answer.text for answer in answers} == {fakes.TEXT}
    assert sorted(request.question for request in daemons.receiver.requests) == sorted(f"{n}?" for n in range(40))


def test_four_threads_with_their_own_loops_lose_nothing(
    daemons: Any, fakes: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> int:
        async with AsyncClient(sender=daemons.address, receiver=daemons.address) as client:
            for _ in range(10):
                await client.artifacts()
            report = await client.send(text="x")
            answers = await client.ask_many(report, [f"{number}?" for number in range(10)])
            return sum(answer.text == fakes.TEXT for answer in answers)

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(asyncio.run, work()) for _ in range(4)]
        assert [future.result() for future in done] == [10] * 4
    assert caplog.records == []
    assert capfd.readouterr().err == ""


FORKED = """
import os, sys
from kvferry.client import Client, InvalidRequestError
client = Client(receiver=sys.argv[1])
assert len(client.artifacts()) == 2
child = os.fork()
if child == 0:
    try:
        client.artifacts()
    except InvalidRequestError as error:
        print(error, flush=True)
    with Client(receiver=sys.argv[1], timeout=10) as own:
        print(len(own.artifacts()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(len(client.artifacts()), flush=True)
client.close()
"""


def test_after_a_fork_a_client_asks_for_a_new_one(daemons: Any) -> None:
    view = str(Path(__file__).resolve().parents[2] / ".dev")
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, daemons.address],
        env=os.environ | {"PYTHONPATH": view},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    advice, *counts = done.stdout.splitlines()
    assert advice.startswith("client: belongs to process ")
    assert advice.endswith("after a fork, make a new client")
    assert counts == ["2", "2"]


def test_a_deadline_is_not_hurried(open_client: Any, daemons: Any) -> None:
    daemons.receiver.before = lambda _: time.sleep(0.2)
    assert open_client(timeout=5).describe_receiver().device == "cpu"
