"""Daemons that are killed, stopped and started again: what was written stays, and a transfer goes on where it broke."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.receiver.intake import Intake

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 3
QUESTIONS = ("What is the access code?", "Who keeps the keys, and when?")


def chunks(stored: Stored, indices: Any) -> Iterator[pb.PutRequest]:
    for index in indices:
        yield pb.PutRequest(artifact_id=stored.artifact_id, index=index, data=stored.read_chunk(index))


def missing(response: pb.OfferResponse) -> list[int]:
    return [index for run in response.missing for index in range(run.start, run.end)]


def test_a_receiver_that_is_killed_while_chunks_come_and_before_commit(
    process: Callable[..., Any],
    here: Callable[..., Any],
    peers: Callable[..., Any],
    artifact: Callable[..., Stored],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    local_answer: Callable[..., tuple[int, ...]],
) -> None:
    model = tiny_model()
    stored = artifact(model, "B1", DOCUMENT)
    count, half = stored.plan.count, stored.plan.count // 2
    expected = [local_answer(model, DOCUMENT, question) for question in QUESTIONS]

    def started(how: Callable[..., Any]) -> tuple[Any, Any]:
        daemon = how("receiver", tiny_model_dir())
        return daemon, peers(receiver=daemon.address)

    # Killed while chunks come in: each one that was acknowledged is still there.
    first, driver = started(process)
    assert missing(driver.offer(stored.encoded)) == list(range(count))
    acknowledged: list[int] = []
    call = driver.receiving.Put(chunks(stored, range(count)))
    for response in call:
        acknowledged.append(response.index)
        if len(acknowledged) == half:
            first.end(signal.SIGKILL)
            break
    call.cancel()

    # Killed again when all have come, before Commit.
    second, driver = started(process)
    left = missing(driver.offer(stored.encoded))
    assert set(left).isdisjoint(acknowledged)
    assert driver.put(chunks(stored, left)) == left
    with pytest.raises(errors.NotFoundError):
        driver.ask(stored.artifact_id, QUESTIONS[0])
    second.end(signal.SIGKILL)

    # Commit needs no new offer and no chunk again; then it answers.
    third, driver = started(here)
    receipt = driver.commit(stored.artifact_id)
    assert receipt.payload_digest == stored.manifest.payload.digest
    assert driver.ask(stored.artifact_id, QUESTIONS[0]).ids == expected[0]
    third.stop()

    # What was committed answers without a sender.
    _, driver = started(here)
    assert driver.listed() == {stored.artifact_id}
    assert driver.offer(stored.encoded).committed
    asked = driver.ask(stored.artifact_id, QUESTIONS[1])
    assert asked.ids == expected[1]
    assert asked.ledger["wire_bytes"] >= stored.manifest.payload.length + len(stored.encoded)
    # The bill of a transfer over three processes: every chunk once, but for those on their way when the first one died.
    assert asked.ledger["payload_bytes"] == stored.manifest.payload.length
    assert asked.ledger["resent_bytes"] <= 64 * 1024


def test_a_sender_finds_its_artifacts_after_a_restart(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = here("receiver", tiny_model_dir(), store="first receiver")
    sender = here("sender", tiny_model_dir())
    first = peers(sender.address, receiver.address).send(DOCUMENT)
    sender.stop()
    monkeypatch.setattr(LoadedModel, "prefill", lambda *_: pytest.fail("the document was read again"))
    other = here("receiver", tiny_model_dir(), store="second receiver")
    driver = peers(here("sender", tiny_model_dir()).address, other.address)
    again = driver.send(DOCUMENT)
    assert again.end.reused
    assert again.artifact_id == first.artifact_id
    assert again.end.moved_bytes == first.end.payload_bytes
    accounts = [json.loads(sent.end.account_json) | {"transfer_ms": 0.0} for sent in (first, again)]
    assert accounts[0] == accounts[1]
    assert driver.ask(again.artifact_id, QUESTIONS[0]).ids


def test_documents_are_still_looked_up_after_a_restart(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    from kvferry.core.digests import digest
    from kvferry.proto.v1 import sender_service_pb2

    receiver, sender = here("receiver", tiny_model_dir()), here("sender", tiny_model_dir())
    peers(sender.address, receiver.address).send(DOCUMENT, "A0")
    sender.stop()
    driver = peers(here("sender", tiny_model_dir()).address)
    request = sender_service_pb2.FetchSpansRequest(
        document_digest=digest(DOCUMENT.encode()), spans=[sender_service_pb2.Span(start=4, end=10)]
    )
    assert list(driver.sending.FetchSpans(request).texts) == ["access"]


def test_a_send_survives_its_receivers_restart(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    half_way, put = threading.Event(), Intake.put

    def counted(self: Intake, artifact_id: bytes, index: int, data: bytes, control: int) -> None:
        put(self, artifact_id, index, data, control)
        taken.append(index)
        if len(taken) == 30:
            half_way.set()
        # Slow enough for the restart to come in the middle.
        time.sleep(0.005)

    monkeypatch.setattr(Intake, "put", counted)
    receiver = here("receiver", tiny_model_dir())
    sender = here("sender", tiny_model_dir(), chunk_bytes=1024)
    driver = peers(sender.address, receiver.address)
    call = driver.send_call(DOCUMENT.encode())
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(driver.finish_send(call)))
    thread.start()
    assert half_way.wait(30)
    receiver.stop()
    here("receiver", tiny_model_dir(), listen=receiver.address)
    thread.join(60)
    (sent,) = result
    total = sent.end.payload_bytes
    assert sent.end.moved_bytes <= total
    done = [done for stage, done, _ in sent.progress if stage == "transfer"]
    assert done[-1] == total
    # No chunk that was written before the restart was written again after it.
    assert len(set(taken)) == len(taken)
    assert driver.ask(sent.artifact_id, QUESTIONS[0]).ids


def test_two_receivers_cannot_share_a_store(
    here: Callable[..., Any], tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    here("receiver", tiny_model_dir(), store="shared")
    with pytest.raises(errors.StoreError, match="already open in another process"):
        here("receiver", tiny_model_dir(), store="shared")


@pytest.mark.parametrize(
    ("role", "key"), [("sender", "listen"), ("sender", "metrics"), ("receiver", "listen"), ("receiver", "tcp")]
)
def test_a_taken_port_is_one_line_before_the_model_is_looked_at(
    process: Callable[..., Any], tmp_path: Path, role: str, key: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        daemon = process(role, tmp_path / "no-model", **{key: taken})
        assert daemon.popen.wait(30) == 2
    assert daemon.popen.stdout.read().count("\n") == 1  # The error as JSON, which --json asks for.
    (line,) = daemon.logged().splitlines()
    assert line.endswith(f"{key}: {taken} cannot be bound: Address already in use; is another daemon there?")


def test_two_daemons_cannot_share_a_port(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    first = here("receiver", tiny_model_dir())
    with pytest.raises(errors.ConfigError, match=f"^listen: {first.address} cannot be bound"):
        here("sender", tiny_model_dir(), listen=first.address)
    assert peers(receiver=first.address).listed() == set()
    # The one that failed has let go of its store.
    here("sender", tiny_model_dir())
