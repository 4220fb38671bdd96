"""Measuring the way to a receiver: against a server whose delays are known, and what is remembered of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvferry.core import errors, rpc
from kvferry.core.addresses import Address
from kvferry.core.choice import LinkSpeed
from kvferry.core.metrics import SenderMetrics
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import common_pb2
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender import link, transfer
from kvferry.sender.link import KEPT_SECONDS, PADDINGS, TELLING_BYTES, Links, bytes_per_second, survey

HERE = Address("127.0.0.1", 7412)
PLAINTEXT = PeerSecurity()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


@dataclass
class FarReceiver(pb_grpc.ReceiverServiceServicer):
    """A receiver behind a link: every Measure takes a delay, and its bytes the time that they need."""

    delay: float = 0.0
    speed: float = 1e12
    reads: float = 50.0
    busy: int = 0
    lost: int = 0
    breaks_at: int = -1
    sizes: list[int] = field(default_factory=list)
    messages: int = 0

    async def Describe(self, request: pb.ReceiverServiceDescribeRequest, context: Any) -> Any:
        async with rpc.reporting(context):
            if self.busy > 0:
                self.busy -= 1
                raise errors.BusyError("busy", retry_after_ms=1)
        response = pb.ReceiverServiceDescribeResponse(
            node=common_pb2.NodeDescription(role="receiver", prefill_tokens_per_second=self.reads)
        )
        self.messages += request.ByteSize() + response.ByteSize()
        return response

    async def Measure(self, request: pb.MeasureRequest, context: Any) -> pb.MeasureResponse:
        size = len(request.padding)
        self.sizes.append(size)
        if len(self.sizes) == self.breaks_at:
            self.messages += request.ByteSize()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        await asyncio.sleep(self.delay + size / self.speed)
        response = pb.MeasureResponse(received=max(size - self.lost, 0))
        self.messages += request.ByteSize() + response.ByteSize()
        return response


@contextlib.asynccontextmanager
async def serving(receiver: FarReceiver) -> AsyncIterator[Address]:
    server = grpc.aio.server()
    pb_grpc.add_ReceiverServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        await server.stop(0)


def metrics() -> SenderMetrics:
    return SenderMetrics("tiny", {"kvferry": "1", "device": "cpu"})


def counted(one: SenderMetrics, name: str) -> float:
    return one.registry.get_sample_value(f"kvferry_{name}_bytes_total", {"kind": "measure"}) or 0.0


async def test_delay_and_speed_are_told_apart() -> None:
    receiver = FarReceiver(delay=0.03, speed=2e6)
    async with serving(receiver) as address:
        found = await survey(address, PLAINTEXT, 10, Links(), metrics())
    assert 30 <= found.link.rtt_ms < 60
    # 16 KiB are gone in 8 ms, which says little beside the round trip; 256 KiB take 131.
    assert receiver.sizes == [0, 0, 0, PADDINGS[0], PADDINGS[1]]
    assert found.link.bytes_per_second == pytest.approx(2e6, rel=0.25)


async def test_a_slow_link_carries_no_more_than_it_must() -> None:
    receiver = FarReceiver(speed=200e3)
    async with serving(receiver) as address:
        found = await survey(address, PLAINTEXT, 10, Links(), metrics())
    assert receiver.sizes == [0, 0, 0, PADDINGS[0]]
    assert found.link.bytes_per_second == pytest.approx(200e3, rel=0.25)


async def test_every_byte_of_a_survey_is_counted_and_no_link_is_measured_twice() -> None:
    receiver, links, one = FarReceiver(delay=0.002), Links(), metrics()
    async with serving(receiver) as address:
        first = await survey(address, PLAINTEXT, 10, links, one)
        assert first.probe_bytes == receiver.messages
        assert counted(one, "sent") >= sum(receiver.sizes) >= PADDINGS[0]
        calls, sent, before = len(receiver.sizes), counted(one, "sent"), receiver.messages
        # What it runs may have changed meanwhile.
        receiver.reads = 70.0
        second = await survey(address, PLAINTEXT, 10, links, one)
    assert (first.node.prefill_tokens_per_second, second.node.prefill_tokens_per_second) == (50.0, 70.0)
    assert second.link == first.link
    assert (len(receiver.sizes), counted(one, "sent")) == (calls, sent)
    assert second.probe_bytes == receiver.messages - before > 0
    assert counted(one, "received") > 0


async def test_what_was_measured_in_vain_is_counted_too() -> None:
    receiver, one = FarReceiver(delay=0.002, breaks_at=4), metrics()
    async with serving(receiver) as address:
        found = await survey(address, PLAINTEXT, 10, Links(), one)
    assert receiver.sizes[:5] == [0, 0, 0, PADDINGS[0], 0]
    assert found.probe_bytes == receiver.messages
    assert counted(one, "sent") > sum(receiver.sizes) > 2 * PADDINGS[0]


async def test_a_busy_receiver_is_asked_again_and_not_for_ever() -> None:
    receiver = FarReceiver(busy=2)
    async with serving(receiver) as address:
        assert (await survey(address, PLAINTEXT, 10, Links(), metrics())).node.role == "receiver"
        receiver.busy = 100
        with pytest.raises(errors.BusyError):
            await survey(address, PLAINTEXT, 10, Links(), metrics())
    assert receiver.busy == 100 - transfer.ATTEMPTS


@pytest.mark.parametrize("reads", [0.0, float("nan"), float("inf"), -5.0, 5e-324, 1e300])
async def test_a_receiver_that_does_not_say_how_fast_it_reads_is_refused(reads: float) -> None:
    async with serving(FarReceiver(reads=reads)) as address:
        with pytest.raises(errors.PeerError, match=f"^{address}: prefill_tokens_per_second: ") as caught:
            await survey(address, PLAINTEXT, 10, Links(), metrics())
    assert f": {reads:g} is no speed between " in caught.value.message


@pytest.mark.parametrize(
    ("lost", "words"), [(-1, "took 1 of 0 bytes"), (1, f"took {PADDINGS[0] - 1} of {PADDINGS[0]} bytes")]
)
async def test_a_receiver_that_took_another_number_of_bytes_is_not_believed(lost: int, words: str) -> None:
    async with serving(FarReceiver(lost=lost)) as address:
        with pytest.raises(errors.PeerError, match=words):
            await survey(address, PLAINTEXT, 10, Links(), metrics())


@pytest.mark.parametrize(
    ("milliseconds", "rtt_ms", "expected"),
    [(1100.0, 100.0, 1e6), (1000.0, 0.0, 1e6), (100.0, 100.0, 1e8), (100.0, 500.0, 1e8)],
)
def test_the_round_trip_is_no_part_of_the_speed(milliseconds: float, rtt_ms: float, expected: float) -> None:
    assert bytes_per_second(10**6, milliseconds, rtt_ms) == pytest.approx(expected)


# What is remembered


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_measurement_holds_for_a_while() -> None:
    clock = Clock()
    links = Links(clock)
    assert links.known(HERE) is None
    links.keep(HERE, LinkSpeed(5.0, 1e6))
    clock.now += KEPT_SECONDS
    assert links.known(HERE) == LinkSpeed(5.0, 1e6)
    clock.now += 0.1
    assert links.known(HERE) is None


def test_a_transfer_tells_the_speed_and_makes_the_measurement_new() -> None:
    clock = Clock()
    links = Links(clock)
    links.moved(HERE, 10**9, 1000.0)
    assert links.known(HERE) is None
    links.keep(HERE, LinkSpeed(5.0, 1e6))
    links.moved(HERE, TELLING_BYTES - 1, 1.0)
    links.moved(HERE, 10**9, 0.0)
    assert links.known(HERE) == LinkSpeed(5.0, 1e6)
    clock.now += KEPT_SECONDS - 1
    links.moved(HERE, 4 * 10**6, 1005.0)
    assert links.known(HERE) == LinkSpeed(5.0, pytest.approx(4e6))
    clock.now += KEPT_SECONDS - 1
    assert links.known(HERE) is not None
    assert links.known(Address("127.0.0.1", 7413)) is None


def test_addresses_that_come_with_requests_do_not_pile_up() -> None:
    links = Links()
    for port in range(1, 1000):
        links.keep(Address("10.0.0.1", port), LinkSpeed(1.0, 1.0))
    assert len(links._known) == link._MAX_RECEIVERS
    assert links.known(Address("10.0.0.1", 999)) is not None
    assert links.known(Address("10.0.0.1", 1)) is None
