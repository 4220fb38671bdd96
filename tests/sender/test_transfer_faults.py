"""A receiver that is silent, fails or lies, and a payload that is damaged: given up in time, with the true reason."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
import pytest

from kvferry.core import addresses, errors, rpc, wire
from kvferry.core.ledger import Traffic
from kvferry.core.metrics import SenderMetrics
from kvferry.core.progress import Progress
from kvferry.core.store import Stored
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.sender import grpc_transfer, transfer
from kvferry.sender.carrier import Chunks
from kvferry.sender.link import Probe
from kvferry.sender.transfer import ATTEMPTS

PROMPT_SECONDS = 3.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


async def for_ever(*_: object) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
async def test_a_receiver_that_never_answers_is_given_up_in_time(road: Any, stage: str) -> None:
    road.hasty()
    setattr(road.receiver, stage, for_ever)
    start = time.perf_counter()
    with pytest.raises(errors.DeadlineError, match="Offer|acknowledgement|Commit"):
        await road.drive()
    # Four attempts of 0.15 s with pauses of milliseconds.
    assert 4 * 0.15 <= time.perf_counter() - start < 5
    assert road.receiver.offers == ATTEMPTS
    assert not road.receiver.committed


async def test_a_receiver_that_stalls_once_is_asked_again(road: Any, stored: Stored) -> None:
    road.hasty(0.5)

    async def stall_once(_: Any, number: int, index: int) -> None:
        if (number, index) == (1, 5):
            await asyncio.sleep(3600)

    road.receiver.taking = stall_once
    await road.drive()
    assert road.receiver.puts[1][0] == 5
    assert road.arrived() == stored.payload_path.read_bytes()


async def test_each_acknowledgement_starts_the_clock_anew(road: Any) -> None:
    road.hasty(0.4)

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
async def test_what_may_pass_is_tried_again_a_few_times(road: Any, error: errors.KvferryError) -> None:
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
async def test_what_cannot_pass_is_not_tried_again(road: Any, error: errors.KvferryError) -> None:
    async def fail(context: Any, *_: object) -> None:
        await rpc.abort(context, error)

    road.receiver.taking = fail
    with pytest.raises(type(error)) as caught:
        await road.drive()
    assert caught.value.message == error.message
    assert road.receiver.offers == 1


async def test_the_receivers_own_words_are_heard_while_chunks_are_being_written(road: Any) -> None:
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
    road: Any, stage: str, error: errors.KvferryError
) -> None:
    async def overtaken(context: Any, *_: object) -> None:
        if not road.receiver.committed:
            road.receiver.committed = True
            await rpc.abort(context, error)

    setattr(road.receiver, stage, overtaken)
    await road.drive()
    assert road.receiver.offers == 2


@pytest.mark.parametrize("index", [0, 7])
async def test_a_send_that_was_overtaken_says_what_crossed_if_it_moved_any_of_it(road: Any, index: int) -> None:
    async def overtaken(context: Any, _: int, at: int) -> None:
        if at == index:
            road.receiver.committed = True
            await rpc.abort(context, errors.NotFoundError("artifact: not offered here"))

    road.receiver.taking = overtaken
    await road.drive()
    delivery = road.transfer.delivery
    assert (delivery.traffic is not None) is (delivery.moved_bytes > 0) is (index > 0)
    assert len(road.receiver.accounts) == (index > 0)


async def commit_and_vanish(receiver: Any, context: Any, number: int) -> None:
    """Publish, and lose the first two receipts."""
    receiver.committed = True
    if number <= 2:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def test_a_lost_receipt_is_no_loss(road: Any, stored: Stored) -> None:
    road.receiver.committing = functools.partial(commit_and_vanish, road.receiver)
    await road.drive()
    assert (road.receiver.offers, len(road.receiver.accounts), len(road.receiver.puts)) == (3, 3, 1)
    delivery = road.transfer.delivery
    assert delivery.moved_bytes == stored.manifest.payload.length
    assert delivery.traffic == Traffic(len(stored.encoded), stored.manifest.payload.length, 12345, 678)
    # Whichever of them the receiver kept, it is what the sender reports.
    assert set(road.receiver.accounts) == {msgspec.structs.replace(road.account, transfer_ms=delivery.transfer_ms)}
    assert road.progress[-1] == Progress("commit", 1, 1)


async def test_a_lost_receipt_is_no_loss_where_only_the_commit_was_left(road: Any, stored: Stored) -> None:
    road.receiver.chunks = {index: stored.read_chunk(index) for index in range(road.receiver.count)}
    road.receiver.committing = functools.partial(commit_and_vanish, road.receiver)
    await road.drive()
    assert (len(road.receiver.accounts), road.receiver.puts) == (3, [])
    assert road.transfer.delivery.moved_bytes == 0
    assert road.transfer.delivery.traffic is not None


async def test_an_artifact_that_is_gone_when_its_receipt_is_asked_for_is_sent_again(road: Any, stored: Stored) -> None:
    async def drop(context: Any, number: int) -> None:
        if number == 1:
            road.receiver.committed = True
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if number == 2:
            road.receiver.committed = False
            road.receiver.chunks.clear()
            await rpc.abort(context, errors.NotFoundError("artifact: not offered here"))

    road.receiver.committing = drop
    await road.drive()
    assert [len(indices) for indices in road.receiver.puts] == [road.receiver.count] * 2
    assert road.arrived() == stored.payload_path.read_bytes()
    assert road.transfer.delivery.traffic is not None


@pytest.mark.parametrize("stage", ["offering", "taking", "committing"])
async def test_a_receiver_that_cancels_is_an_error_and_no_cancellation_of_ours(road: Any, stage: str) -> None:
    async def cancel(context: Any, *_: object) -> None:
        await context.abort(grpc.StatusCode.CANCELLED, "shutting down")

    setattr(road.receiver, stage, cancel)
    with pytest.raises(errors.CancelledError):
        await road.drive()
    assert not road.receiver.committed


class Garbage(grpc.GenericRpcHandler):  # type: ignore[misc]  (grpc has no types)
    """Answers every call with bytes that are no message."""

    def service(self, handler_call_details: Any) -> Any:
        del handler_call_details

        async def answer(_requests: Any, _context: Any) -> Any:
            yield b"\xff\xff\xff"

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.mark.parametrize("call", ["Offer", "Put", "Commit", "Describe", "Measure"])
async def test_what_is_no_message_is_a_peer_error(stored: Stored, call: str) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Garbage(),))
    address = addresses.Address("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    metrics = SenderMetrics("tiny", {"kvferry": "0", "device": "cpu"})
    try:
        async with grpc_transfer.connected(address, PeerSecurity(), 5.0, metrics) as carrier:
            probe = Probe(carrier._stub, address, 5.0, metrics)

            async def put() -> None:
                async for _ in carrier.put(Chunks(stored, metrics), [0]):
                    pass

            calls: dict[str, Callable[[], Any]] = {
                "Offer": lambda: carrier.offer(stored.encoded),
                "Put": put,
                "Commit": lambda: carrier.commit(stored.artifact_id, "{}", 5.0),
                "Describe": probe.describe,
                "Measure": probe.measure,
            }
            with pytest.raises(errors.PeerError, match=f"^{address}: {call} ") as caught:
                await calls[call]()
        assert type(caught.value) is errors.PeerError
    finally:
        await server.stop(None)


async def test_nobody_there_is_unavailable_after_a_few_attempts(road: Any) -> None:
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = addresses.Address("127.0.0.1", reserved.getsockname()[1])
        road.transfer._receiver = address
        with pytest.raises(errors.UnavailableError, match=f"{address}: cannot be reached for Offer"):
            await road.drive()
    assert road.receiver.offers == 0


@pytest.mark.parametrize("ranges", [[(0, 10_000)], [(10_000, 10_001)], [(0, 2**32 - 1)], [(5, 3)], [(3, 5), (4, 6)]])
async def test_chunks_that_do_not_exist_are_not_sent(road: Any, ranges: list[tuple[int, int]]) -> None:
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
    road: Any, stored: Stored, damage: Callable[[Stored], None], chunk: int
) -> None:
    damage(stored)
    with pytest.raises(errors.StoreError, match=f"^chunk {chunk}: ") as caught:
        await road.drive()
    assert caught.value.fields["chunk"] == chunk
    assert road.receiver.accounts == []
    assert not road.receiver.committed


async def test_a_bit_that_flipped_on_disk_is_never_delivered(road: Any, stored: Stored) -> None:
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


async def test_giving_up_ends_the_call_at_the_receiver(road: Any) -> None:
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


async def test_closing_between_two_steps_ends_the_call_at_the_receiver(road: Any) -> None:
    async with asyncio.timeout(PROMPT_SECONDS):
        async with contextlib.aclosing(road.transfer.run()) as steps:
            async for step in steps:
                if step.stage == "transfer" and step.done:
                    break
        await road.receiver.closed_puts.wait()
    assert road.receiver.accounts == []
