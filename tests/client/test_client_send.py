"""Sends, by either client, against a sender that does what the test says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvferry.client import (
    DeadlineError,
    InvalidRequestError,
    PeerError,
    Progress,
    RefusedError,
    TooLargeError,
    TransferError,
    UnavailableError,
    UnknownMethodError,
)

MIB = 1024 * 1024


def test_a_send_reports_what_happened(kv: Any, daemons: Any, fakes: Any) -> None:
    seen: list[Progress] = []
    text = "Grüße,\r\nthe code is 4417.\n"

    report = kv.send(
        text=text, method="snapkv", question="Which?", system="Be brief.", progress=seen.append, budget=256, bits=8.0
    )

    assert report.artifact_id == fakes.ARTIFACT.hex()
    assert (report.method, report.form, report.receiver) == ("snapkv", "kv", daemons.address)
    assert (report.manifest_bytes, report.payload_bytes, report.moved_bytes) == (100, 1000, 1000)
    assert (report.wire_bytes, report.reused) == (1120, False)
    assert (report.account.prefill_tokens, report.account.transfer_ms) == (40, 2.0)
    assert report.document_digest == blake3(text.encode()).hexdigest()
    assert (report.document_bytes, report.document_characters) == (len(text.encode()), len(text))
    assert seen == [Progress("prefill", 0, 40), Progress("prefill", 40, 40), Progress("transfer", 1000, 1000)]
    start = daemons.sender.start
    assert (start.receiver, start.question, start.system) == (daemons.address, "Which?", "Be brief.")
    assert b"".join(daemons.sender.pieces) == text.encode()


def test_parameters_keep_their_types(kv: Any, daemons: Any) -> None:
    kv.send(text="x", method="B1", budget=256, ratio=0.5, rule="sinks", exact=True, absent=None)
    sent = {name: value.WhichOneof("value") for name, value in daemons.sender.start.parameters.items()}
    assert sent == {"budget": "integer", "ratio": "number", "rule": "text", "exact": "flag"}


def test_what_is_not_given_is_absent(kv: Any, daemons: Any) -> None:
    kv.send(text="x")
    assert daemons.sender.start.method == "B1"
    assert not daemons.sender.start.HasField("system")
    assert not daemons.sender.start.HasField("question")
    kv.send(text="x", system="")
    assert daemons.sender.start.HasField("system")


def test_a_report_can_be_asked(open_client: Any, daemons: Any, fakes: Any) -> None:
    client = open_client()
    report = client.send(text="x")
    if hasattr(client, "loop"):
        answer = client.loop.run_until_complete(report.ask("Which code?", max_tokens=7))
        with type(client.stream(report, "x"))(report.stream("Which?", seed=5), client.loop) as stream:
            assert fakes.text_of(list(stream)) == fakes.TEXT
    else:
        answer = report.ask("Which code?", max_tokens=7)
        with report.stream("Which?", seed=5) as stream:
            assert fakes.text_of(list(stream)) == fakes.TEXT
    assert answer.text == fakes.TEXT
    first, second = daemons.receiver.requests
    assert (first.artifact_id, first.question, first.max_tokens) == (fakes.ARTIFACT, "Which code?", 7)
    assert (second.question, second.seed) == ("Which?", 5)
    assert "client" not in repr(report)


def test_deliver_to_reaches_the_sender(open_client: Any, daemons: Any) -> None:
    open_client(deliver_to="mini.local:9").send(text="x")
    assert daemons.sender.start.receiver == "mini.local:9"
    open_client(deliver_to="tcp://mini.local:7413").send(text="x")
    assert daemons.sender.start.receiver == "tcp://mini.local:7413"
    open_client(deliver_to="").send(text="x")
    assert daemons.sender.start.receiver == ""


def test_a_large_document_goes_in_pieces(kv: Any, daemons: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes(b"0123456789abcdef" * (5 * MIB // 16) + b"!")
    report = kv.send(path)
    assert report.document_bytes == 5 * MIB + 1
    assert [len(piece) for piece in daemons.sender.pieces] == [MIB] * 5 + [1]


def test_a_sender_that_gives_up_early_is_heard(kv: Any, daemons: Any, fakes: Any) -> None:
    def refuse(context: Any) -> None:
        fakes.abort(context, "RESOURCE_EXHAUSTED", "document: 5 bytes too many", "TOO_LARGE", {"limit": 7})

    daemons.sender.before_text = refuse
    with pytest.raises(TooLargeError, match=r"^document: 5 bytes too many$") as caught:
        kv.send(b"x" * (3 * MIB))
    assert caught.value.fields == {"limit": 7}


@pytest.mark.parametrize(
    ("kind", "status", "code", "fields"),
    [
        (RefusedError, "FAILED_PRECONDITION", "REFUSED", {"reasons": 2, "verdict_json": "[]"}),
        (UnknownMethodError, "INVALID_ARGUMENT", "UNKNOWN_METHOD", {"field": "method", "value": "zz"}),
        (UnavailableError, "UNAVAILABLE", "UNAVAILABLE", {"peer": "mini.local:7412"}),
    ],
)
def test_errors_keep_class_and_fields(
    kv: Any, daemons: Any, fakes: Any, *, kind: type[Exception], status: str, code: str, fields: dict[str, Any]
) -> None:
    def script(_start: Any, context: Any) -> Any:
        yield fakes.send_progress("prefill", 0, 1)
        fakes.abort(context, status, "what happened", code, fields)

    daemons.sender.script = script
    with pytest.raises(kind, match=r"^what happened$") as caught:
        kv.send(text="x")
    assert type(caught.value) is kind
    assert caught.value.fields == fields


def test_a_failure_without_our_details_is_a_peer_error(kv: Any, daemons: Any) -> None:
    def script(_start: Any, _context: Any) -> Any:
        raise RuntimeError
        yield

    daemons.sender.script = script
    with pytest.raises(PeerError, match=f"{daemons.address}: Send failed with UNKNOWN"):
        kv.send(text="x")


def test_an_end_without_the_terminal_message_is_no_success(kv: Any, daemons: Any, fakes: Any) -> None:
    daemons.sender.script = lambda *_: iter([fakes.send_progress("transfer", 1000, 1000)])
    with pytest.raises(TransferError, match="the send stopped before its end"):
        kv.send(text="x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifact_id": b"short"}, "an artifact id of 5 bytes came, it has 32"),
        ({"account_json": "{}"}, "account cannot be read"),
        ({"account_json": "not json"}, "account cannot be read"),
    ],
)
def test_an_unreadable_end_is_refused(kv: Any, daemons: Any, fakes: Any, changes: dict[str, Any], message: str) -> None:
    daemons.sender.script = lambda start, _: iter([fakes.send_end(start, **changes)])
    with pytest.raises(PeerError, match=message):
        kv.send(text="x")


def test_nothing_may_follow_the_end(kv: Any, daemons: Any, fakes: Any) -> None:
    daemons.sender.script = lambda start, _: iter([fakes.send_end(start), fakes.send_progress("x", 1, 1)])
    with pytest.raises(TransferError, match="went on after its end"):
        kv.send(text="x")


def test_a_failure_after_the_end_is_a_failure(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(start: Any, context: Any) -> Any:
        yield fakes.send_end(start)
        fakes.abort(context, "ABORTED", "lost after all", "TRANSFER", {})

    daemons.sender.script = script
    with pytest.raises(TransferError, match="lost after all"):
        kv.send(text="x")


def test_an_unknown_event_is_passed_over(kv: Any, daemons: Any, fakes: Any) -> None:
    unknown = fakes.sender_service_pb2.SendResponse()
    daemons.sender.script = lambda start, _: iter([unknown, fakes.send_end(start)])
    assert kv.send(text="x").artifact_id == fakes.ARTIFACT.hex()


def test_silence_is_a_deadline_and_ends_the_call(open_client: Any, daemons: Any, fakes: Any) -> None:
    ended: list[bool] = []

    def script(_start: Any, context: Any) -> Any:
        yield fakes.send_progress("prefill", 0, 1)
        while context.is_active():
            time.sleep(0.005)
        ended.append(True)

    daemons.sender.script = script
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=f"{daemons.address}: nothing came from Send for 0.2 s"):
        open_client(idle_timeout=0.2).send(text="x")
    assert 0.2 <= time.monotonic() - start < 20
    while not ended and time.monotonic() - start < 5:
        time.sleep(0.01)
    assert ended


def test_a_slow_but_living_sender_is_no_deadline(open_client: Any, daemons: Any, fakes: Any) -> None:
    def script(start: Any, _context: Any) -> Any:
        for done in range(6):
            time.sleep(0.1)
            yield fakes.send_progress("prefill", done, 6)
        yield fakes.send_end(start)

    daemons.sender.script = script
    assert open_client(idle_timeout=0.4).send(text="x").form == "kv"


def test_an_error_in_the_callback_ends_the_send(kv: Any, daemons: Any, fakes: Any) -> None:
    ended: list[bool] = []

    def script(_start: Any, context: Any) -> Any:
        context.add_callback(lambda: ended.append(True))
        yield fakes.send_progress("prefill", 0, 1)
        while context.is_active():
            time.sleep(0.005)

    def complain(_: Progress) -> None:
        raise ZeroDivisionError

    daemons.sender.script = script
    with pytest.raises(ZeroDivisionError):
        kv.send(text="x", progress=complain)
    limit = time.monotonic() + 5
    while not ended and time.monotonic() < limit:
        time.sleep(0.01)
    assert ended


def test_nothing_leaves_for_a_wrong_document(kv: Any, daemons: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no such file"):
        kv.send("no-such-report.txt")
    assert daemons.sender.start.text_bytes == 0
