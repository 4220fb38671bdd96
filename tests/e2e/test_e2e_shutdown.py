"""SIGTERM: what is under way is finished or ended within the grace period, and the exit status is 0."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.core import errors, rpc
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import receiver_service_pb2 as pb

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? "
TOKENS = 150


def long_question(model: LoadedModel, local_answer: Callable[..., tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    """Return a question that the model answers at length, and its answer."""
    for number in range(50):
        question = f"What is in crate {number}?"
        ids = local_answer(model, DOCUMENT, question, TOKENS)
        if len(ids) == TOKENS:
            return question, ids
    raise AssertionError("no long answer")


def deliver(driver: Any, stored: Stored) -> None:
    driver.offer(stored.encoded)
    driver.put(
        pb.PutRequest(artifact_id=stored.artifact_id, index=index, data=stored.read_chunk(index))
        for index in range(stored.plan.count)
    )
    driver.commit(stored.artifact_id)


@pytest.mark.parametrize(("number", "grace"), [(signal.SIGTERM, 20.0), (signal.SIGINT, 0.2)])
def test_an_answer_on_its_way_when_the_receiver_is_told_to_stop(
    process: Callable[..., Any],
    peers: Callable[..., Any],
    artifact: Callable[..., Stored],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    local_answer: Callable[..., tuple[int, ...]],
    tmp_path: Path,
    number: int,
    grace: float,
) -> None:
    model = tiny_model()
    stored = artifact(model, "B1", DOCUMENT)
    daemon = process("receiver", tiny_model_dir(), grace_seconds=grace)
    driver = peers(receiver=daemon.address)
    deliver(driver, stored)
    patient = grace > 1
    if patient:
        question, expected = long_question(model, local_answer)
        call = driver.ask_call(stored.artifact_id, question, TOKENS)
    else:
        call = driver.ask_call(stored.artifact_id, "What?", 3500, temperature=1.0, seed=3)
    assert next(call).piece.HasField("token_id")
    start = time.perf_counter()
    daemon.popen.send_signal(number)
    if patient:
        assert driver.finish_ask(call).ids == expected
        with pytest.raises(errors.UnavailableError):
            driver.listed()
    else:
        with pytest.raises((errors.UnavailableError, errors.CancelledError)):
            driver.finish_ask(call)
    assert daemon.popen.wait(30) == 0
    # A daemon with nothing more to do does not wait for its grace period to pass.
    assert time.perf_counter() - start < 15
    lines = (tmp_path / "receiver" / "ledger.jsonl").read_text().count("\n")
    assert lines == (1 if patient else 0)


def test_a_long_question_does_not_keep_the_receiver_from_stopping(
    process: Callable[..., Any],
    peers: Callable[..., Any],
    artifact: Callable[..., Stored],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = tiny_model(context=8192)
    stored = artifact(model, "B1", DOCUMENT)
    # A token a pass: as slow as a large model, and the question takes far longer than the test waits.
    daemon = process("receiver", tiny_model_dir(context=8192), grace_seconds=0.2, prefill_chunk=1)
    driver = peers(receiver=daemon.address)
    deliver(driver, stored)
    assert driver.ask(stored.artifact_id, "What?", 2).ids
    question = DOCUMENT * (4000 // len(model.tokenizer.encode(DOCUMENT, add_special_tokens=False)))
    call = driver.ask_call(stored.artifact_id, question, 4)
    time.sleep(0.5)
    assert call.is_active()
    start = time.perf_counter()
    daemon.popen.send_signal(signal.SIGTERM)
    with pytest.raises(errors.UnavailableError, match=f"^{daemon.address}: is stopping, and ended Ask$"):
        driver.finish_ask(call)
    assert daemon.popen.wait(30) == 0
    assert time.perf_counter() - start < 2.5
    assert (tmp_path / "receiver" / "ledger.jsonl").read_text().count("\n") == 1


def test_a_transfer_on_its_way_when_the_receiver_is_told_to_stop(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    artifact: Callable[..., Stored],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
) -> None:
    stored = artifact(tiny_model(), "B1", DOCUMENT)
    receiver = here("receiver", tiny_model_dir())
    driver = peers(receiver=receiver.address)
    driver.offer(stored.encoded)

    def half() -> Any:
        for index in range(stored.plan.count // 2):
            yield pb.PutRequest(artifact_id=stored.artifact_id, index=index, data=stored.read_chunk(index))
        receiver.stop()

    with pytest.raises(errors.KvferryError) as caught:
        driver.put(half())
    # A sender tries again only after what may pass.
    assert caught.value.retryable, type(caught.value)
    acknowledged = caught.value.acknowledged  # type: ignore[attr-defined]
    assert acknowledged
    receiver.stop()
    again = peers(receiver=here("receiver", tiny_model_dir()).address)
    runs = again.offer(stored.encoded).missing
    left = [index for run in runs for index in range(run.start, run.end)]
    assert set(left).isdisjoint(acknowledged)
    assert left[-1] == stored.plan.count - 1


def test_a_sender_that_stops_while_it_reads_says_so_to_its_client(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    receiver, sender = here("receiver", tiny_model_dir()), here("sender", tiny_model_dir(), prefill_chunk=1)
    driver = peers(sender.address, receiver.address)
    call = driver.send_call((DOCUMENT * 10).encode())
    for response in call:
        if response.progress.stage == "prefill" and response.progress.done > 3:
            break
    sender.stop()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error = rpc.from_rpc(caught.value, "sender", "Send")
    assert isinstance(error, errors.UnavailableError | errors.CancelledError)
    assert driver.listed() == set()
