"""Chunks that are wrong, missing, twice there, out of order or cut off: never accepted, and a retry sends the rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors, limits
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.receiver import intake_service

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? "
QUESTION = "What is the access code?"
# Two whole chunks of the same section, so that their lengths agree.
ONE, TWO = 3, 4


class Receiver:
    """A receiver to which one artifact was offered, and what a sender does with its chunks."""

    def __init__(self, driver: Any, stored: Stored, root: Path) -> None:
        self.driver, self.stored, self.root = driver, stored, root
        self.count = stored.plan.count

    def chunk(self, index: int, data: bytes | None = None, artifact_id: bytes | None = None) -> pb.PutRequest:
        content = self.stored.read_chunk(index) if data is None else data
        return pb.PutRequest(artifact_id=artifact_id or self.stored.artifact_id, index=index, data=content)

    def chunks(self, *indices: int) -> Iterator[pb.PutRequest]:
        return (self.chunk(index) for index in indices)

    def missing(self) -> list[int]:
        response = self.driver.offer(self.stored.encoded)
        assert response.verdict.accepted
        return [index for run in response.missing for index in range(run.start, run.end)]

    def invisible(self) -> bool:
        """Whether no question and no list sees the artifact."""
        with pytest.raises(errors.NotFoundError, match=self.stored.artifact_id.hex()):
            self.driver.ask(self.stored.artifact_id, QUESTION)
        return self.stored.artifact_id not in self.driver.listed()

    def finish(self) -> pb.Receipt:
        """Send what is missing, and commit."""
        absent = self.missing()
        assert self.driver.put(self.chunks(*absent)) == absent
        receipt: pb.Receipt = self.driver.commit(self.stored.artifact_id)
        assert (self.root / "artifacts" / self.stored.artifact_id.hex() / "payload.safetensors").read_bytes() == (
            self.stored.payload_path.read_bytes()
        )
        assert receipt.payload_digest == self.stored.manifest.payload.digest
        return receipt

    def size(self, *indices: int) -> int:
        return sum(len(self.stored.read_chunk(index)) for index in indices)


@pytest.fixture
def receiver(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    artifact: Callable[..., Stored],
    tiny_model_dir: Callable[..., Path],
    tiny_model: Callable[..., LoadedModel],
    tmp_path: Path,
) -> Receiver:
    stored = artifact(tiny_model(), "B1", DOCUMENT)
    assert stored.plan.count > 20
    assert len(stored.read_chunk(ONE)) == len(stored.read_chunk(TWO)) == 1024
    driver = peers(receiver=here("receiver", tiny_model_dir()).address)
    made = Receiver(driver, stored, tmp_path / "receiver")
    assert made.missing() == list(range(made.count))
    return made


@pytest.mark.parametrize("bit", [0, 7, 4095, 8191])
def test_a_flipped_bit(receiver: Receiver, bit: int) -> None:
    data = bytearray(receiver.stored.read_chunk(TWO))
    data[bit // 8] ^= 1 << bit % 8
    requests = [*receiver.chunks(*range(TWO)), receiver.chunk(TWO, bytes(data)), *receiver.chunks(5, 6)]
    with pytest.raises(errors.IntegrityError, match=f"^chunk {TWO}: digest") as caught:
        receiver.driver.put(requests)
    assert caught.value.fields["chunk"] == TWO
    assert caught.value.acknowledged == list(range(TWO))  # type: ignore[attr-defined]
    assert receiver.missing() == list(range(TWO, receiver.count))
    with pytest.raises(errors.TransferError, match=f"^chunk {TWO}: missing"):
        receiver.driver.commit(receiver.stored.artifact_id)
    assert receiver.invisible()
    receipt = receiver.finish()
    # Four good chunks, the bad one, and then only what was missing.
    assert receipt.received_bytes == receiver.stored.manifest.payload.length + receiver.size(TWO)


@pytest.mark.parametrize("lost", [[0], [7], [-1], [3, 4, 9]])
def test_missing_chunks(receiver: Receiver, lost: list[int]) -> None:
    lost = [index % receiver.count for index in lost]
    receiver.driver.put(receiver.chunks(*(index for index in range(receiver.count) if index not in lost)))
    with pytest.raises(errors.TransferError, match=f"^chunk {lost[0]}: missing, {len(lost)} chunks in all") as caught:
        receiver.driver.commit(receiver.stored.artifact_id)
    assert caught.value.fields == {"chunk": lost[0], "missing": len(lost)}
    assert receiver.invisible()
    assert receiver.missing() == lost
    assert receiver.finish().received_bytes == receiver.stored.manifest.payload.length


def test_chunks_twice_and_in_any_order(receiver: Receiver) -> None:
    order = [*range(receiver.count)][::-1]
    order[5:5] = [order[0], order[0], order[9]]
    assert receiver.driver.put(receiver.chunks(*order)) == order
    extra = receiver.size(order[0], order[0], receiver.count - 10)
    assert receiver.finish().received_bytes == receiver.stored.manifest.payload.length + extra
    assert receiver.driver.ask(receiver.stored.artifact_id, QUESTION).ledger["resent_bytes"] == extra


def test_two_chunks_swapped(receiver: Receiver) -> None:
    swapped = receiver.chunk(ONE, receiver.stored.read_chunk(TWO))
    with pytest.raises(errors.IntegrityError, match=f"^chunk {ONE}: digest"):
        receiver.driver.put([*receiver.chunks(*range(ONE)), swapped])
    assert receiver.invisible()
    receiver.finish()


@pytest.mark.parametrize(
    ("index", "data", "expected"),
    [
        (ONE, b"", "0 bytes, expected 1024"),
        (ONE, b"x" * 1023, "1023 bytes, expected 1024"),
        (ONE, b"x" * 1025, "1025 bytes, expected 1024"),
        (10_000, b"x", "the payload has"),
        (2**32 - 1, b"", "the payload has"),
    ],
)
def test_chunks_that_cannot_be(receiver: Receiver, index: int, data: bytes, expected: str) -> None:
    with pytest.raises(errors.ContainerError, match=f"^chunk {index}: .*{expected}") as caught:
        receiver.driver.put([*receiver.chunks(0), receiver.chunk(index, data)])
    assert caught.value.acknowledged == [0]  # type: ignore[attr-defined]
    assert not caught.value.retryable
    assert receiver.invisible()
    receiver.finish()


def test_a_stream_that_ends_early_is_no_artifact(receiver: Receiver) -> None:
    half = list(range(receiver.count // 2))
    assert receiver.driver.put(receiver.chunks(*half)) == half
    with pytest.raises(errors.TransferError, match=f"^chunk {len(half)}: missing"):
        receiver.driver.commit(receiver.stored.artifact_id)
    assert receiver.invisible()
    assert receiver.missing() == list(range(len(half), receiver.count))
    assert receiver.finish().received_bytes == receiver.stored.manifest.payload.length


def test_a_stream_that_is_torn_keeps_what_was_acknowledged(receiver: Receiver) -> None:
    arrived = threading.Event()

    def torn() -> Iterator[pb.PutRequest]:
        yield from receiver.chunks(*range(10))
        arrived.wait(30)

    call = receiver.driver.receiving.Put(torn())
    acknowledged = [next(call).index for _ in range(10)]
    call.cancel()
    arrived.set()
    assert acknowledged == list(range(10))
    assert receiver.missing() == list(range(10, receiver.count))
    assert receiver.invisible()
    assert receiver.finish().received_bytes == receiver.stored.manifest.payload.length


def test_a_sender_that_falls_silent_is_given_up(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_service, "_PUT_IDLE_SECONDS", 0.3)
    over = threading.Event()

    def frozen() -> Iterator[pb.PutRequest]:
        yield from receiver.chunks(0, 1)
        over.wait(30)

    with pytest.raises(errors.TransferError, match=r"nothing came for 0\.3 s") as caught:
        receiver.driver.put(frozen())
    over.set()
    assert caught.value.acknowledged == [0, 1]  # type: ignore[attr-defined]
    receiver.finish()


def test_a_stream_that_carries_nothing_changes_nothing(receiver: Receiver) -> None:
    assert receiver.driver.put([]) == []
    assert receiver.missing() == list(range(receiver.count))


def test_chunks_over_two_connections_at_once(receiver: Receiver, peers: Callable[..., Any]) -> None:
    second = peers(receiver=receiver.driver.receiver)
    threads = [
        threading.Thread(target=driver.put, args=(receiver.chunks(*range(start, receiver.count, 2)),))
        for start, driver in enumerate((receiver.driver, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert receiver.missing() == []
    assert receiver.finish().received_bytes == receiver.stored.manifest.payload.length


def test_chunks_of_two_artifacts_in_one_stream(
    receiver: Receiver, artifact: Callable[..., Stored], tiny_model: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    other = Receiver(receiver.driver, artifact(tiny_model(), "B1", DOCUMENT + "No."), tmp_path / "receiver")
    other.missing()
    mixed = [one.chunk(index) for index in range(5) for one in (receiver, other)]
    assert receiver.driver.put(mixed) == [index for index in range(5) for _ in range(2)]
    assert receiver.missing() == list(range(5, receiver.count))
    assert other.missing() == list(range(5, other.count))
    # A chunk of the one is no chunk of the other.
    differing = next(index for index in range(5, receiver.count) if receiver.size(index) != other.size(index))
    with pytest.raises(errors.ContainerError, match=f"^chunk {differing}: "):
        receiver.driver.put([receiver.chunk(differing, other.stored.read_chunk(differing))])
    receiver.finish()
    assert other.invisible()
    other.finish()


def test_a_chunk_of_what_was_not_offered(receiver: Receiver) -> None:
    for artifact_id, expected in ((b"\x07" * 32, errors.NotFoundError), (b"\x07" * 31, errors.InvalidRequestError)):
        with pytest.raises(expected, match="not offered here|31 bytes, a digest has 32"):
            receiver.driver.put([receiver.chunk(0, artifact_id=artifact_id)])
    assert receiver.missing() == list(range(receiver.count))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_chunk_at_the_message_limit_and_over_it(receiver: Receiver, extra: int) -> None:
    import grpc

    options = [("grpc.max_send_message_length", -1)]
    room = limits.MAX_MESSAGE_BYTES - receiver.chunk(ONE, b"").ByteSize() - 5
    request = receiver.chunk(ONE, bytes(room + extra))
    assert request.ByteSize() == limits.MAX_MESSAGE_BYTES + extra
    with grpc.insecure_channel(receiver.driver.receiver, options=options) as channel:
        from kvferry.proto.v1 import receiver_service_pb2_grpc

        stub = receiver_service_pb2_grpc.ReceiverServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Put(iter([request])))
    status = caught.value.code()  # type: ignore[attr-defined]
    assert status is (grpc.StatusCode.RESOURCE_EXHAUSTED if extra else grpc.StatusCode.DATA_LOSS)
    assert receiver.missing() == list(range(receiver.count))
    receiver.finish()


def test_commits_that_come_too_soon_or_twice(receiver: Receiver) -> None:
    with pytest.raises(errors.TransferError, match=f"chunk 0: missing, {receiver.count} chunks in all"):
        receiver.driver.commit(receiver.stored.artifact_id)
    receipt = receiver.finish()
    assert receiver.driver.commit(receiver.stored.artifact_id) == receipt
    assert receiver.driver.offer(receiver.stored.encoded).committed


@pytest.mark.parametrize("account", ["{", "{}", "[]", '{"prefill_tokens": "many"}'])
def test_a_commit_with_an_account_that_cannot_be_read(receiver: Receiver, account: str) -> None:
    receiver.driver.put(receiver.chunks(*range(receiver.count)))
    with pytest.raises(errors.InvalidRequestError, match="^account_json: "):
        receiver.driver.commit(receiver.stored.artifact_id, account)
    assert receiver.invisible()
    receiver.finish()


def test_a_drop_in_the_middle_starts_over(receiver: Receiver) -> None:
    receiver.driver.put(receiver.chunks(*range(10)))
    receiver.driver.drop(receiver.stored.artifact_id)
    with pytest.raises(errors.NotFoundError, match="not offered here"):
        receiver.driver.put(receiver.chunks(10))
    assert receiver.missing() == list(range(receiver.count))
    # The dropped chunks belong to an assembly that is gone; the new one is charged for its own only.
    assert receiver.finish().received_bytes == receiver.stored.manifest.payload.length


@pytest.mark.parametrize("place", ["header", "ids", "last value"])
def test_a_byte_that_rots_on_the_receivers_disk_is_never_answered_from(receiver: Receiver, place: str) -> None:
    receiver.finish()
    path = receiver.root / "artifacts" / receiver.stored.artifact_id.hex() / "payload.safetensors"
    data = bytearray(path.read_bytes())
    offset = {"header": 20, "ids": receiver.stored.plan.range(1)[0] + 2, "last value": len(data) - 2}[place]
    data[offset] ^= 0x10
    path.write_bytes(data)
    with contextlib.ExitStack() as stack:
        if place != "header":
            stack.enter_context(pytest.raises(errors.KvferryError, match="digest"))
        # Nothing is read from the header: it follows from the manifest.
        assert receiver.driver.ask(receiver.stored.artifact_id, QUESTION).ids
    assert receiver.driver.healthy(receiver.driver.receiver)


def test_nothing_is_left_open_after_many_broken_streams(receiver: Receiver) -> None:
    """A descriptor or a thread a stream would add up."""

    def open_files() -> int:
        folder = Path("/proc/self/fd")
        return len(list(folder.iterdir())) if folder.exists() else 0

    bad = receiver.chunk(ONE, bytes(1024))
    for _ in range(5):
        with pytest.raises(errors.IntegrityError):
            receiver.driver.put([bad])
    files, threads = open_files(), threading.active_count()
    for _ in range(40):
        with pytest.raises(errors.IntegrityError):
            receiver.driver.put([bad])
    assert open_files() <= files + 2
    assert threading.active_count() <= threads + 4
    receiver.finish()
