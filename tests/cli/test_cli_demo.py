"""``kvferry demo`` with fake daemons: what it promises to programs, when it fails, and what people see."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import Result

from kvferry.cli import demo, processes
from kvferry.core.errors import UnavailableError
from kvferry.proto.v1 import common_pb2

Run = Callable[..., Result]
# Id, name, form, aware, wire bytes. The order is the registry's.
METHODS = (
    ("A0", "none", "text", False, 900),
    ("A1", "full", "text", False, 9_000),
    ("A7", "zstd", "text", False, 4_000),
    ("A8", "llmlingua-2", "text", False, 3_000),
    ("B0", "native", "text", False, 9_000),
    ("B1", "serialised", "kv", False, 1_234_567),
    ("B5", "snapkv", "kv", False, 300_000),
    ("B5-aware", "snapkv-aware", "kv", True, 300_000),
    ("h2o", "h2o", "kv", False, 310_000),
    ("qfilters", "qfilters", "kv", False, 310_000),
)
RIGHT = ("The code is NW-4471-K.", "Leah Aunet drives.", "It is 88-30517.", "Room 208.")
WRONG = "I do not know."
LOSSY = {"A0", "B5", "h2o"}


@dataclass
class Stage:
    """What the fake daemons do: ``answers`` says what a method answers to a question; the sends are noted."""

    answers: Callable[[str, int], str]
    methods: tuple[tuple[str, str, str, bool, int], ...] = METHODS
    sent: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)


def artifact(method: str) -> bytes:
    return blake3(method.encode()).digest()


@pytest.fixture
def stage(daemons: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Let the demo find the fake daemons in place of its own: exact methods answer rightly, the others do not."""
    questions = [question.text for question in demo.bundled()[1]]
    playing = Stage(lambda method, number: WRONG if method in LOSSY else RIGHT[number])

    def deliver(start: Any, _context: Any) -> Iterator[Any]:
        playing.sent.append(start.method)
        yield fakes.send_end(start, artifact_id=artifact(start.method))

    def answer(request: Any, _context: Any) -> Iterator[Any]:
        id_, _, form, _, wire = next(item for item in playing.methods if artifact(item[0]) == request.artifact_id)
        assert request.max_tokens == demo.MAX_ANSWER_TOKENS
        text = playing.answers(id_, questions.index(request.question))
        ids = list(text.encode())
        yield from (fakes.piece(chr(token), token) for token in ids)
        account = fakes.ledger(request.artifact_id, method=id_, form=form, wire_bytes=wire, ratio=9000 / wire)
        yield fakes.answer_end(request, text=text, token_ids=ids, ledger_json=account)

    @contextlib.contextmanager
    def pair(model: str, folder: Path) -> Iterator[tuple[str, str]]:
        assert folder.is_dir()
        daemons.sender.methods = [
            common_pb2.MethodDescription(id=id_, name=name, form=form, label="custom", aware=aware)
            for id_, name, form, aware, _ in playing.methods
        ]
        playing.models.append(model)
        yield daemons.address, daemons.address

    monkeypatch.setattr(processes, "pair", pair)
    daemons.sender.script, daemons.receiver.script = deliver, answer
    return playing


def told(shown: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
    return found


def test_json_is_the_contract(kvferry: Run, stage: Stage) -> None:
    shown = kvferry("demo", "--json", "--model", "somewhere/tiny")
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == 1
    outcome = told(shown)
    assert set(outcome) == {"ok", "rows", "broken"}
    assert (outcome["ok"], outcome["broken"]) == (True, [])
    # What is shown by default and what this sender knows, each with every question.
    assert stage.sent == ["A0", "A1", "A7", "B0", "B1", "B5"]
    assert [row["method"] for row in outcome["rows"]] == [method for method in stage.sent for _ in RIGHT]
    assert stage.models == ["somewhere/tiny"]
    last = outcome["rows"][-1]
    assert last == {
        "method": "B5",
        "name": "snapkv",
        "form": "kv",
        "question": demo.bundled()[1][-1].text,
        "answer": WRONG,
        "token_ids": list(WRONG.encode()),
        "correct": False,
        "wire_bytes": 300_000,
        "ratio": 0.03,
        "receiver_prefill_tokens": 9,
        "ttft_ms": 4.0,
    }
    assert {row["correct"] for row in outcome["rows"] if row["method"] not in LOSSY} == {True}


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (["--method", "h2o"], ["A1", "A7", "B0", "B1", "h2o"]),
        # Neither the aware one nor those that need preparation.
        (["--all"], ["A0", "A1", "A7", "B0", "B1", "B5", "h2o"]),
        (["--method", "qfilters", "--method", "B5-aware"], ["A1", "A7", "B0", "B1", "qfilters"]),
    ],
)
def test_exact_methods_always_run(kvferry: Run, stage: Stage, words: list[str], sent: list[str]) -> None:
    assert kvferry("demo", "--json", *words).exit_code == 0
    assert stage.sent == sent


@pytest.mark.parametrize("method", demo.EXACT)
@pytest.mark.parametrize("number", [0, 3])
def test_an_exact_method_that_answers_otherwise_fails_the_demo(
    kvferry: Run, stage: Stage, method: str, number: int
) -> None:
    usual = stage.answers
    stage.answers = lambda asked, which: WRONG if (asked, which) == (method, number) else usual(asked, which)
    shown = kvferry("demo", "--json")
    question = demo.bundled()[1][number].text
    assert shown.exit_code == 1
    assert told(shown)["ok"] is False
    assert told(shown)["broken"] == [f"{method}: {question!r}: {WRONG!r} is not the full-context answer"]
    people = kvferry("demo")
    assert people.exit_code == 1
    assert f"broken: {method}: {question!r}" in people.stderr
    assert "token for token" not in people.stdout


def test_the_same_text_of_other_tokens_is_another_answer(kvferry: Run, stage: Stage, fakes: Any, daemons: Any) -> None:
    before = daemons.receiver.script

    def respell(request: Any, context: Any) -> Iterator[Any]:
        if request.artifact_id != artifact("B1"):
            yield from before(request, context)
            return
        *_, end = before(request, context)
        yield fakes.piece(end.end.text, 5)
        del end.end.token_ids[:]
        end.end.token_ids.append(5)
        yield end

    daemons.receiver.script = respell
    shown = kvferry("demo", "--json")
    assert shown.exit_code == 1
    assert len(told(shown)["broken"]) == len(RIGHT)


@pytest.mark.parametrize("missing", [demo.REFERENCE, *demo.EXACT])
def test_a_sender_without_an_exact_method_fails_the_demo(kvferry: Run, stage: Stage, missing: str) -> None:
    stage.methods = tuple(method for method in METHODS if method[0] != missing)
    shown = kvferry("demo", "--json")
    assert shown.exit_code == 1
    assert f"{missing}: missing" in told(shown)["broken"]


def test_lossy_methods_may_be_wrong(kvferry: Run, stage: Stage) -> None:
    shown = kvferry("demo")
    assert shown.exit_code == 0
    assert "Every exact method gave the full-context answers, token for token." in shown.stdout


def test_people_get_a_table_with_a_line_an_answer(kvferry: Run, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = kvferry("demo").stdout.splitlines()
    assert any("One document, one method of each kind" in line for line in lines)
    (b1,) = [line for line in lines if "B1 serialised" in line]
    assert all(word in b1 for word in ("kv", "1,234,567", "0.01x", RIGHT[0], "right"))
    (b5,) = [line for line in lines if "B5 snapkv" in line]
    assert "wrong" in b5
    # A method's name, form and bytes stand in its first line only.
    assert sum("1,234,567" in line for line in lines) == 1
    assert sum("right" in line or "wrong" in line for line in lines) == 6 * len(RIGHT)


def test_a_daemon_that_does_not_start_is_one_line(kvferry: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def pair(model: str, folder: Path) -> Iterator[tuple[str, str]]:
        raise UnavailableError("sender: ended with exit code 1 before it listened: no model")
        yield "", ""

    monkeypatch.setattr(processes, "pair", pair)
    shown = kvferry("demo", "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["error"]["code"] == "UNAVAILABLE"
    assert "error: sender: ended with exit code 1" in shown.stderr


def test_the_bundled_questions_are_answered_by_the_bundled_document() -> None:
    document, questions = demo.bundled()
    assert len(questions) == len(RIGHT)
    for question, answer in zip(questions, RIGHT, strict=True):
        assert question.is_right(answer)
        assert not question.is_right(WRONG)
        assert all(expected in document for expected in question.expects)
        assert not any(question.is_right(f"{answer} {excluded}") for excluded in question.excludes)
