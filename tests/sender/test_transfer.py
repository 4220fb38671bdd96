"""Carrying an artifact to a receiver: what is sent, what is sent again, and what is believed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest

from kvferry.core import errors, rpc, wire
from kvferry.core.compat import Reason, ReasonCode, Verdict
from kvferry.core.progress import Progress
from kvferry.core.store import Stored
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.sender import transfer
from kvferry.sender.transfer import ATTEMPTS


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE_SECONDS", 0.001)


async def test_everything_arrives_once_and_in_order(road: Any, stored: Stored) -> None:
    await road.drive()
    assert road.receiver.puts == [list(range(road.receiver.count))]
    assert road.arrived() == stored.payload_path.read_bytes()
    assert road.receiver.committed
    delivery = road.transfer.delivery
    assert delivery.moved_bytes == stored.manifest.payload.length
    assert delivery.traffic is not None
    assert (delivery.traffic.received_bytes, delivery.traffic.control_bytes) == (12345, 678)
    assert delivery.traffic.wire_bytes == len(stored.encoded) + 12345 + 678


async def test_the_account_travels_with_the_time_that_the_transfer_took(road: Any) -> None:
    await road.drive()
    (account,) = road.receiver.accounts
    assert account.transfer_ms > 0
    assert msgspec.structs.replace(account, transfer_ms=0.0) == road.account


async def test_progress_counts_bytes_and_never_goes_back(road: Any, stored: Stored) -> None:
    await road.drive()
    assert list(dict.fromkeys(step.stage for step in road.progress)) == ["offer", "transfer", "commit"]
    done = [step.done for step in road.progress if step.stage == "transfer"]
    payload = stored.manifest.payload
    assert done == [0, *(stored.plan.range(index)[1] for index in range(road.receiver.count))]
    assert done[-1] == payload.length
    assert {step.total for step in road.progress if step.stage == "transfer"} == {payload.length}
    assert road.progress[-1] == Progress("commit", 1, 1)


async def test_what_is_there_already_is_not_sent(road: Any) -> None:
    road.receiver.committed = True
    await road.drive()
    assert (road.receiver.puts, road.receiver.accounts) == ([], [])
    assert road.transfer.delivery.moved_bytes == 0
    assert road.transfer.delivery.traffic is None


async def test_only_missing_chunks_are_sent(road: Any, stored: Stored) -> None:
    here = {0, 1, 5, 6, 7, road.receiver.count - 1}
    road.receiver.chunks = {index: stored.read_chunk(index) for index in here}
    await road.drive()
    assert road.receiver.puts == [[index for index in range(road.receiver.count) if index not in here]]
    assert road.arrived() == stored.payload_path.read_bytes()
    moved = stored.manifest.payload.length - sum(len(stored.read_chunk(index)) for index in here)
    assert road.transfer.delivery.moved_bytes == moved
    first = next(step for step in road.progress if step.stage == "transfer")
    assert first.done == stored.manifest.payload.length - moved


async def test_with_every_chunk_there_only_the_commit_is_left(road: Any, stored: Stored) -> None:
    road.receiver.chunks = {index: stored.read_chunk(index) for index in range(road.receiver.count)}
    await road.drive()
    assert road.receiver.puts == []
    assert road.receiver.committed


async def test_a_broken_connection_resumes_where_it_stopped(road: Any, stored: Stored) -> None:
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
    assert road.arrived() == stored.payload_path.read_bytes()
    done = [step.done for step in road.progress if step.stage == "transfer"]
    assert done == sorted(done)


async def test_lost_acknowledgements_cost_no_chunk_twice(road: Any) -> None:
    async def lose_some(_: Any, number: int, index: int) -> bool:
        return number > 1 or index % 3 == 0

    road.receiver.taking = lose_some
    await road.drive()
    assert road.receiver.sent == list(range(road.receiver.count))
    assert road.receiver.offers == 2
    assert road.receiver.committed


async def test_acknowledgements_that_stay_out_are_an_error_that_names_the_first(road: Any) -> None:
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
async def test_an_acknowledgement_for_nothing_that_was_sent_stops_the_transfer(road: Any, index: int) -> None:
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


async def test_another_artifact_id_is_noticed_before_any_chunk(road: Any) -> None:
    road.receiver.change_offer = lambda response: setattr(response, "artifact_id", b"\x01" * 32)
    with pytest.raises(errors.IntegrityError, match="the receiver read other bytes"):
        await road.drive()
    assert road.receiver.puts == []


async def test_a_receipt_for_other_bytes_is_not_believed(road: Any) -> None:
    def forge(receipt: pb.Receipt) -> None:
        receipt.payload_digest = b"\x01" * 32
        road.receiver.committed = False

    road.receiver.change_receipt = forge
    with pytest.raises(errors.IntegrityError, match="the receipt names another digest"):
        await road.drive()
    assert road.transfer.delivery.traffic is None
    assert len(road.receiver.accounts) == ATTEMPTS


@pytest.mark.parametrize("count", [1, 3, 4, 40])
async def test_a_refusal_moves_nothing_and_is_not_tried_again(road: Any, count: int) -> None:
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


async def test_a_refusal_without_a_reason_is_still_a_refusal(road: Any) -> None:
    road.receiver.change_offer = lambda response: response.ClearField("verdict")
    with pytest.raises(errors.RefusedError, match="refused: .*no reason"):
        await road.drive()
    assert road.receiver.puts == []


def test_a_verdict_in_full_fits_an_error_that_travels() -> None:
    reasons = tuple(
        Reason(ReasonCode.WEIGHTS_MISMATCH, f"positions.rope[{number}].base", "a" * 64, "b" * 64)
        for number in range(40)
    )
    packed = rpc._pack(transfer.refusal(Verdict(reasons)))
    rebuilt = rpc._unpack(packed, "refused")
    assert rebuilt is not None
    assert len(json.loads(str(rebuilt.fields["verdict_json"]))) == 12
