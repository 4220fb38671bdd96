"""``kvferry ask`` against a fake receiver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvferry.cli import output

Run = Callable[..., Result]
VIEW = str(Path(__file__).resolve().parents[2] / ".dev")
LEDGER = (
    "B1 (kv) · on the wire 1.1 kB · dense cache 9.0 kB (ratio 8.03) · read 9 tokens, reused 40 · "
    "first token 4 ms · total 9 ms · 4 tokens (stop)\n"
)


@pytest.fixture
def ask(kvferry: Run, daemons: Any, fakes: Any) -> Run:
    def run(*words: str) -> Result:
        return kvferry("ask", fakes.ARTIFACT.hex(), *words, "--receiver", daemons.address)

    return run


def test_stdout_is_the_answer_and_stderr_the_ledger(ask: Run, fakes: Any) -> None:
    shown = ask("Which?")
    assert shown.exit_code == 0
    assert shown.stdout == fakes.TEXT + "\n"
    assert shown.stderr == LEDGER


def test_words_make_the_question_and_options_travel(ask: Run, daemons: Any) -> None:
    options = ["--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3"]
    assert ask("Which", "code", "is", "it?", *options).exit_code == 0
    (request,) = daemons.receiver.requests
    assert (request.question, request.max_tokens, request.seed) == ("Which code is it?", 7, 3)
    assert (request.temperature, request.top_p) == (0.5, 0.9)


def test_the_receiver_knows_its_sender_unless_it_is_told(ask: Run, daemons: Any) -> None:
    assert ask("Which?").exit_code == 0
    assert ask("Which?", "--look-up-at", "studio.local:9").exit_code == 0
    assert [request.sender for request in daemons.receiver.requests] == ["", "studio.local:9"]


@pytest.mark.parametrize(
    ("hit", "left_out", "words"),
    [
        (None, 0, ""),
        (False, 0, " · no reference has to do with the question"),
        (True, 0, " · looked up 3 references (1.6 kB, 12 ms)"),
        (True, 2, " · looked up 3 references, 2 more had no room (1.6 kB, 12 ms)"),
    ],
)
def test_a_look_up_is_told(
    ask: Run,
    daemons: Any,
    fakes: Any,
    hit: bool | None,  # noqa: FBT001  (a column)
    left_out: int,
    words: str,
) -> None:
    found = {"count": 3, "calls": 1, "bytes": 1567, "text_bytes": 1460, "ms": 12.4, "hit": hit, "missing": []}
    found["left_out"] = left_out

    def script(request: Any, _context: Any) -> Any:
        yield from [fakes.piece(text, token_id) for text, token_id in fakes.TOKENS]
        yield fakes.answer_end(request, ledger_json=fakes.ledger(fakes.ARTIFACT, lookups=found))

    daemons.receiver.script = script
    assert ask("Which?").stderr == LEDGER.replace("\n", f"{words}\n")


def test_an_id_may_be_cut_short(kvferry: Run, daemons: Any, fakes: Any) -> None:
    assert kvferry("ask", fakes.OTHER.hex()[:8], "Which?", "--receiver", daemons.address).exit_code == 0
    assert daemons.receiver.requests[0].artifact_id == fakes.OTHER


def test_json_is_one_line_with_the_ledger(ask: Run, fakes: Any) -> None:
    shown = ask("Which?", "--json")
    (line,) = shown.stdout.splitlines()
    answer = json.loads(line)
    assert set(answer) == {"text", "token_ids", "finish_reason", "ledger"}
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == (fakes.TEXT, [11, 12, 13, 14], "stop")
    expected = json.loads(fakes.ledger(fakes.ARTIFACT))
    assert {key: answer["ledger"][key] for key in expected} == expected
    assert shown.stderr == ""


def test_a_terminal_sees_every_piece_once(ask: Run, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    assert ask("Which?").stdout == fakes.TEXT + "\n"
    assert json.loads(ask("Which?", "--json").stdout)["text"] == fakes.TEXT


def test_a_pipe_gets_no_half_answer(ask: Run, daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = lambda *_: iter([fakes.piece("The", 11)])
    shown = ask("Which?")
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert shown.stderr == f"error: {daemons.address}: the answer is not complete: 1 tokens came, its end did not\n"


def test_a_fallback_is_said(ask: Run, daemons: Any, fakes: Any) -> None:
    def script(request: Any, _: Any) -> Any:
        changes = {"fallback": "fallback_reprefill", "fallback_reason": "ROPE_MISMATCH"}
        yield fakes.answer_end(request, token_ids=[], ledger_json=fakes.ledger(request.artifact_id, **changes))

    daemons.receiver.script = script
    assert "fell back to fallback_reprefill: ROPE_MISMATCH" in ask("Which?").stderr
    assert ask("Which?", "--json").stderr == "fell back to fallback_reprefill: ROPE_MISMATCH\n"


@pytest.mark.parametrize("words", [[], ["--fallback"]])
def test_a_fallback_is_allowed_only_when_asked_for(ask: Run, daemons: Any, words: list[str]) -> None:
    assert ask("Which?", *words).exit_code == 0
    assert daemons.receiver.requests[0].allow_fallback is bool(words)


@pytest.mark.parametrize("words", [[], ["Which?", "--max-tokens", "0"], ["Which?", "--top-p", "0"]])
def test_a_wrong_command_line_asks_nothing(ask: Run, daemons: Any, words: list[str]) -> None:
    assert ask(*words).exit_code == 2
    assert daemons.receiver.requests == []


def test_ctrl_c_stops_the_receiver_and_is_quiet(daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.endless
    asking = subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli", "ask", fakes.ARTIFACT.hex(), "Which?", "--receiver", daemons.address],
        env=os.environ | {"PYTHONPATH": VIEW},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so do what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (no threads in the child)
    )
    with asking:
        assert daemons.receiver.begun.acquire(timeout=60)
        asking.send_signal(signal.SIGINT)
        assert asking.communicate(timeout=60) == ("", "")
        assert asking.returncode == 130
    assert daemons.receiver.ended.acquire(timeout=5)


def test_a_daemon_that_stops_during_an_answer_is_one_line(daemons: Any, fakes: Any) -> None:
    daemons.receiver.script = daemons.receiver.endless
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    asking = subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli", "ask", fakes.ARTIFACT.hex(), "Which?", "--receiver", daemons.address],
        env=environment | {"PYTHONPATH": VIEW},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with asking:
        assert daemons.receiver.begun.acquire(timeout=60)
        daemons.stop()
        stdout, stderr = asking.communicate(timeout=60)
    assert (stdout, asking.returncode) == ("", 1)
    # And none of gRPC's own.
    assert stderr == f"error: {daemons.address}: is stopping, and ended Ask\n"
