"""What lies between a sender and a receiver, and what the receiver runs: asked and measured over gRPC."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.core import channel, request_ids, rpc, wire
from kvferry.core.addresses import Address
from kvferry.core.choice import LinkSpeed
from kvferry.core.errors import AuthenticationError, KvferryError, PeerError
from kvferry.core.limits import KIB, MIB
from kvferry.core.tls import PeerSecurity
from kvferry.core.wire import NodeInfo
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender.carrier import Counting
from kvferry.sender.transfer import ATTEMPTS, own_token, pause_seconds

Answer = TypeVar("Answer")

KEPT_SECONDS = 60.0
"""How long a measurement holds. A transfer's own speed makes it new."""
TELLING_BYTES = MIB
"""A transfer that moves less says more about round trips than about the link."""
PADDINGS = (16 * KIB, 256 * KIB, MIB)
_ENOUGH_MS = 20.0
# Tokens a second that a machine may read; anything else, 0 for "not known" too, is none to reckon with.
_SLOWEST, _FASTEST = 1e-3, 1e9
_ROUND_TRIPS = 3
_MAX_RECEIVERS = 64
# A call with padding takes no less than this part of its time for the padding, however the round trips vary.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Survey:
    """What a sender knows before it chooses. ``probe_bytes`` crossed for it, both ways."""

    node: NodeInfo
    link: LinkSpeed
    probe_bytes: int


@dataclass
class Tally:
    """Bytes of messages that crossed, both ways, in attempts that failed too."""

    bytes: int = 0


@dataclass
class _Measured:
    link: LinkSpeed
    at: float


class Links:
    """The last measurement of each receiver's link. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The address comes with a request, and there is no end of addresses.
        self._known: OrderedDict[Address, _Measured] = OrderedDict()

    def known(self, receiver: Address) -> LinkSpeed | None:
        """Return a measurement that still holds."""
        measured = self._known.get(receiver)
        if measured is None or self._clock() - measured.at > KEPT_SECONDS:
            return None
        return measured.link

    def keep(self, receiver: Address, link: LinkSpeed) -> None:
        """Remember a measurement."""
        self._known[receiver] = _Measured(link, self._clock())
        self._known.move_to_end(receiver)
        if len(self._known) > _MAX_RECEIVERS:
            self._known.popitem(last=False)

    def moved(self, receiver: Address, count: int, milliseconds: float) -> None:
        """Take a transfer's own speed for the link's, if it moved enough to tell and the round trip is known."""
        link = self.known(receiver)
        if link is not None and count >= TELLING_BYTES and milliseconds > 0:
            self.keep(receiver, LinkSpeed(link.rtt_ms, bytes_per_second(count, milliseconds, link.rtt_ms)))


def bytes_per_second(count: int, milliseconds: float, rtt_ms: float) -> float:
    """Return what a link carries, from a call that took a round trip and the time for its bytes."""
    return count * 1000 / max(milliseconds - rtt_ms, milliseconds * _LEAST_SHARE)


async def survey(receiver: Address, security: PeerSecurity, seconds: float, links: Links, metrics: Counting) -> Survey:
    """Ask a receiver what it runs, and measure the link unless that was done a short while ago.

    Args:
        receiver: its gRPC address.
        security: how it is reached.
        seconds: how long one call may take.
        links: where measurements are kept.
        metrics: of the sender.

    Raises:
        PeerError: when the receiver cannot say how fast it reads.
        KvferryError: when it cannot be reached, after several attempts.
    """
    crossed = Tally()

    async def ask(stub: pb_grpc.ReceiverServiceAsyncStub) -> Survey:
        return await _survey(Probe(stub, receiver, seconds, metrics, crossed), receiver, links)

    return await asked(receiver, security, ask)


async def asked(
    receiver: Address,
    security: PeerSecurity,
    ask: Callable[[pb_grpc.ReceiverServiceAsyncStub], Awaitable[Answer]],
) -> Answer:
    """Return what a receiver answers, over a connection of its own for each attempt.

    Raises:
        KvferryError: when that fails for good, or several times.
    """
    attempt = 1
    while True:
        try:
            async with channel.open_async(receiver, security) as peer:
                return await ask(pb_grpc.ReceiverServiceStub(peer))
        except AuthenticationError as error:
            raise own_token(receiver, error) from error
        except KvferryError as error:
            if not error.retryable or attempt == ATTEMPTS:
                raise
            await asyncio.sleep(pause_seconds(attempt, error))
            attempt += 1


async def _survey(probe: Probe, receiver: Address, links: Links) -> Survey:
    node = await probe.describe()
    speed = node.prefill_tokens_per_second
    if not _SLOWEST <= speed <= _FASTEST:
        raise PeerError(
            f"{receiver}: prefill_tokens_per_second: {speed:g} is no speed between {_SLOWEST:g} and {_FASTEST:g}, and "
            "method auto must know how fast the receiver reads; name a method",
            peer=str(receiver),
            field="prefill_tokens_per_second",
            value=speed,
        )
    link = links.known(receiver)
    if link is None:
        link = await probe.measure()
        links.keep(receiver, link)
    return Survey(node, link, probe.crossed.bytes)


@dataclass
class Probe:
    """A few calls to one receiver."""

    stub: pb_grpc.ReceiverServiceAsyncStub
    receiver: Address
    seconds: float
    metrics: Counting
    crossed: Tally = field(default_factory=Tally)
    clock: Callable[[], float] = time.perf_counter

    async def describe(self) -> NodeInfo:
        """Call Describe."""
        request = pb.ReceiverServiceDescribeRequest()
        self.crossed.bytes += request.ByteSize()
        call = self.stub.Describe(request, timeout=self.seconds, metadata=request_ids.outgoing())
        response = await rpc.answer(call, str(self.receiver), "Describe")
        self.crossed.bytes += response.ByteSize()
        return wire.node_from_message(response.node)

    async def measure(self) -> LinkSpeed:
        """Time empty calls, then growing ones until one takes long enough to tell, on a connection that is there."""
        rtt_ms = statistics.median([await self._call(0) for _ in range(_ROUND_TRIPS)])
        for size in PADDINGS:
            milliseconds = await self._call(size)
            speed = bytes_per_second(size, milliseconds, rtt_ms)
            if milliseconds - rtt_ms >= _ENOUGH_MS:
                break
        return LinkSpeed(rtt_ms, speed)

    async def _call(self, size: int) -> float:
        # Random bytes cannot be compressed on the way.
        request = pb.MeasureRequest(padding=os.urandom(size))
        self.metrics.sent("measure", request.ByteSize())
        self.crossed.bytes += request.ByteSize()
        start = self.clock()
        call = self.stub.Measure(request, timeout=self.seconds, metadata=request_ids.outgoing())
        response = await rpc.answer(call, str(self.receiver), "Measure")
        milliseconds = (self.clock() - start) * 1000
        self.metrics.received("measure", response.ByteSize())
        self.crossed.bytes += response.ByteSize()
        if response.received != size:
            raise PeerError(
                f"{self.receiver}: took {response.received} of {size} bytes of Measure", peer=str(self.receiver)
            )
        return milliseconds
