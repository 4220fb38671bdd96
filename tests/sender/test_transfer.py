"""Carrying an artifact to a scripted receiver that misbehaves in every way that a network or a peer can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
import pytest

from kvferry.core import addresses, channel, errors, rpc, wire
from kvferry.core.compat import Reason, ReasonCode, Verdict
from kvferry.core.ledger import SenderAccount, account_from_json
from kvferry.core.metrics import SenderMetrics
from kvferry.core.progress import Progress
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import common_pb2
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender import transfer
from kvferry.sender.transfer import ATTEMPTS, Transfer

ACCOUNT = SenderAccount(10, 20, 1.0, 2.0, 3.0, 0.0)
SECONDS = 10.0
Hook = Callable[[Any, int], Any]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def stored(workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel]) -> Stored:
    """An artifact of a few dozen chunks."""
    artifact = workshop(tiny_model("llama"), chunk_bytes=1024).make("B1", "The ferry leaves at dawn. " * 4)
    assert artifact.stored.plan.count > 20
    return artifact.stored


class FakeReceiver(pb_grpc.ReceiverServiceServicer):
    """A receiver that keeps chunks in memory and does what a test tells it to.

    ``offering``, ``taking`` and ``committing`` run before the honest part, with the call's context and its number from
    1; ``taking`` gets the index of each chunk and may return False to keep the chunk without acknowledging it.
    ``putting`` replaces the honest part of Put.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.chunks: dict[int, bytes] = {}
        self.offers = 0
        self.puts: list[list[int]] = []
        self.accounts: list[SenderAccount] = []
        self.committed = False
        self.verdict = Verdict()
        self.closed_puts = asyncio.Event()
        self.offering: Hook | None = None
        self.taking: Callable[[Any, int, int], Any] | None = None
        self.committing: Hook | None = None
        self.putting: Callable[[AsyncIterator[pb.PutRequest], Any], AsyncIterator[pb.PutResponse]] | None = None
        self.change_offer: Callable[[pb.OfferResponse], None] = lambda _: None
        self.change_receipt: Callable[[pb.Receipt], None] = lambda _: None

    @property
    def count(self) -> int:
        return self.stored.plan.count

    @property
    def sent(self) -> list[int]:
        return [index for indices in self.puts for index in indices]

    async def Offer(self, request: pb.OfferRequest, context: Any) -> pb.OfferResponse:
        self.offers += 1
        assert request.manifest == self.stored.encoded
        if self.offering:
            await self.offering(context, self.offers)
        accepted = self.verdict.accepted
        absent = [(index, index + 1) for index in range(self.count) if index not in self.chunks]
        response = pb.OfferResponse(
            artifact_id=self.stored.artifact_id,
            verdict=wire.verdict_to_message(self.verdict),
            missing=wire.ranges_to_message(absent if accepted and not self.committed else []),
            committed=self.committed,
        )
        self.change_offer(response)
        return response

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: Any) -> AsyncIterator[pb.PutResponse]:
        self.puts.append([])
        try:
            async with rpc.reporting(context):
                async for response in (self.putting or self.take)(request_iterator, context):
                    yield response
        finally:
            self.closed_puts.set()

    async def take(self, requests: AsyncIterator[pb.PutRequest], context: Any) -> AsyncIterator[pb.PutResponse]:
        number = len(self.puts)
        async for request in requests:
            assert request.artifact_id == self.stored.artifact_id
            self.puts[-1].append(request.index)
            said = await self.taking(context, number, request.index) if self.taking else None
            self.stored.plan.check(request.index, request.data)
            self.chunks[request.index] = request.data
            if said is not False:
                yield pb.PutResponse(index=request.index)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        self.accounts.append(account_from_json(request.account_json))
        if self.committing:
            await self.committing(context, len(self.accounts))
        assert sorted(self.chunks) == list(range(self.count))
        self.committed = True
        receipt = pb.Receipt(
            artifact_id=self.stored.artifact_id,
            payload_bytes=self.stored.manifest.payload.length,
            payload_digest=self.stored.manifest.payload.digest,
            received_bytes=12345,
            control_bytes=678,
        )
        self.change_receipt(receipt)
        return pb.CommitResponse(receipt=receipt)


class Road:
    """One transfer to one fake receiver, and the progress that it reported."""

    def __init__(self, stored: Stored, receiver: FakeReceiver, address: str, seconds: float) -> None:
        self.receiver = receiver
        metrics = SenderMetrics("tiny", {"kvferry": "0", "device": "cpu"})
        self.transfer = Transfer(stored, ACCOUNT, addresses.parse(address, "receiver"), seconds, metrics)
        self.progress: list[Progress] = []

    async def drive(self) -> None:
        async with asyncio.timeout(60), contextlib.aclosing(self.transfer.run()) as steps:
            async for step in steps:
                self.progress.append(step)


@pytest.fixture
async def road(stored: Stored) -> AsyncIterator[Road]:
    receiver = FakeReceiver(stored)
    server = grpc.aio.server(options=channel.server_options())
    pb_grpc.add_ReceiverServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Road(stored, receiver, f"127.0.0.1:{port}", SECONDS)
    await server.stop(None)


def hasty(road: Road, seconds: float = 0.15) -> None:
    road.transfer._seconds = seconds


async def for_ever(*_: object) -> None:
    await asyncio.sleep(3600)


def whole_payload(road: Road) -> bytes:
    return b"".join(road.receiver.chunks[index] for index in range(road.receiver.count))


async def test_everything_arrives_once_and_in_order(road: Road, stored: Stored) -> None:
    await road.drive()
    assert road.receiver.puts == [list(range(road.receiver.count))]
    assert whole_payload(road) == stored.payload_path.read_bytes()
    assert road.receiver.committed
    delivery = road.transfer.delivery
    assert delivery.moved_bytes == stored.manifest.payload.length
    assert delivery.traffic is not None
    assert (delivery.traffic.received_bytes, delivery.traffic.control_bytes) == (12345, 678)
    assert delivery.traffic.wire_bytes == len(stored.encoded) + 12345 + 678


async def test_the_account_travels_with_the_time_that_the_transfer_took(road: Road) -> None:
    await road.drive()
    (account,) = road.receiver.accounts
    assert account.transfer_ms > 0
    assert msgspec.structs.replace(account, transfer_ms=0.0) == ACCOUNT


async def test_progress_counts_bytes_and_never_goes_back(road: Road, stored: Stored) -> None:
    await road.drive()
    assert list(dict.fromkeys(step.stage for step in road.progress)) == ["offer", "transfer", "commit"]
    done = [step.done for step in road.progress if step.stage == "transfer"]
    payload = stored.manifest.payload
    assert done == [0, *(stored.plan.range(index)[1] for index in range(road.receiver.count))]
    assert done[-1] == payload.length
    assert {step.total for step in road.progress if step.stage == "transfer"} == {payload.length}
    assert road.progress[-1] == Progress("commit", 1, 1)


async def test_what_is_there_already_is_not_sent(road: Road) -> None:
    road.receiver.committed = True
    await road.drive()
    assert (road.receiver.puts, road.receiver.accounts) == ([], [])
    assert road.transfer.delivery.moved_bytes == 0
    assert road.transfer.delivery.traffic is None


async def test_only_missing_chunks_are_sent(road: Road, stored: Stored) -> None:
    here = {0, 1, 5, 6, 7, road.receiver.count - 1}
    road.receiver.chunks = {index: stored.read_chunk(index) for index in here}
    await road.drive()
    assert road.receiver.puts == [[index for index in range(road.receiver.count) if index not in here]]
    assert whole_payload(road) == stored.payload_path.read_bytes()
    moved = stored.manifest.payload.length - sum(len(stored.read_chunk(index)) for index in here)
    assert road.transfer.delivery.moved_bytes == moved
    first = next(step for step in road.progress if step.stage == "transfer")
    assert first.done == stored.manifest.payload.length - moved


async def test_with_every_chunk_there_only_the_commit_is_left(road: Road, stored: Stored) -> None:
    road.receiver.chunks = {index: stored.read_chunk(index) for index in range(road.receiver.count)}
    await road.drive()
    assert road.receiver.puts == []
    assert road.receiver.committed


async def test_a_broken_connection_resumes_where_it_stopped(road: Road, stored: Stored) -> None:
    async def break_twice(context: Any, number: int, index: int) -> None:
        if (number, index) in ((1, 7), (2, 15)):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cable was pulled")

    road.receiver.taking = break_twice
    await road.drive()
    assert len(road.receiver.puts) == 3
    assert [indices[0] for indices in road.receiver.puts] == [0, 7, 15]
    written = set(range(7))
    # What was written before the break is never sent again; what was only on its way is.
    assert written.isdisjoint(road.receiver.puts[1])
    assert (written | set(range(7, 15))).isdisjoint(road.receiver.puts[2])
    assert whole_payload(road) == stored.payload_path.read_bytes()
    done = [step.done for step in road.progress if step.stage == "transfer"]
    assert done == sorted(done)


async def test_lost_acknowledgements_cost_no_chunk_twice(road: Road) -> None:
    async def lose_some(_: Any, number: int, index: int) -> bool:
        return number > 1 or index % 3 == 0

    road.receiver.taking = lose_some
    await road.drive()
    assert road.receiver.sent == list(range(road.receiver.count))
    assert road.receiver.offers == 2
    assert road.receiver.committed


async def test_acknowledgements_that_stay_out_are_an_error_that_names_the_first(road: Road) -> None:
    async def lose_two(_: Any, __: int, index: int) -> bool:
        return index not in (4, 9)

    def ask_again(response: pb.OfferResponse) -> None:
        if road.receiver.offers > 1:
            response.missing.extend(wire.ranges_to_message([(4, 5), (9, 10)]))

    road.receiver.taking = lose_two
    road.receiver.change_offer = ask_again
    with pytest.raises(errors.TransferError, match="chunk 4: not acknowledged, 2 in all") as caught:
        await road.drive()
    assert caught.value.fields == {"chunk": 4, "missing": 2}
    assert road.receiver.offers == ATTEMPTS
    assert road.receiver.accounts == []


@pytest.mark.parametrize("index", [0, 3, 1000, 2**32 - 1])
async def test_an_acknowledgement_for_nothing_that_was_sent_stops_the_transfer(road: Road, index: int) -> None:
    async def invent(requests: AsyncIterator[pb.PutRequest], _: Any) -> AsyncIterator[pb.PutResponse]:
        # Chunk 0 is acknowledged rightly; then chunk 0 again, or one that was not asked for, or does not exist.
        await anext(requests)
        yield pb.PutResponse(index=0)
        yield pb.PutResponse(index=index)
        await asyncio.sleep(3600)

    def skip_chunk_3(response: pb.OfferResponse) -> None:
        del response.missing[3]

    road.receiver.putting = invent
    road.receiver.change_offer = skip_chunk_3
    with pytest.raises(errors.TransferError, match=f"chunk {index}: acknowledged without being sent"):
        await road.drive()
    assert road.receiver.accounts == []
    assert road.receiver.offers == ATTEMPTS


async def test_another_artifact_id_is_noticed_before_any_chunk(road: Road) -> None:
    road.receiver.change_offer = lambda response: setattr(response, "artifact_id", b"\x01" * 32)
    with pytest.raises(errors.IntegrityError, match="the receiver read other bytes"):
        await road.drive()
    assert road.receiver.puts == []


async def test_a_receipt_for_other_bytes_is_not_believed(road: Road) -> None:
    def forge(receipt: pb.Receipt) -> None:
        receipt.payload_digest = b"\x01" * 32
        road.receiver.committed = False

    road.receiver.change_receipt = forge
    with pytest.raises(errors.IntegrityError, match="the receipt names another digest"):
        await road.drive()
    assert road.transfer.delivery.traffic is None
    assert len(road.receiver.accounts) == ATTEMPTS


@pytest.mark.parametrize("count", [1, 3, 4, 40])
async def test_a_refusal_moves_nothing_and_is_not_tried_again(road: Road, count: int) -> None:
    reasons = tuple(
        Reason(ReasonCode.WEIGHTS_MISMATCH, f"layout[{number}].dtype", "a" * 64, "b" * 64) for number in range(count)
    )
    road.receiver.verdict = Verdict(reasons)
    with pytest.raises(errors.RefusedError) as caught:
        await road.drive()
    assert (road.receiver.offers, road.receiver.puts, road.receiver.accounts) == (1, [], [])
    assert caught.value.fields["reasons"] == count
    carried = json.loads(str(caught.value.fields["verdict_json"]))
    assert [reason["field"] for reason in carried] == [reason.field for reason in reasons[:12]]
    assert {(reason["artifact"], reason["receiver"]) for reason in carried} == {("a" * 64, "b" * 64)}
    for reason in reasons[:3]:
        assert str(reason) in caught.value.message
    assert ("more" in caught.value.message) is (count > 3)


async def test_a_refusal_without_a_reason_is_still_a_refusal(road: Road) -> None:
    road.receiver.change_offer = lambda response: response.ClearField("verdict")
    with pytest.raises(errors.RefusedError, match="refused: .*no reason"):
        await road.drive()
    assert road.receiver.puts == []


@pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
async def test_a_receiver_that_never_answers_is_given_up_in_time(road: Road, stage: str) -> None:
    hasty(road)
    setattr(road.receiver, stage, for_ever)
    start = time.perf_counter()
    with pytest.raises(errors.DeadlineError, match="Offer|acknowledgement|Commit"):
        await road.drive()
    # Four attempts of 0.15 s with pauses of milliseconds.
    assert 4 * 0.15 <= time.perf_counter() - start < 5
    assert road.receiver.offers == ATTEMPTS
    assert not road.receiver.committed


async def test_a_receiver_that_stalls_once_is_asked_again(road: Road, stored: Stored) -> None:
    hasty(road, 0.5)

    async def stall_once(_: Any, number: int, index: int) -> None:
        if (number, index) == (1, 5):
            await asyncio.sleep(3600)

    road.receiver.taking = stall_once
    await road.drive()
    assert road.receiver.puts[1][0] == 5
    assert whole_payload(road) == stored.payload_path.read_bytes()


async def test_each_acknowledgement_starts_the_clock_anew(road: Road) -> None:
    hasty(road, 0.4)

    async def slowly(*_: object) -> None:
        await asyncio.sleep(0.012)

    road.receiver.taking = slowly
    start = time.perf_counter()
    await road.drive()
    assert time.perf_counter() - start > 0.4
    assert road.receiver.offers == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.IntegrityError("chunk 3: digest 00…, expected 11…", chunk=3),
        errors.TransferError("chunks: nothing came"),
        errors.UnavailableError("away"),
        errors.DeadlineError("late"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_may_pass_is_tried_again_a_few_times(road: Road, error: errors.KvferryError) -> None:
    async def fail(context: Any, _: int, index: int) -> None:
        if index == 3:
            await rpc.abort(context, error)

    road.receiver.taking = fail
    with pytest.raises(type(error)) as caught:
        await road.drive()
    assert caught.value.message == error.message
    assert len(road.receiver.puts) == road.receiver.offers == ATTEMPTS
    assert road.receiver.accounts == []


@pytest.mark.parametrize(
    "error",
    [
        errors.ContainerError("chunk 3: 5 bytes, expected 1024"),
        errors.TooLargeError("much"),
        errors.ManifestError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_cannot_pass_is_not_tried_again(road: Road, error: errors.KvferryError) -> None:
    async def fail(context: Any, *_: object) -> None:
        await rpc.abort(context, error)

    road.receiver.taking = fail
    with pytest.raises(type(error)) as caught:
        await road.drive()
    assert caught.value.message == error.message
    assert road.receiver.offers == 1


async def test_the_receivers_own_words_are_heard_while_chunks_are_being_written(road: Road) -> None:
    async def fail(context: Any, _: int, index: int) -> None:
        if index == 3:
            await rpc.abort(context, errors.ContainerError("chunk 3: 5 bytes", chunk=3))

    road.receiver.taking = fail
    # Whether a status meets a chunk on its way is a matter of microseconds, so once proves nothing.
    for _ in range(25):
        road.receiver.chunks.clear()
        with pytest.raises(errors.ContainerError) as caught:
            await road.drive()
        assert caught.value.fields == {"chunk": 3}


@pytest.mark.parametrize(
    "error",
    [errors.NotFoundError("artifact: not offered here"), errors.StoreError("artifact: committed meanwhile")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("stage", ["taking", "committing"])
async def test_an_artifact_that_another_transfer_committed_meanwhile_is_delivered(
    road: Road, stage: str, error: errors.KvferryError
) -> None:
    async def overtaken(context: Any, *_: object) -> None:
        road.receiver.committed = True
        await rpc.abort(context, error)

    setattr(road.receiver, stage, overtaken)
    await road.drive()
    assert road.receiver.offers == 2


async def test_a_lost_receipt_is_no_loss(road: Road) -> None:
    async def commit_and_vanish(context: Any, _: int) -> None:
        road.receiver.committed = True
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    road.receiver.committing = commit_and_vanish
    await road.drive()
    assert (road.receiver.offers, len(road.receiver.accounts), len(road.receiver.puts)) == (2, 1, 1)


@pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
async def test_a_receiver_that_cancels_is_an_error_and_no_cancellation_of_ours(road: Road, stage: str) -> None:
    async def cancel(context: Any, *_: object) -> None:
        await context.abort(grpc.StatusCode.CANCELLED, "shutting down")

    setattr(road.receiver, stage, cancel)
    with pytest.raises(errors.CancelledError):
        await road.drive()
    assert not road.receiver.committed


async def test_nobody_there_is_unavailable_after_a_few_attempts(road: Road) -> None:
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = addresses.Address("127.0.0.1", reserved.getsockname()[1])
        road.transfer._receiver = address
        with pytest.raises(errors.UnavailableError, match=f"{address}: cannot be reached for Offer"):
            await road.drive()
    assert road.receiver.offers == 0


@pytest.mark.parametrize("ranges", [[(0, 10_000)], [(10_000, 10_001)], [(0, 2**32 - 1)], [(5, 3)], [(3, 5), (4, 6)]])
async def test_chunks_that_do_not_exist_are_not_sent(road: Road, ranges: list[tuple[int, int]]) -> None:
    def ask_for_more(response: pb.OfferResponse) -> None:
        del response.missing[:]
        response.missing.extend(wire.ranges_to_message(ranges))

    road.receiver.change_offer = ask_for_more
    start = time.perf_counter()
    with pytest.raises(errors.PeerError, match=r"asks for chunks \d+\.\.\d+ .*, the payload has \d+"):
        await road.drive()
    assert time.perf_counter() - start < 5
    assert road.receiver.puts == []
    assert not road.receiver.committed


def cut_short(stored: Stored) -> None:
    data = stored.payload_path.read_bytes()
    stored.payload_path.write_bytes(data[: stored.plan.range(10)[1] - 1])


def remove(stored: Stored) -> None:
    stored.payload_path.unlink()


@pytest.mark.parametrize(("damage", "chunk"), [(cut_short, 10), (remove, 0)])
async def test_a_payload_that_cannot_be_read_here_says_so(
    road: Road, stored: Stored, damage: Callable[[Stored], None], chunk: int
) -> None:
    damage(stored)
    with pytest.raises(errors.StoreError, match=f"^chunk {chunk}: ") as caught:
        await road.drive()
    assert caught.value.fields["chunk"] == chunk
    assert road.receiver.accounts == []
    assert not road.receiver.committed


async def test_a_bit_that_flipped_on_disk_is_never_delivered(road: Road, stored: Stored) -> None:
    data = bytearray(stored.payload_path.read_bytes())
    data[stored.plan.range(11)[0] + 5] ^= 1
    stored.payload_path.write_bytes(data)
    with pytest.raises(errors.IntegrityError, match="^chunk 11: digest") as caught:
        await road.drive()
    assert caught.value.fields["chunk"] == 11
    assert road.receiver.accounts == []
    # Each attempt sends chunk 11 again; none before it travels twice.
    assert road.receiver.sent.count(11) == ATTEMPTS
    assert all(road.receiver.sent.count(index) == 1 for index in range(11))


PROMPT_SECONDS = 3.0


async def test_giving_up_ends_the_call_at_the_receiver(road: Road) -> None:
    reached = asyncio.Event()

    async def hang(_: Any, __: int, index: int) -> None:
        if index == 5:
            reached.set()
            await asyncio.sleep(3600)

    road.receiver.taking = hang
    task = asyncio.create_task(road.drive())
    async with asyncio.timeout(PROMPT_SECONDS):
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await road.receiver.closed_puts.wait()
    assert road.receiver.accounts == []


async def test_closing_between_two_steps_ends_the_call_at_the_receiver(road: Road) -> None:
    async with asyncio.timeout(PROMPT_SECONDS):
        async with contextlib.aclosing(road.transfer.run()) as steps:
            async for step in steps:
                if step.stage == "transfer" and step.done:
                    break
        await road.receiver.closed_puts.wait()
    assert road.receiver.accounts == []


def test_a_verdict_in_full_fits_an_error_that_travels() -> None:
    reasons = tuple(
        Reason(ReasonCode.WEIGHTS_MISMATCH, f"positions.rope[{number}].base", "a" * 64, "b" * 64)
        for number in range(40)
    )
    packed = rpc._pack(transfer.refusal(Verdict(reasons)))
    rebuilt = rpc._unpack(packed, "refused")
    assert rebuilt is not None
    assert len(json.loads(str(rebuilt.fields["verdict_json"]))) == 12
    assert common_pb2.Verdict().accepted is False
