"""How long a transfer took: every attempt's offer and chunks, on a clock that only the receiver moves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from kvferry.core import errors
from kvferry.core.addresses import Address
from kvferry.core.choice import LinkSpeed
from kvferry.core.compat import Reason, ReasonCode, Verdict
from kvferry.core.ledger import SenderAccount, account_from_json
from kvferry.core.metrics import SenderMetrics
from kvferry.core.store import Stored
from kvferry.sender import grpc_transfer, tcp_transfer, transfer
from kvferry.sender.carrier import Chunks, Offered, Receipt
from kvferry.sender.link import TELLING_BYTES, Links
from kvferry.sender.transfer import ATTEMPTS, Transfer

# What each thing takes, in seconds, so that a sum tells what is in it. Connecting belongs to the offer.
CONNECT, OFFER, CHUNK, COMMIT, HANG_UP, PAUSE = 1, 10, 100, 100_000, 1_000_000, 10_000_000
BROKEN = errors.TransferError("the cable was pulled")


@dataclass
class FakeReceiver:
    """A carrier to a receiver whose every step takes its time, and fails at the end of it where that is planned.

    Attributes:
        fails: by attempt, from 1: the stage that fails, or the number of chunks after which the connection breaks.
        committed_from: the first attempt whose offer finds the artifact there.
    """

    stored: Stored
    fails: dict[int, str | int] = field(default_factory=dict)
    committed_from: int = ATTEMPTS + 1
    verdict: Verdict = field(default_factory=Verdict)
    now: float = 0.0
    attempt: int = 0
    here: set[int] = field(default_factory=set)
    accounts: list[SenderAccount] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def connected(self, *_: object) -> AsyncIterator[FakeReceiver]:
        self.attempt += 1
        self._pass(CONNECT, "connect")
        try:
            yield self
        finally:
            self.now += HANG_UP

    async def offer(self, manifest: bytes) -> Offered:
        assert manifest == self.stored.encoded
        self._pass(OFFER, "offer")
        absent = [(index, index + 1) for index in range(self.stored.plan.count) if index not in self.here]
        committed = self.attempt >= self.committed_from
        return Offered(
            self.stored.artifact_id, self.verdict.accepted, self.verdict, [] if committed else absent, committed
        )

    async def put(self, chunks: Chunks, wanted: list[int]) -> AsyncGenerator[int, None]:
        for number, (index, _) in enumerate(chunks.read(wanted)):
            self.now += CHUNK
            if self.fails.get(self.attempt) == number:
                raise BROKEN
            self.here.add(index)
            yield index

    async def commit(self, artifact_id: bytes, account_json: str, seconds: float) -> Receipt:
        assert (artifact_id, seconds > 0) == (self.stored.artifact_id, True)
        self.accounts.append(account_from_json(account_json))
        self._pass(COMMIT, "commit")
        return Receipt(self.stored.manifest.payload.digest, 12345, 678)

    def pause(self, *_: object) -> float:
        self.now += PAUSE
        return 0.0

    def _pass(self, seconds: float, stage: str) -> None:
        self.now += seconds
        if self.fails.get(self.attempt) == stage:
            raise BROKEN


@pytest.fixture(params=["grpc", "tcp"])
def receiver(request: pytest.FixtureRequest, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> FakeReceiver:
    made = FakeReceiver(stored)
    module = {"grpc": grpc_transfer, "tcp": tcp_transfer}[request.param]
    monkeypatch.setattr(module, "connected", made.connected)
    monkeypatch.setattr(transfer, "pause_seconds", made.pause)
    monkeypatch.setattr(transfer, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


@pytest.fixture
def sending(receiver: FakeReceiver, request: pytest.FixtureRequest) -> Transfer:
    address = Address("127.0.0.1", 1, tcp=request.node.callspec.params["receiver"] == "tcp")
    account = SenderAccount(10, 20, 1.0, 2.0, 3.0, 0.0)
    return Transfer(receiver.stored, account, address, 10.0, SenderMetrics("tiny", {"kvferry": "0", "device": "cpu"}))


async def run(sending: Transfer) -> None:
    async with contextlib.aclosing(sending.run()) as steps:
        async for _ in steps:
            pass


@pytest.mark.parametrize(
    ("fails", "attempts", "chunks_lost"),
    [
        ({}, 1, 0),
        ({1: "offer"}, 2, 0),
        ({1: 0}, 2, 1),
        ({1: 7, 2: 3}, 3, 2),
        ({1: "offer", 2: 5, 3: "commit"}, 4, 1),
        ({1: "commit", 2: "commit"}, 3, 0),
    ],
)
async def test_the_time_is_that_of_every_attempts_offer_and_chunks_and_of_nothing_else(
    sending: Transfer, receiver: FakeReceiver, fails: dict[int, str | int], attempts: int, chunks_lost: int
) -> None:
    receiver.fails = fails
    await run(sending)
    assert receiver.attempt == attempts
    expected = (CONNECT + OFFER) * attempts + CHUNK * (receiver.stored.plan.count + chunks_lost)
    assert sending.delivery.transfer_ms == pytest.approx(expected * 1000)
    assert receiver.accounts[-1].transfer_ms == sending.delivery.transfer_ms


async def test_a_connection_that_could_not_be_made_took_its_time_too(sending: Transfer, receiver: FakeReceiver) -> None:
    receiver.fails = {1: "connect"}
    await run(sending)
    expected = CONNECT * 2 + OFFER + CHUNK * receiver.stored.plan.count
    assert sending.delivery.transfer_ms == pytest.approx(expected * 1000)


async def test_a_transfer_that_fails_for_good_has_its_time(sending: Transfer, receiver: FakeReceiver) -> None:
    receiver.fails = dict.fromkeys(range(1, ATTEMPTS + 1), "offer")
    with pytest.raises(errors.TransferError):
        await run(sending)
    assert sending.delivery.transfer_ms == pytest.approx((CONNECT + OFFER) * ATTEMPTS * 1000)


async def test_what_is_there_already_takes_no_time(sending: Transfer, receiver: FakeReceiver) -> None:
    receiver.committed_from = 1
    await run(sending)
    assert (sending.delivery.transfer_ms, receiver.accounts) == (0.0, [])


async def test_an_offer_that_finds_the_artifact_there_adds_nothing_to_what_failed_before(
    sending: Transfer, receiver: FakeReceiver
) -> None:
    receiver.fails, receiver.committed_from = {1: "offer"}, 2
    await run(sending)
    assert sending.delivery.transfer_ms == pytest.approx((CONNECT + OFFER) * 1000)


async def test_a_refusal_takes_the_time_of_its_offer(sending: Transfer, receiver: FakeReceiver) -> None:
    receiver.verdict = Verdict((Reason(ReasonCode.WEIGHTS_MISMATCH, "model.weights", "a", "b"),))
    with pytest.raises(errors.RefusedError):
        await run(sending)
    assert sending.delivery.transfer_ms == pytest.approx((CONNECT + OFFER) * 1000)


async def test_a_broken_attempt_does_not_make_the_link_look_faster_than_it_is(
    sending: Transfer, receiver: FakeReceiver
) -> None:
    count, links, here = receiver.stored.plan.count, Links(), Address("127.0.0.1", 1)
    links.keep(here, LinkSpeed(0.0, 1.0))
    # All chunks but the last one are through when the connection breaks.
    receiver.fails = {1: count - 1}
    await run(sending)
    # As many bytes as tell something about a link, in the same time.
    links.moved(here, TELLING_BYTES, sending.delivery.transfer_ms)
    found = links.known(here)
    assert found is not None
    assert found.bytes_per_second <= TELLING_BYTES / (CHUNK * count)
