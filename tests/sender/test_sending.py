"""What a delivery comes to when it is over: the report to the caller, and what the sender counts."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from kvferry.core.ledger import account_from_json
from kvferry.core.metrics import SenderMetrics
from kvferry.core.store import Stored
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.sender import transfer
from kvferry.sender.artifacts import Artifact
from kvferry.sender.link import Links
from kvferry.sender.sending import Send, Sending


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


class Delivering:
    """A sender that delivers one artifact to the receiver at the end of a road."""

    def __init__(self, road: Any, stored: Stored) -> None:
        self.metrics = SenderMetrics("tiny", {"kvferry": "0", "device": "cpu"})
        self._parts: Any = SimpleNamespace(
            config=SimpleNamespace(rpc_seconds=10.0),
            store=SimpleNamespace(pinned=lambda _: contextlib.nullcontext()),
            metrics=self.metrics,
            links=Links(),
        )
        self._send = Send(read=lambda: cast("Any", None), receiver=road.transfer._receiver, security=PeerSecurity())
        self._send.artifact = Artifact(stored, road.account, reused=False)

    async def run(self) -> pb.SendEnd:
        responses = [response async for response in Sending(self._parts).deliver(self._send)]
        return responses[-1].end

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvferry_{name}", labels) or 0.0

    def outcomes(self) -> dict[str, float]:
        return {how: self.counted("sends_total", method="B1", outcome=how) for how in ("moved", "held")}


@pytest.fixture
def delivering(road: Any, stored: Stored) -> Delivering:
    return Delivering(road, stored)


async def test_a_send_whose_receipt_was_lost_reports_and_counts_what_it_moved(
    delivering: Delivering, road: Any, stored: Stored
) -> None:
    async def commit_and_vanish(context: Any, number: int) -> None:
        road.receiver.committed = True
        if number == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    road.receiver.committing = commit_and_vanish
    end = await delivering.run()
    assert end.moved_bytes == stored.manifest.payload.length
    assert end.wire_bytes == len(stored.encoded) + 12345 + 678
    assert account_from_json(end.account_json) == road.receiver.accounts[0]
    assert delivering.outcomes() == {"moved": 1.0, "held": 0.0}
    assert delivering.counted("transfer_seconds_count") == 1.0
    assert delivering.counted("transfer_seconds_sum") * 1000 == pytest.approx(road.receiver.accounts[0].transfer_ms)


async def test_a_send_that_finds_the_artifact_there_is_no_transfer(delivering: Delivering, road: Any) -> None:
    road.receiver.committed = True
    end = await delivering.run()
    assert (end.moved_bytes, end.wire_bytes, road.receiver.accounts) == (0, 0, [])
    assert delivering.outcomes() == {"moved": 0.0, "held": 1.0}
    assert delivering.counted("transfer_seconds_count") == 0.0
