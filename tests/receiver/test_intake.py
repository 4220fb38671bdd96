"""Offer, Put and Commit: nothing before the verdict, nothing visible before the last digest, everything counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core import limits
from kvferry.core import manifest as manifests
from kvferry.core.errors import (
    BusyError,
    ContainerError,
    IntegrityError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    StoreError,
    TooLargeError,
    TransferError,
)
from kvferry.core.ledger import SenderAccount, Traffic, to_json
from kvferry.core.partial import Partial
from kvferry.core.store import ArtifactStore
from kvferry.engine.model import LoadedModel

DOCUMENT = "Every crate that arrives is weighed, counted and entered in the ledger before noon. " * 2
ACCOUNT = to_json(SenderAccount(1, 2, 3.0, 4.0, 5.0, 6.0))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def receiver(bench: Callable[..., Any], model: LoadedModel) -> Any:
    return bench(model)


@pytest.fixture
def kv(artifact: Callable[..., Any], model: LoadedModel) -> Any:
    return artifact(model, "B1", DOCUMENT)


def files(receiver: Any) -> list[str]:
    """Return every file of the store but its lock."""
    return sorted(
        str(path.relative_to(receiver.store.root))
        for path in Path(receiver.store.root).rglob("*")
        if path.is_file() and path.name != "lock"
    )


def put_all(receiver: Any, stored: Any) -> None:
    for index in range(stored.plan.count):
        receiver.intake.put(stored.artifact_id, index, stored.read_chunk(index), 1)


def test_an_offer_says_what_is_missing(receiver: Any, kv: Any) -> None:
    judgement = receiver.intake.offer(kv.encoded)
    assert judgement.verdict.accepted
    assert judgement.artifact_id == kv.artifact_id
    assert judgement.missing == ((0, kv.plan.count),)
    assert not judgement.committed
    for index in (0, 1, 4, kv.plan.count - 1):
        receiver.intake.put(kv.artifact_id, index, kv.read_chunk(index), 1)
    assert receiver.intake.offer(kv.encoded).missing == ((2, 4), (5, kv.plan.count - 1))


def test_a_refused_offer_leaves_no_trace(
    bench: Callable[..., Any], artifact: Callable[..., Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    receiver = bench(tiny_model("llama", seed=1))
    judgement = receiver.intake.offer(artifact(tiny_model("llama"), "B1", DOCUMENT).encoded)
    assert [reason.field for reason in judgement.verdict.reasons] == ["model.weights"]
    assert (judgement.missing, judgement.committed) == ((), False)
    assert files(receiver) == []
    assert list((receiver.store.root / "partial").iterdir()) == []


def test_a_payload_over_the_limit_is_refused_before_it_takes_room(
    bench: Callable[..., Any], kv: Any, model: LoadedModel
) -> None:
    import dataclasses

    small = dataclasses.replace(model.profile, max_payload_bytes=kv.manifest.payload.length - 1)
    receiver = bench(dataclasses.replace(model, profile=small))
    (reason,) = receiver.intake.offer(kv.encoded).verdict.reasons
    assert (reason.code, reason.field, reason.artifact) == (
        "TOO_LARGE",
        "payload.length",
        str(kv.manifest.payload.length),
    )
    assert files(receiver) == []


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "appended", "garbage", "huge"])
def test_a_manifest_that_is_none_leaves_no_trace(receiver: Any, kv: Any, damage: str) -> None:
    encoded = {
        "empty": b"",
        "cut": kv.encoded[:-1],
        "flipped": kv.encoded[:40] + bytes([kv.encoded[40] ^ 0xFF]) + kv.encoded[41:],
        "appended": kv.encoded + b"\x00",
        "garbage": bytes(range(256)) * 4,
        "huge": b"\x00" * (2 * 2**20 + 1),
    }[damage]
    with pytest.raises(TooLargeError if damage == "huge" else ManifestError):
        receiver.intake.offer(encoded)
    assert files(receiver) == []


@pytest.mark.parametrize("field", ["length", "digest", "chunks"])
def test_a_manifest_that_contradicts_itself_is_refused_at_the_offer(receiver: Any, kv: Any, field: str) -> None:
    payload = kv.manifest.payload
    value = {
        "length": payload.length + 1,
        "digest": b"\x01" * 32,
        "chunks": payload.chunks[32:] + payload.chunks[:32],
    }[field]
    forged = msgspec.structs.replace(kv.manifest, payload=msgspec.structs.replace(payload, **{field: value}))
    with pytest.raises(ManifestError, match=r"^payload\."):
        receiver.intake.offer(manifests.encode(forged))
    assert files(receiver) == []


def test_a_chunk_before_its_offer_is_not_found(receiver: Any, kv: Any) -> None:
    with pytest.raises(NotFoundError, match=f"{kv.artifact_id.hex()}: not offered here"):
        receiver.intake.put(kv.artifact_id, 0, kv.read_chunk(0), 1)
    with pytest.raises(NotFoundError):
        receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert files(receiver) == []


def test_nothing_is_visible_before_commit(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    assert receiver.store.ids() == []
    with pytest.raises(NotFoundError):
        receiver.store.get(kv.artifact_id)
    stored = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert receiver.store.ids() == [kv.artifact_id]
    assert stored.payload_path.read_bytes() == kv.payload_path.read_bytes()
    assert stored.record.account == SenderAccount(1, 2, 3.0, 4.0, 5.0, 6.0)


def test_a_commit_with_chunks_missing_names_the_first_and_how_many(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    for index in range(kv.plan.count):
        if index not in (3, 7, 8):
            receiver.intake.put(kv.artifact_id, index, kv.read_chunk(index), 1)
    with pytest.raises(TransferError, match="chunk 3: missing, 3 chunks in all"):
        receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert receiver.store.ids() == []
    for index in (3, 7, 8):
        receiver.intake.put(kv.artifact_id, index, kv.read_chunk(index), 1)
    assert receiver.intake.commit(kv.artifact_id, ACCOUNT, 1).artifact_id == kv.artifact_id


def test_chunks_in_any_order_and_twice_make_the_same_artifact(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    for index in (*reversed(range(kv.plan.count)), 0, 3, 3):
        receiver.intake.put(kv.artifact_id, index, kv.read_chunk(index), 1)
    stored = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert stored.payload_path.read_bytes() == kv.payload_path.read_bytes()
    extra = sum(len(kv.read_chunk(index)) for index in (0, 3, 3))
    assert stored.record.traffic.received_bytes == kv.manifest.payload.length + extra
    assert stored.record.traffic.resent_bytes == extra


WRONG_CHUNKS: dict[str, Callable[[Any], tuple[int, bytes]]] = {
    "flipped bit": lambda kv: (2, bytes([kv.read_chunk(2)[0] ^ 1]) + kv.read_chunk(2)[1:]),
    "another chunk's bytes": lambda kv: (2, kv.read_chunk(3)),
    "cut": lambda kv: (2, kv.read_chunk(2)[:-1]),
    "longer": lambda kv: (2, kv.read_chunk(2) + b"\x00"),
    "empty": lambda kv: (2, b""),
    "no such chunk": lambda kv: (kv.plan.count, kv.read_chunk(2)),
    "far away": lambda kv: (2**32 - 1, kv.read_chunk(2)),
}


@pytest.mark.parametrize("case", WRONG_CHUNKS)
def test_a_wrong_chunk_is_refused_by_number_and_stays_missing(receiver: Any, kv: Any, case: str) -> None:
    index, data = WRONG_CHUNKS[case](kv)
    assert len(kv.read_chunk(2)) == len(kv.read_chunk(3)) == 1024
    receiver.intake.offer(kv.encoded)
    with pytest.raises(ContainerError, match=f"^chunk {index}: "):
        receiver.intake.put(kv.artifact_id, index, data, 1)
    assert receiver.intake.offer(kv.encoded).missing == ((0, kv.plan.count),)
    put_all(receiver, kv)
    stored = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert stored.payload_path.read_bytes() == kv.payload_path.read_bytes()


def test_a_second_commit_finds_the_first_ones_artifact(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    first = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    before = {name: (receiver.store.root / name).stat().st_mtime_ns for name in files(receiver)}
    second = receiver.intake.commit(kv.artifact_id, "not even JSON", 1)
    assert second.record == first.record
    assert {name: (receiver.store.root / name).stat().st_mtime_ns for name in files(receiver)} == before


def test_a_chunk_after_commit_changes_nothing(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    stored = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    with pytest.raises(NotFoundError, match="not offered here"):
        receiver.intake.put(kv.artifact_id, 0, kv.read_chunk(0), 1)
    assert receiver.store.get(kv.artifact_id).record == stored.record
    judgement = receiver.intake.offer(kv.encoded)
    assert (judgement.committed, judgement.missing) == (True, ())


@pytest.mark.parametrize(
    "account",
    [
        "",
        "null",
        "[]",
        "{",
        "{}",
        ACCOUNT[:-1],
        ACCOUNT.replace("}", ',"extra":1}'),
        ACCOUNT.replace("1,", '"1",', 1),
        ACCOUNT.replace("3.0", "NaN"),
        "x" * 100_000,
    ],
    ids=range(10),
)
def test_an_account_that_cannot_be_read_is_refused_and_a_good_one_still_commits(
    receiver: Any, kv: Any, account: str
) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    with pytest.raises(InvalidRequestError, match=r"^account_json: ") as caught:
        receiver.intake.commit(kv.artifact_id, account, 1)
    assert caught.value.fields["field"] == "account_json"
    assert receiver.store.ids() == []
    assert receiver.intake.commit(kv.artifact_id, ACCOUNT, 1).artifact_id == kv.artifact_id


def test_protocol_bytes_are_charged_over_every_attempt(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    receiver.intake.charge(kv.artifact_id, 0, 100)
    put_all(receiver, kv)
    receiver.intake.offer(kv.encoded)
    receiver.intake.charge(kv.artifact_id, 0, 100)
    stored = receiver.intake.commit(kv.artifact_id, ACCOUNT, 23)
    assert stored.record.traffic.control_bytes == 200 + kv.plan.count + 23


def test_offers_are_the_same_when_repeated_and_leave_nothing_when_dropped(
    bench: Callable[..., Any], artifact: Callable[..., Any], model: LoadedModel
) -> None:
    receiver = bench(model)
    offered = [artifact(model, "A1", f"{number}. {DOCUMENT}") for number in range(10)]
    for stored in offered:
        for _ in range(3):
            assert receiver.intake.offer(stored.encoded).missing == ((0, stored.plan.count),)
    assert receiver.store.ids() == []
    for stored in offered:
        receiver.store.drop(stored.artifact_id)
    assert files(receiver) == []
    assert receiver.take(offered[3]).artifact_id == offered[3].artifact_id


def test_an_integrity_error_is_one_that_a_retry_may_mend(receiver: Any, kv: Any) -> None:
    receiver.intake.offer(kv.encoded)
    with pytest.raises(IntegrityError) as caught:
        receiver.intake.put(kv.artifact_id, 1, bytes(len(kv.read_chunk(1))), 1)
    assert caught.value.retryable
    assert caught.value.fields["chunk"] == 1
    assert {"actual", "expected"} <= set(caught.value.fields)


# Two senders at once


def test_an_offer_while_another_sender_commits_begins_nothing_anew(
    receiver: Any, kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    commit = threading.Thread(target=receiver.store.commit, args=(kv.artifact_id, None))
    holds = ArtifactStore.holds

    def overtaken(self: ArtifactStore, artifact_id: bytes) -> bool:
        found = holds(self, artifact_id)
        commit.start()
        # It ends meanwhile unless it is kept out until the offer is judged.
        commit.join(0.2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactStore, "holds", overtaken)
        judgement = receiver.intake.offer(kv.encoded)
    commit.join()
    assert judgement.missing == ()
    assert receiver.store.ids() == [kv.artifact_id]
    assert list((receiver.store.root / "partial").iterdir()) == []
    assert receiver.intake.offer(kv.encoded).committed


@pytest.mark.parametrize("moment", ["looked", "charged", "verified"])
def test_of_two_commits_at_once_both_get_the_receipt(
    receiver: Any, kv: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    owner, name = {
        "looked": (ArtifactStore, "holds"),
        "charged": (Partial, "count"),
        "verified": (Partial, "verify"),
    }[moment]
    step = getattr(owner, name)
    first: list[Any] = []

    def overtaken(self: Any, *arguments: Any) -> Any:
        result = step(self, *arguments)
        if not first:
            first.append(None)
            first[0] = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
        return result

    monkeypatch.setattr(owner, name, overtaken)
    second = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert second.record == first[0].record
    assert receiver.store.ids() == [kv.artifact_id]


def test_a_commit_that_a_drop_overtook_says_so(receiver: Any, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.intake.offer(kv.encoded)
    put_all(receiver, kv)
    verify = Partial.verify

    def overtaken(self: Partial) -> None:
        verify(self)
        receiver.store.drop(kv.artifact_id)

    monkeypatch.setattr(Partial, "verify", overtaken)
    with pytest.raises(StoreError, match="committed or dropped"):
        receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert receiver.store.ids() == []


def test_of_two_first_offers_at_once_one_is_a_repeat(receiver: Any, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        receiver.intake.offer(kv.encoded)
    traffic, together = Partial.traffic, threading.Barrier(2)

    def at_once(self: Partial) -> Traffic:
        found = traffic(self)
        together.wait(5)
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        # Whoever looked at the count first would wait here until both had seen that nothing is charged yet.
        patch.setattr(Partial, "traffic", at_once)
        list(pool.map(lambda _: receiver.intake.charge_offer(kv.artifact_id, 10), range(2)))
    assert receiver.store.partial(kv.artifact_id).traffic().control_bytes == 20 + len(kv.encoded)
    receiver.intake.charge_offer(kv.artifact_id, 10)
    assert receiver.store.partial(kv.artifact_id).traffic().control_bytes == 30 + 2 * len(kv.encoded)


# More transfers than may have files open


def test_more_transfers_than_open_files_all_arrive(
    receiver: Any, artifact: Callable[..., Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PARTIALS", 2)
    sent = [artifact(model, "A1", f"{number}. {DOCUMENT}") for number in range(5)]
    for stored in sent:
        assert receiver.intake.offer(stored.encoded).missing == ((0, stored.plan.count),)
        receiver.intake.charge_offer(stored.artifact_id, 10)
    for stored in sent:
        assert receiver.intake.offer(stored.encoded).missing == ((0, stored.plan.count),)
        receiver.intake.charge_offer(stored.artifact_id, 10)
    for step in range(max(stored.plan.count for stored in sent)):
        for stored in sent:
            if step < stored.plan.count:
                receiver.intake.put(stored.artifact_id, step, stored.read_chunk(step), 1)
    for stored in sent:
        traffic = receiver.intake.commit(stored.artifact_id, ACCOUNT, 7).record.traffic
        assert traffic.control_bytes == 20 + len(stored.encoded) + stored.plan.count + 7
        assert traffic.resent_bytes == 0


@pytest.mark.parametrize("step", ["count", "put"])
def test_a_chunk_that_is_being_written_is_not_cut_off(
    receiver: Any, kv: Any, artifact: Callable[..., Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(limits, "MAX_PARTIALS", 1)
    other = artifact(model, "A1", DOCUMENT)
    receiver.intake.offer(kv.encoded)
    works = getattr(Partial, step)

    def meanwhile(self: Partial, *arguments: Any) -> Any:
        with pytest.raises(BusyError) as caught:
            receiver.intake.offer(other.encoded)
        assert caught.value.retryable
        return works(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, step, meanwhile)
        put_all(receiver, kv)
    assert receiver.intake.offer(other.encoded).missing == ((0, other.plan.count),)
    stored = receiver.intake.commit(kv.artifact_id, ACCOUNT, 1)
    assert stored.payload_path.read_bytes() == kv.payload_path.read_bytes()
    assert stored.record.traffic.control_bytes == kv.plan.count + 1
