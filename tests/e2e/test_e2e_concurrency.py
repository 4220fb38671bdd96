"""Several things at once, and work that is given up: right answers, free workers, and a daemon that always replies."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors
from kvferry.engine.model import LoadedModel

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? "
QUESTIONS = ("What is the access code?", "Who keeps the keys, and when?")
SECONDS = 30.0


class Watched:
    """A model whose every forward pass is counted and takes at least a while."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.passes: list[int] = []
        self.changed = threading.Condition()

    def __call__(self, inputs: Any, **options: Any) -> Any:
        with self.changed:
            self.passes.append(int(inputs.shape[1]))
            self.changed.notify_all()
        time.sleep(self._seconds)
        return self._inner(inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait_for(self, count: int) -> None:
        """Wait until so many passes have begun."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.passes) >= count, SECONDS)

    def settled(self) -> int:
        """Wait until no pass begins any more, and return how many there were."""
        while True:
            before = len(self.passes)
            time.sleep(5 * self._seconds + 0.05)
            if len(self.passes) == before:
                return before


@pytest.fixture
def watched() -> Callable[[float], tuple[Callable[[LoadedModel], LoadedModel], list[Watched]]]:
    """Return a function: a wrapper for a daemon's model, and where the wrapped model will be found."""

    def make(seconds: float) -> tuple[Callable[[LoadedModel], LoadedModel], list[Watched]]:
        made: list[Watched] = []

        def wrap(loaded: LoadedModel) -> LoadedModel:
            made.append(Watched(loaded.model, seconds))
            return dataclasses.replace(loaded, model=made[-1])

        return wrap, made

    return make


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that start together."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait(SECONDS)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(2 * SECONDS) for future in [pool.submit(run, job) for job in jobs]]


def test_four_sends_and_asks_at_once(
    both: Any, pair_model: LoadedModel, local_answer: Callable[..., tuple[int, ...]]
) -> None:
    texts = [f"At once, {number}. {DOCUMENT * (number + 1)}" for number in range(4)]
    methods = ("B1", "B1", "A1", "B0")
    sends = [
        lambda text=text, method=method: both.send(text, method) for text, method in zip(texts, methods, strict=True)
    ]
    sent = at_once(*sends)
    expected = [local_answer(pair_model, text, QUESTIONS[0]) for text in texts]
    assert len(set(expected)) > 1
    asks = [lambda artifact_id=one.artifact_id: both.ask(artifact_id, QUESTIONS[0]).ids for one in sent]
    assert at_once(*asks) == expected
    # Four questions about the same artifact.
    same = [lambda question=question: both.ask(sent[0].artifact_id, question).ids for question in QUESTIONS * 2]
    assert at_once(*same) == [local_answer(pair_model, texts[0], question) for question in QUESTIONS] * 2


def test_the_same_document_four_times_at_once(both: Any) -> None:
    text = f"The same four times. {DOCUMENT}"
    sent = at_once(*[lambda: both.send(text) for _ in range(4)])
    assert len({one.artifact_id for one in sent}) == 1
    # Every send is told of success, whichever of them did the work.
    assert max(one.end.moved_bytes for one in sent) <= sent[0].end.payload_bytes
    assert both.ask(sent[0].artifact_id, QUESTIONS[0]).ids


def test_first_questions_at_once_prepare_the_cache_once(both: Any) -> None:
    artifact_id = both.send(f"Prepared once. {DOCUMENT * 6}", "B0").artifact_id
    asked = at_once(*[lambda: both.ask(artifact_id, QUESTIONS[0], 3) for _ in range(4)])
    assert len({one.ids for one in asked}) == 1
    assert sorted(one.ledger["ms"]["receiver_prefill"] > 0 for one in asked) == [False, False, False, True]


def test_a_long_prefill_never_blocks_a_health_check(both: Any, pair: Any, pair_model: LoadedModel) -> None:
    text = "Every crate that arrives is weighed and counted. " * 75
    assert len(pair_model.prompt.prefix(text)) > 1200
    times: list[tuple[float, float]] = []
    reading: list[float] = []
    done = threading.Event()

    def check() -> None:
        while not done.is_set():
            start = time.perf_counter()
            assert both.healthy(pair.sender)
            times.append((start, time.perf_counter()))

    def send() -> None:
        try:
            call = both.send_call(text.encode())
            reading.extend(time.perf_counter() for response in call if response.progress.stage == "prefill")
        finally:
            done.set()

    at_once(check, send)
    during = [end - start for start, end in times if reading[0] < start and end < reading[-1]]
    assert len(during) >= 3
    assert max(during) < 1.0


def test_a_short_question_is_answered_during_a_long_answer(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
) -> None:
    wrap, models = watched(0.01)
    sender, receiver = here("sender", tiny_model_dir()), here("receiver", tiny_model_dir(), wrap=wrap)
    driver = peers(sender.address, receiver.address)
    artifact_id = driver.send(DOCUMENT).artifact_id
    long = driver.ask_call(artifact_id, QUESTIONS[0], 2000, temperature=1.0, seed=4)
    assert next(long).piece.HasField("token_id")
    before = len(models[0].passes)
    assert driver.ask(artifact_id, QUESTIONS[1], 5).ids
    # Turns are fair: five tokens and a question cost about as many passes of the long answer.
    assert len(models[0].passes) - before < 40
    assert long.is_active()
    long.cancel()


def test_a_short_question_is_answered_while_a_long_one_is_read(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
    local_answer: Callable[..., tuple[int, ...]],
) -> None:
    tokens, chunk = 4000, 64
    wrap, models = watched(0.05)
    model = tiny_model(context=8192)
    sender = here("sender", tiny_model_dir(context=8192))
    receiver = here("receiver", tiny_model_dir(context=8192), wrap=wrap, prefill_chunk=chunk)
    driver = peers(sender.address, receiver.address)
    artifact_id = driver.send(DOCUMENT).artifact_id
    assert driver.ask(artifact_id, QUESTIONS[1], 4).ids
    question = QUESTIONS[0] * (tokens // len(model.tokenizer.encode(QUESTIONS[0], add_special_tokens=False)))
    fresh = len(model.prompt.fresh(question))
    assert fresh > 0.9 * tokens
    before = len(models[0].passes)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(driver.ask, artifact_id, question, 4)
        models[0].wait_for(before + 3)
        start = time.perf_counter()
        assert driver.healthy(receiver.address)
        assert driver.ask(artifact_id, QUESTIONS[1], 4).ids
        assert driver.healthy(receiver.address)
        # Turns are fair: the short question has about five passes, and the long one one after each.
        assert time.perf_counter() - start < 2.0
        assert len(models[0].passes) - before < 30
        assert not long.done()
        asked = long.result(SECONDS)
    assert max(models[0].passes) == chunk
    assert asked.ids == local_answer(model, DOCUMENT, question, 4)
    # What gave others their turn is neither shown nor counted.
    assert [piece.token_id for piece in asked.pieces if piece.HasField("token_id")] == list(asked.ids)
    assert all(piece.HasField("token_id") or piece.text for piece in asked.pieces)
    assert asked.ledger["tokens"]["receiver_prefill"] == fresh
    assert asked.ledger["tokens"]["generated"] == len(asked.ids)


def test_a_long_question_that_is_given_up_frees_the_worker(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
) -> None:
    wrap, models = watched(0.02)
    sender = here("sender", tiny_model_dir())
    receiver = here("receiver", tiny_model_dir(), wrap=wrap, prefill_chunk=4)
    driver = peers(sender.address, receiver.address)
    artifact_id = driver.send(DOCUMENT).artifact_id
    before = len(models[0].passes)
    call = driver.ask_call(artifact_id, "Who keeps the keys? " * 40, 4)
    models[0].wait_for(before + 3)
    call.cancel()
    assert models[0].settled() < before + 20


def test_a_cancelled_answer_frees_the_worker(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
    tmp_path: Path,
) -> None:
    wrap, models = watched(0.01)
    sender, receiver = here("sender", tiny_model_dir()), here("receiver", tiny_model_dir(), wrap=wrap)
    driver = peers(sender.address, receiver.address)
    artifact_id = driver.send(DOCUMENT).artifact_id
    expected = driver.ask(artifact_id, QUESTIONS[1], 4).ids
    call = driver.ask_call(artifact_id, QUESTIONS[0], 3000, temperature=1.0, seed=4)
    assert [next(call).piece.HasField("token_id") for _ in range(3)] == [True] * 3
    call.cancel()
    assert models[0].settled() < 300
    start = time.perf_counter()
    assert driver.ask(artifact_id, QUESTIONS[1], 4).ids == expected
    assert time.perf_counter() - start < 5
    # What was not answered to its end is not on the ledger.
    assert (tmp_path / "receiver" / "ledger.jsonl").read_text().count("\n") == 2


def test_a_client_that_is_gone_frees_the_worker(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
) -> None:
    wrap, models = watched(0.01)
    sender, receiver = here("sender", tiny_model_dir()), here("receiver", tiny_model_dir(), wrap=wrap)
    gone = peers(sender.address, receiver.address)
    artifact_id = gone.send(DOCUMENT).artifact_id
    calls = [gone.ask_call(artifact_id, QUESTIONS[0], 3000, temperature=1.0, seed=seed) for seed in range(6)]
    for call in calls:
        next(call)
    gone.close()
    assert models[0].settled() < 600
    assert peers(receiver=receiver.address).ask(artifact_id, QUESTIONS[1], 4).ids


def test_an_answer_that_is_given_up_while_the_text_is_read(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
) -> None:
    wrap, models = watched(0.02)
    sender = here("sender", tiny_model_dir())
    receiver = here("receiver", tiny_model_dir(), wrap=wrap, prefill_chunk=4)
    driver = peers(sender.address, receiver.address)
    for method in ("A1", "B0"):
        artifact_id = driver.send(DOCUMENT * 3, method).artifact_id
        before = len(models[0].passes)
        call = driver.ask_call(artifact_id, QUESTIONS[0], 4)
        models[0].wait_for(before + 3)
        call.cancel()
        assert models[0].settled() < before + 20
    # B0 keeps its cache only when it was read to the end, and then for the next question.
    first, second = (driver.ask(artifact_id, QUESTIONS[0], 2) for _ in range(2))
    assert first.ids == second.ids
    assert (first.ledger["tokens"]["reused"], second.ledger["tokens"]["receiver_prefill"]) == (
        0,
        first.ledger["tokens"]["receiver_prefill"] - second.ledger["tokens"]["reused"],
    )


def test_a_cancelled_send_frees_the_worker_and_leaves_nothing(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
    tmp_path: Path,
) -> None:
    wrap, models = watched(0.02)
    receiver = here("receiver", tiny_model_dir())
    sender = here("sender", tiny_model_dir(), wrap=wrap, prefill_chunk=4)
    driver = peers(sender.address, receiver.address)
    call = driver.send_call((DOCUMENT * 6).encode())
    models[0].wait_for(4)
    call.cancel()
    assert models[0].settled() < 25
    assert driver.listed() == set()
    assert list((tmp_path / "sender" / "artifacts").iterdir()) == []
    start = time.perf_counter()
    sent = driver.send("Short. ")
    assert time.perf_counter() - start < 10
    assert driver.listed() == {sent.artifact_id}


def test_a_send_that_is_given_up_while_chunks_move_can_be_sent_again(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    receiver, sender = here("receiver", tiny_model_dir()), here("sender", tiny_model_dir(), chunk_bytes=1024)
    driver = peers(sender.address, receiver.address)
    call = driver.send_call((DOCUMENT * 8).encode())
    for response in call:
        if response.progress.stage == "transfer" and response.progress.done:
            break
    call.cancel()
    sent = driver.send(DOCUMENT * 8)
    assert sent.end.reused
    assert 0 < sent.end.moved_bytes <= sent.end.payload_bytes
    assert driver.ask(sent.artifact_id, QUESTIONS[0]).ids


def test_many_abandoned_calls_leave_nothing_behind(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
) -> None:
    wrap, models = watched(0.001)
    sender, receiver = here("sender", tiny_model_dir()), here("receiver", tiny_model_dir(), wrap=wrap)
    driver = peers(sender.address, receiver.address)
    artifact_id = driver.send(DOCUMENT).artifact_id
    expected = driver.ask(artifact_id, QUESTIONS[0], 4).ids
    for _ in range(60):
        call = driver.ask_call(artifact_id, QUESTIONS[0], 2000, temperature=1.0)
        next(call)
        call.cancel()
    models[0].settled()
    threads = threading.active_count()
    for _ in range(60):
        call = driver.ask_call(artifact_id, QUESTIONS[0], 2000, temperature=1.0)
        next(call)
        call.cancel()
    models[0].settled()
    assert threading.active_count() <= threads + 3
    assert driver.ask(artifact_id, QUESTIONS[0], 4).ids == expected


def test_a_drop_during_an_answer_lets_it_finish(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    watched: Callable[..., Any],
) -> None:
    wrap, _ = watched(0.01)
    sender, receiver = here("sender", tiny_model_dir()), here("receiver", tiny_model_dir(), wrap=wrap)
    driver = peers(sender.address, receiver.address)
    artifact_id = driver.send(DOCUMENT).artifact_id
    expected = driver.ask(artifact_id, QUESTIONS[0], 12).ids
    call = driver.ask_call(artifact_id, QUESTIONS[0], 12)
    next(call)
    driver.drop(artifact_id)
    assert driver.finish_ask(call).ids == expected
    with pytest.raises(errors.NotFoundError):
        driver.ask(artifact_id, QUESTIONS[0])
