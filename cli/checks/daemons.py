"""Who answers at an address: a kvferry daemon, some other gRPC server, or something else."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.core import channel, rpc, wire
from kvferry.core.addresses import Address
from kvferry.core.errors import AuthenticationError, KvferryError
from kvferry.core.tls import PeerSecurity
from kvferry.core.wire import NodeInfo
from kvferry.proto.v1 import receiver_service_pb2 as receiver_pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as receiver_grpc
from kvferry.proto.v1 import sender_service_pb2 as sender_pb
from kvferry.proto.v1 import sender_service_pb2_grpc as sender_grpc

CALL_SECONDS = 3.0
_TIMED_CHECKS = 3


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        error: why there is no health answer, None when there is one.
        serving: whether it says that it takes calls.
        round_trip: seconds of the fastest of three health checks, the connection standing.
        node: what the daemon says of itself, None when it is no kvferry daemon or keeps silent.
        withheld: why a kvferry daemon keeps silent, "" else.
        skew: seconds that its clock is ahead of ours, None when it does not tell the time.
        skew_bound: most seconds that ``skew`` may be wrong by.
    """

    error: KvferryError | None
    serving: bool = False
    round_trip: float = 0.0
    node: NodeInfo | None = None
    withheld: str = ""
    skew: float | None = None
    skew_bound: float = 0.0


def ask(address: Address, security: PeerSecurity, seconds: float = CALL_SECONDS) -> Answer:
    """Ask whoever is at ``address``; every call waits ``seconds`` at most.

    Raises:
        ConfigError: when a file of ``security`` cannot be used, or the token would cross a network in the clear.
    """
    with channel.open_blocking(address, security) as peer:
        try:
            with rpc.translating(str(address), "a health check"):
                serving, round_trip = _health(peer, seconds)
        except KvferryError as error:
            return Answer(error)
        return _described(peer, str(address), seconds, Answer(None, serving, round_trip))


def _health(peer: grpc.Channel, seconds: float) -> tuple[bool, float]:
    stub: Any = health_pb2_grpc.HealthStub(peer)
    serving, best = False, float("inf")
    for _ in range(1 + _TIMED_CHECKS):
        start = time.perf_counter()
        response = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        best = min(best, time.perf_counter() - start)
        serving = response.status == health_pb2.HealthCheckResponse.SERVING
    return serving, best


def _described(peer: grpc.Channel, address: str, seconds: float, answer: Answer) -> Answer:
    """Add what the daemon says of itself; a sender does not know a receiver's call, and the other way round."""
    calls: tuple[tuple[Any, Any], ...] = (
        (receiver_grpc.ReceiverServiceStub(peer).Describe, receiver_pb.ReceiverServiceDescribeRequest()),
        (sender_grpc.SenderServiceStub(peer).Describe, sender_pb.SenderServiceDescribeRequest()),
    )
    for describe, request in calls:
        before = time.time()
        try:
            with rpc.translating(address, "Describe"):
                node = wire.node_from_message(describe(request, timeout=seconds).node)
        except AuthenticationError as error:
            return replace(answer, withheld=error.message)
        except KvferryError:
            continue
        after = time.time()
        skew = node.unix_time - (before + after) / 2 if node.unix_time else None
        # A clock that was set in between would give a bound below nothing.
        return replace(answer, node=node, skew=skew, skew_bound=max((after - before) / 2, 0.0))
    return answer
