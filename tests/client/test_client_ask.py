"""Questions, by either client, against a receiver that does what the test says."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.client import (
    Artifact,
    CancelledError,
    Client,
    ContextOverflowError,
    DeadlineError,
    InvalidRequestError,
    LookUpError,
    NotFoundError,
    PeerError,
    Piece,
    TransferError,
)


def test_an_answer_is_whole(kv: Any, daemons: Any, fakes: Any) -> None:
    answer = kv.ask(fakes.ARTIFACT.hex(), "Which?", max_tokens=9, temperature=0.5, top_p=0.9, seed=3)

    assert answer.text == fakes.TEXT
    assert answer.token_ids == (11, 12, 13, 14)
    assert answer.finish_reason == "stop"
    assert (answer.ledger.wire_bytes, answer.ledger.ms.first_token) == (1120, 4.0)
    (request,) = daemons.receiver.requests
    assert (request.artifact_id, request.question, request.max_tokens) == (fakes.ARTIFACT, "Which?", 9)
    assert (request.temperature, request.top_p, request.seed) == (0.5, 0.9, 3)


def test_the_defaults_are_greedy(kv: Any, daemons: Any, fakes: Any) -> None:
    kv.ask(fakes.ARTIFACT.hex(), "Which?")
    (request,) = daemons.receiver.requests
    assert (request.max_tokens, request.temperature, request.top_p, request.seed) == (128, 0.0, 1.0, 0)


def test_a_stream_gives_pieces_and_then_the_answer(kv: Any, fakes: Any) -> None:
    with kv.stream(fakes.ARTIFACT.hex(), "Which?") as stream:
        with pytest.raises(TransferError, match="not complete: 0 tokens"):
            _ = stream.answer
        first = next(stream)
        with pytest.raises(TransferError, match="not complete: 1 tokens"):
            _ = stream.answer
        rest = list(stream)
    assert first == Piece(11, "The")
    assert [item.token_id for item in rest] == [12, 13, 14, None]
    assert fakes.text_of([first, *rest]) == stream.answer.text == fakes.TEXT
    stream.close()


def test_nothing_is_asked_before_the_iteration(kv: Any, daemons: Any, fakes: Any) -> None:
    stream = kv.stream(fakes.ARTIFACT.hex(), "Which?")
    assert not daemons.receiver.begun.acquire(timeout=0.2)
    stream.close()
    assert daemons.receiver.requests == []


def test_the_receiver_is_told_where_passages_are_looked_up(open_client: Any, daemons: Any, fakes: Any) -> None:
    for settings in ({}, {"look_up_at": "studio.local:9"}, {"look_up_at": ""}):
        open_client(**settings).ask(fakes.ARTIFACT.hex(), "Which?")
    told = [request.sender for request in daemons.receiver.requests]
    assert told == [daemons.address, "studio.local:9", ""]


def test_a_failed_look_up_names_what_is_missing(kv: Any, daemons: Any, fakes: Any) -> None:
    fields = {"references": "gate code; gate lamp", "sender": "studio.local:9", "reason": "DEADLINE"}

    def script(_request: Any, context: Any) -> Any:
        fakes.abort(context, "UNAVAILABLE", "passages cannot be had", "LOOK_UP", fields)
        yield

    daemons.receiver.script = script
    with pytest.raises(LookUpError, match="passages cannot be had") as caught:
        kv.ask(fakes.ARTIFACT.hex(), "Which?")
    assert caught.value.fields == fields
    assert caught.value.retryable


def test_a_truncated_answer_is_no_success(kv: Any, daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = lambda *_: iter([fakes.piece("The", 11), fakes.piece(" code", 12)])
    with pytest.raises(TransferError, match="not complete: 2 tokens came, its end did not"):
        kv.ask(fakes.ARTIFACT.hex(), "Which?")
    stream = kv.stream(fakes.ARTIFACT.hex(), "Which?")
    with pytest.raises(TransferError):
        list(stream)
    with pytest.raises(TransferError):
        _ = stream.answer


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"token_ids": [11, 12]}, TransferError, "the answer's 2 tokens are not the 4 that were streamed"),
        ({"token_ids": [11, 12, 13, 15]}, TransferError, "the answer's 4 tokens are not the 4"),
        ({"ledger_json": "{}"}, PeerError, "ledger cannot be read"),
        ({"ledger_json": ""}, PeerError, "ledger cannot be read"),
        ({"ledger_json": "other"}, TransferError, "asked about artifact .*, answered about"),
    ],
)
def test_an_end_that_does_not_fit_is_refused(
    kv: Any, daemons: Any, fakes: Any, *, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    if changes.get("ledger_json") == "other":
        changes = {"ledger_json": fakes.ledger(fakes.OTHER)}

    def script(request: Any, _context: Any) -> Any:
        yield from [fakes.piece(text, token_id) for text, token_id in fakes.TOKENS]
        yield fakes.answer_end(request, **changes)

    daemons.receiver.script = script
    with pytest.raises(kind, match=message):
        kv.ask(fakes.ARTIFACT.hex(), "Which?")


def test_nothing_may_follow_the_end(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(request: Any, _context: Any) -> Any:
        yield fakes.answer_end(request, token_ids=[])
        yield fakes.piece("more", 1)

    daemons.receiver.script = script
    with pytest.raises(TransferError, match="went on after its end"):
        kv.ask(fakes.ARTIFACT.hex(), "Which?")


def test_errors_keep_class_and_fields(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(_request: Any, context: Any) -> Any:
        yield fakes.piece("The", 11)
        fields = {"value": 5000, "limit": 4096, "share": 1.5, "nothing": None}
        fakes.abort(context, "INVALID_ARGUMENT", "too long", "CONTEXT_OVERFLOW", fields)

    daemons.receiver.script = script
    with pytest.raises(ContextOverflowError, match=r"^too long$") as caught:
        kv.ask(fakes.ARTIFACT.hex(), "Which?")
    assert caught.value.fields == {"value": 5000, "limit": 4096, "share": 1.5, "nothing": None}


def eventually(condition: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 5
    while not condition() and time.monotonic() < limit:
        time.sleep(0.01)
    return condition()


def wait_for_end(daemons: Any) -> bool:
    """Whether the call ends on the receiver's side."""
    ended: bool = daemons.receiver.ended.acquire(timeout=5)
    return ended


@pytest.mark.parametrize("leave", ["close", "with", "garbage"])
def test_an_abandoned_stream_is_cancelled(kv: Any, daemons: Any, fakes: Any, leave: str) -> None:
    daemons.receiver.script = daemons.receiver.endless
    stream = kv.stream(fakes.ARTIFACT.hex(), "Which?")
    assert next(stream).text == "The"
    if leave == "close":
        stream.close()
    elif leave == "with":
        with pytest.raises(ZeroDivisionError), stream:
            raise ZeroDivisionError
    else:
        del stream
        gc.collect()
        # The event loop closes what was dropped.
        kv.artifacts()
    assert wait_for_end(daemons)


def test_silence_is_a_deadline_and_ends_the_call(open_client: Any, daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.silent
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"nothing came from Ask for 0\.2 s") as caught:
        open_client(idle_timeout=0.2).ask(fakes.ARTIFACT.hex(), "Which?")
    assert 0.2 <= time.monotonic() - start < 20
    assert caught.value.fields["peer"] == daemons.address
    assert wait_for_end(daemons)


def test_a_slow_reader_is_no_deadline(open_client: Any, fakes: Any) -> None:
    with open_client(idle_timeout=0.2).stream(fakes.ARTIFACT.hex(), "Which?") as stream:
        next(stream)
        time.sleep(0.5)
        list(stream)
    assert stream.answer.text == fakes.TEXT


def test_another_thread_may_cancel(daemons: Any, fakes: Any) -> None:
    import threading

    from kvferry.client import Client

    daemons.receiver.script = daemons.receiver.endless
    with Client(receiver=daemons.address) as client:
        stream = client.stream(fakes.ARTIFACT.hex(), "Which?")
        next(stream)
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        with pytest.raises(CancelledError):
            next(stream)
        timer.join()
    assert wait_for_end(daemons)


class TestReferences:
    def test_a_list_entry(self, kv: Any, daemons: Any, fakes: Any) -> None:
        first, second = kv.artifacts()
        assert first == Artifact(fakes.ARTIFACT.hex(), "B1", "kv", 1000, 40, 1.5, 2.5, None)
        kv.ask(second, "Which?")
        assert daemons.receiver.requests[-1].artifact_id == fakes.OTHER

    def test_a_prefix(self, kv: Any, daemons: Any, fakes: Any) -> None:
        kv.ask(fakes.OTHER.hex()[:8].upper(), "Which?")
        assert daemons.receiver.requests[-1].artifact_id == fakes.OTHER

    def test_a_prefix_of_nothing(self, kv: Any, daemons: Any) -> None:
        with pytest.raises(NotFoundError, match=f"artifact 00000000: not held by {daemons.address}"):
            kv.ask("00000000", "Which?")

    def test_a_prefix_of_several(self, kv: Any, daemons: Any) -> None:
        daemons.receiver.held = [b"\xab" * 31 + bytes([last]) for last in (1, 2)]
        with pytest.raises(InvalidRequestError, match="begins 2 ids"):
            kv.drop("ab" * 8)
        assert daemons.receiver.dropped == []


class TestAskMany:
    QUESTIONS = tuple(f"Question {number}?" for number in range(9))

    def test_answers_come_in_order_and_not_all_at_once(self, kv: Any, daemons: Any, fakes: Any) -> None:
        def script(request: Any, _context: Any) -> Any:
            # The first is the slowest, so that finishing order and question order differ.
            time.sleep(0.12 if "0" in request.question else 0.02)
            yield fakes.answer_end(request, text=request.question, token_ids=[])

        daemons.receiver.script = script
        answers = kv.ask_many(fakes.ARTIFACT.hex(), self.QUESTIONS, concurrency=3, max_tokens=5)
        assert [answer.text for answer in answers] == list(self.QUESTIONS)
        assert daemons.receiver.most_running == 3
        assert {request.max_tokens for request in daemons.receiver.requests} == {5}

    def test_the_first_failure_gives_the_rest_up(self, kv: Any, daemons: Any, fakes: Any) -> None:
        def script(request: Any, context: Any) -> Any:
            if "2" in request.question:
                time.sleep(0.05)
                fakes.abort(context, "NOT_FOUND", "gone", "NOT_FOUND", {})
            yield from daemons.receiver.endless(request, context)

        daemons.receiver.script = script
        start = time.monotonic()
        with pytest.raises(NotFoundError, match="gone"):
            kv.ask_many(fakes.ARTIFACT.hex(), self.QUESTIONS, concurrency=3)
        assert time.monotonic() - start < 20
        begun = len(daemons.receiver.requests)
        assert 3 <= begun <= 5
        assert eventually(lambda: daemons.receiver.running == 0)

    def test_a_wrong_question_stops_all_before_the_first(self, kv: Any, daemons: Any, fakes: Any) -> None:
        with pytest.raises(InvalidRequestError, match="question: is empty"):
            kv.ask_many(fakes.ARTIFACT.hex(), ["Which?", ""])
        with pytest.raises(InvalidRequestError, match="concurrency: 0"):
            kv.ask_many(fakes.ARTIFACT.hex(), ["Which?"], concurrency=0)
        assert daemons.receiver.requests == []

    def test_no_question_no_answer(self, kv: Any, fakes: Any) -> None:
        assert kv.ask_many(fakes.ARTIFACT.hex(), []) == []


def test_five_hundred_abandoned_answers_leave_nothing(daemons: Any, fakes: Any) -> None:
    import threading

    from kvferry.client import Client

    daemons.receiver.script = daemons.receiver.endless
    before = threading.active_count()
    with Client(receiver=daemons.address) as client:
        for _ in range(500):
            with client.stream(fakes.ARTIFACT.hex(), "Which?") as stream:
                next(stream)
        assert eventually(lambda: daemons.receiver.running == 0)
    assert len(daemons.receiver.requests) == 500
    # What is left are the fake server's own workers.
    assert eventually(lambda: threading.active_count() <= before + 12)


def test_what_was_cancelled_before_it_began_ends_at_once(daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.endless
    with Client(receiver=daemons.address, idle_timeout=5) as client:
        stream = client.stream(fakes.ARTIFACT.hex(), "Which?")
        stream.cancel()
        with pytest.raises(CancelledError):
            list(stream)


def test_an_unknown_event_is_passed_over(kv: Any, daemons: Any, fakes: Any) -> None:
    unknown = fakes.receiver_service_pb2.AskResponse()
    daemons.receiver.script = lambda request, _: iter([unknown, fakes.answer_end(request, token_ids=[])])
    assert kv.ask(fakes.ARTIFACT.hex(), "Which?").text == fakes.TEXT
