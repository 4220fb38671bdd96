"""``kvferry send`` against a fake sender."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from kvferry.cli.send import parse_parameters

Run = Callable[..., Result]
VIEW = str(Path(__file__).resolve().parents[2] / ".dev")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_bytes(b"The code is 4417.\r\n")
    return path


def test_stdout_is_the_id_and_stderr_the_account(kvferry: Run, daemons: Any, fakes: Any, document: Path) -> None:
    shown = kvferry("send", str(document), "--sender", daemons.address, "--receiver", daemons.address)
    assert shown.exit_code == 0
    assert shown.stdout == fakes.ARTIFACT.hex() + "\n"
    assert shown.stderr == (
        f"B1 (kv) at {daemons.address} · document 19 B · artifact 1.1 kB · moved 1.0 kB · on the wire 1.1 kB · "
        "read 40 tokens\n"
    )
    assert daemons.sender.pieces == [b"The code is 4417.\r\n"]
    assert daemons.sender.start.receiver == daemons.address


def test_options_reach_the_sender(kvferry: Run, daemons: Any, document: Path) -> None:
    words = ["--method", "snapkv", "--question", "Which?", "--system", "", "--deliver-to", "mini.local:9"]
    words += ["--param", "budget=256", "--param", "rule=sinks"]
    assert kvferry("send", str(document), "--sender", daemons.address, *words).exit_code == 0
    start = daemons.sender.start
    assert (start.method, start.question, start.receiver) == ("snapkv", "Which?", "mini.local:9")
    assert start.HasField("system")
    assert start.parameters["budget"].integer == 256
    assert start.parameters["rule"].text == "sinks"


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [("256", "integer", 256), ("0.25", "number", 0.25), ("200KB", "text", "200KB")],
)
def test_a_budget_may_be_rows_a_fraction_or_bytes(
    kvferry: Run, daemons: Any, document: Path, words: str, kind: str, value: object
) -> None:
    where = ["--sender", daemons.address, "--receiver", daemons.address]
    assert kvferry("send", str(document), *where, "--budget", words, "--bits", "4").exit_code == 0
    parameters = daemons.sender.start.parameters
    assert parameters["budget"].WhichOneof("value") == kind
    assert getattr(parameters["budget"], kind) == value
    assert parameters["bits"].integer == 4


def test_a_parameter_is_given_once(kvferry: Run, daemons: Any, document: Path) -> None:
    where = ["--sender", daemons.address, "--receiver", daemons.address]
    shown = kvferry("send", str(document), *where, "--budget", "3", "--param", "budget=4")
    assert shown.exit_code == 2
    assert "budget is given twice" in shown.stderr


def test_json_is_one_line_with_the_whole_report(kvferry: Run, daemons: Any, fakes: Any, document: Path) -> None:
    shown = kvferry("send", str(document), "--sender", daemons.address, "--receiver", daemons.address, "--json")
    (line,) = shown.stdout.splitlines()
    assert json.loads(line) == {
        "artifact_id": fakes.ARTIFACT.hex(),
        "method": "B1",
        "form": "kv",
        "receiver": daemons.address,
        "document_digest": fakes.blake3(document.read_bytes()).hexdigest(),
        "document_bytes": 19,
        "document_characters": 19,
        "manifest_bytes": 100,
        "payload_bytes": 1000,
        "moved_bytes": 1000,
        "wire_bytes": 1120,
        "reused": False,
        "account": fakes.ACCOUNT | {"auto": None},
        "fallback_reason": None,
    }
    assert shown.stderr == ""


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_fallback_is_said(kvferry: Run, daemons: Any, fakes: Any, document: Path, as_json: list[str]) -> None:
    def script(start: Any, _: Any) -> Any:
        yield fakes.send_end(start, method="A1", form="text", fallback_reason="refused: ROPE_MISMATCH")

    daemons.sender.script = script
    where = ["--sender", daemons.address, "--receiver", daemons.address]
    shown = kvferry("send", str(document), *where, "--fallback", *as_json)
    assert shown.exit_code == 0
    assert daemons.sender.start.allow_fallback
    assert shown.stderr.startswith("fell back to the text (A1): refused: ROPE_MISMATCH\n")
    if as_json:
        assert json.loads(shown.stdout)["fallback_reason"] == "refused: ROPE_MISMATCH"
    kvferry("send", str(document), *where)
    assert not daemons.sender.start.allow_fallback


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_the_sender_chose_is_said_with_the_reason(
    kvferry: Run, daemons: Any, fakes: Any, document: Path, as_json: list[str]
) -> None:
    times = {"sender_ms": 3.0, "transfer_ms": 40.0, "receiver_ms": 1500.0}
    cheap = {"method": "A7", "form": "text", "parameters": "", "bytes": 9, **times, "first_token_ms": 1543.0}
    dear = {**cheap, "method": "B1", "form": "kv", "first_token_ms": 2000.0}
    choice = {
        "quality": "near",
        "chosen": cheap,
        "estimates": [dear, cheap],
        "passed_over": [],
        "link": {"rtt_ms": 2.0, "bytes_per_second": 1e6},
        "sender_tokens_per_second": 10.0,
        "receiver_tokens_per_second": 20.0,
        "probe_bytes": 100,
        "deciding_ms": 5.0,
        "reused": False,
    }

    def script(start: Any, _: Any) -> Any:
        yield fakes.send_end(start, method="A7", form="text", account_json=json.dumps(fakes.ACCOUNT | {"auto": choice}))

    daemons.sender.script = script
    where = ["--sender", daemons.address, "--receiver", daemons.address]
    shown = kvferry("send", str(document), *where, "--method", "auto", "--param", "quality=near", *as_json)
    assert shown.exit_code == 0
    assert (daemons.sender.start.method, daemons.sender.start.parameters["quality"].text) == ("auto", "near")
    assert shown.stderr.startswith(
        "chose A7: first token expected in 1,543 ms (sender 3, transfer 40, receiver 1,500); B1 in 2,000 ms\n"
    )
    if as_json:
        assert json.loads(shown.stdout)["account"]["auto"] == choice


def test_standard_input_is_a_document(kvferry: Run, daemons: Any) -> None:
    text = "Grüße\r\n".encode()
    shown = kvferry("send", "-", "--sender", daemons.address, "--receiver", daemons.address, stdin=text)
    assert shown.exit_code == 0
    assert daemons.sender.pieces == [text]


def test_the_argument_is_always_a_file(kvferry: Run) -> None:
    shown = kvferry("send", "The code is 4417.")
    assert shown.exit_code == 1
    assert shown.stderr == "error: document: The code is 4417.: No such file or directory\n"


def test_a_refusal_reaches_programs(kvferry: Run, daemons: Any, fakes: Any, document: Path) -> None:
    def refuse(_: Any, context: Any) -> Any:
        yield fakes.send_progress("offer", 0, 1)
        fakes.abort(context, "FAILED_PRECONDITION", "refused: ROPE_MISMATCH", "REFUSED", {"reasons": 1})

    daemons.sender.script = refuse
    shown = kvferry("send", str(document), "--sender", daemons.address, "--receiver", daemons.address, "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["error"] == {
        "code": "REFUSED",
        "message": "refused: ROPE_MISMATCH",
        "fields": {"reasons": 1},
    }


def test_a_bar_is_drawn_on_a_terminal_only(daemons: Any, fakes: Any, document: Path) -> None:
    screen, terminal = pty.openpty()
    where = ["--sender", daemons.address, "--receiver", daemons.address]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", "send", str(document), *where],
        env=os.environ | {"PYTHONPATH": VIEW, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        check=True,
    )
    os.close(terminal)
    drawn = os.read(screen, 65536).decode()
    os.close(screen)
    assert done.stdout == fakes.ARTIFACT.hex() + "\n"
    assert "prefill" in drawn
    assert "100%" in drawn


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("n=8", 8),
        ("n=-8", -8),
        ("n=0.5", 0.5),
        ("n=1e3", 1000.0),
        ("n=true", True),
        ("n=false", False),
        ("n=sinks", "sinks"),
        ('n="8"', "8"),
        ("n=007", "007"),
        ("n=", ""),
        ("n=a=b", "a=b"),
        ("n=NaN", "NaN"),
        ("n=True", "True"),
    ],
)
def test_a_parameter_is_what_it_reads_as(given: str, value: Any) -> None:
    parsed = parse_parameters([given])
    assert parsed == {"n": value}
    assert type(parsed["n"]) is type(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["n"], "'n' is not NAME=VALUE"),
        (["=8"], "'=8' is not NAME=VALUE"),
        (["a b=8"], "'a b=8' is not NAME=VALUE"),
        (["n=1", "n=2"], "n is given twice"),
        (["n=null"], "null is neither"),
        (["n=[1]"], r"\[1\] is neither"),
        (["text=x"], "text is no parameter"),
        (["fallback=true"], "fallback is no parameter"),
        (["progress=x"], "progress is no parameter"),
    ],
)
def test_a_malformed_parameter_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(click.BadParameter, match=message):
        parse_parameters(given)
