"""The permission to fall back, by either client: it travels when it is given, and what came of it is said."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from kvferry.client import AskOptions, AsyncClient, Client, QuarantinedError, RefusedError

REASON = "refused: ROPE_MISMATCH positions.rope[0].base: artifact 10000.0, receiver 500000.0"


def in_loop(kv: Any, started: Any) -> Any:
    """The result of a report's own method, which an AsyncClient's report gives as a coroutine."""
    return kv.loop.run_until_complete(started) if inspect.isawaitable(started) else started


@pytest.mark.parametrize("given", [{}, {"fallback": False}, {"fallback": True}])
def test_a_send_carries_the_permission(kv: Any, daemons: Any, given: dict[str, bool]) -> None:
    report = kv.send(text="x", method="B1", budget=8, **given)
    assert daemons.sender.start.allow_fallback is given.get("fallback", False)
    # It is no parameter of the method.
    assert set(daemons.sender.start.parameters) == {"budget"}
    assert report.fallback_reason is None
    assert report.account.fallback_reason is None


def test_a_report_says_why_the_text_was_sent(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(start: Any, _: Any) -> Any:
        account = json.dumps({**fakes.ACCOUNT, "fallback_reason": REASON})
        yield fakes.send_end(start, method="A1", form="text", fallback_reason=REASON, account_json=account)

    daemons.sender.script = script
    report = kv.send(text="x", method="B1", fallback=True)
    assert (report.method, report.form) == ("A1", "text")
    assert report.fallback_reason == report.account.fallback_reason == REASON


def test_a_sender_from_before_says_nothing_of_it(kv: Any, daemons: Any, fakes: Any) -> None:
    old = {name: value for name, value in fakes.ACCOUNT.items() if name != "fallback_reason"}
    daemons.sender.script = lambda start, _: iter([fakes.send_end(start, account_json=json.dumps(old))])
    report = kv.send(text="x", method="B1")
    assert (report.fallback_reason, report.account.fallback_reason) == (None, None)


def test_a_refusal_without_permission_is_an_error(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(start: Any, context: Any) -> Any:
        if not start.allow_fallback:
            fakes.abort(context, "FAILED_PRECONDITION", REASON, "REFUSED", {"reasons": 1})
        yield fakes.send_end(start, fallback_reason=REASON)

    daemons.sender.script = script
    with pytest.raises(RefusedError, match="ROPE_MISMATCH"):
        kv.send(text="x", method="B1")
    assert kv.send(text="x", method="B1", fallback=True).fallback_reason == REASON


@pytest.mark.parametrize("given", [{}, {"fallback": False}, {"fallback": True}])
def test_every_way_to_ask_carries_the_permission(kv: Any, daemons: Any, fakes: Any, given: dict[str, bool]) -> None:
    report = kv.send(text="x")
    kv.ask(report, "1?", **given)
    with kv.stream(report, "2?", **given) as stream:
        list(stream)
    kv.ask_many(report, ["3?", "4?"], **given)
    in_loop(kv, report.ask("5?", **given))
    in_loop(kv, report.stream("6?", **given).finish())
    asked = {request.question: request.allow_fallback for request in daemons.receiver.requests}
    assert asked == dict.fromkeys(("1?", "2?", "3?", "4?", "5?", "6?"), given.get("fallback", False))


def test_an_answer_says_what_was_done_instead(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(request: Any, _: Any) -> Any:
        changes = {"fallback": "fallback_reprefill", "fallback_reason": "section layers.0.keys: chunk 3: digest"}
        yield fakes.answer_end(request, token_ids=[], ledger_json=fakes.ledger(request.artifact_id, **changes))

    daemons.receiver.script = script
    ledger = kv.ask(fakes.ARTIFACT.hex(), "Which?", fallback=True).ledger
    assert (ledger.fallback, ledger.fallback_reason) == (
        "fallback_reprefill",
        "section layers.0.keys: chunk 3: digest",
    )


def test_what_was_put_aside_is_an_error_with_the_reason(kv: Any, daemons: Any, fakes: Any) -> None:
    def script(_: Any, context: Any) -> Any:
        fakes.abort(context, "FAILED_PRECONDITION", "put aside: 0.25 nats", "QUARANTINED", {"reason": "0.25 nats"})
        yield

    daemons.receiver.script = script
    with pytest.raises(QuarantinedError, match="put aside: 0.25 nats") as caught:
        kv.ask(fakes.ARTIFACT.hex(), "Which?")
    assert caught.value.fields["reason"] == "0.25 nats"
    assert not caught.value.retryable


def test_the_list_says_what_was_put_aside(kv: Any, daemons: Any, fakes: Any) -> None:
    daemons.receiver.put_aside[fakes.OTHER] = "payload: cut short"
    listed = {item.artifact_id: item for item in kv.artifacts()}
    assert listed[fakes.ARTIFACT.hex()].quarantined is None
    assert listed[fakes.OTHER.hex()].quarantined == "payload: cut short"
    assert {(item.committed_at, item.used_at) for item in listed.values()} == {(1.5, 2.5)}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_it_is_off_unless_asked_for_and_by_name_only(kind: type) -> None:
    for name in ("send", "ask", "stream"):
        parameter = inspect.signature(getattr(kind, name)).parameters["fallback"]
        assert parameter.default is False
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert "fallback" in AskOptions.__annotations__
