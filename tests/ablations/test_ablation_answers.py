"""The experiment with a client that notes what it is asked for: sends, questions, figures, failures, resuming."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.ablations.answers import bench as answers
from kvferry.ablations.answers.bench import AnswerBench
from kvferry.ablations.answers.figures import of_record, outcome
from kvferry.ablations.answers.grid import AnswerGrid
from kvferry.ablations.answers.questions import Examined, Question
from kvferry.ablations.harness import provenance
from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.records import Failure, Record
from kvferry.ablations.harness.settings import Setting
from kvferry.client import Answer, SendReport
from kvferry.core.digests import digest
from kvferry.core.errors import (
    ContextOverflowError,
    InvalidRequestError,
    ModelError,
    PeerError,
    UnavailableError,
    UnknownMethodError,
    error_classes,
)
from kvferry.core.ledger import Ledger, Lookups, Milliseconds, Rows, SenderAccount, Tokens

CODE = Question("What is the code?", ("4417",), "code is 4417", "code")
KEEPER = Question("Who keeps the keys?", ("Ada Lindqvist", "Ada"), "Ada Lindqvist", "name")
HUT = Examined("hut", "The code is 4417. Ada Lindqvist keeps the keys.", (CODE, KEEPER))
PIER = Examined("pier", "Größe: the code is 4417.", (CODE,))
SAID = {"What is the code?": "The code is 4417.", "Who keeps the keys?": "Ada"}


def ledger(artifact: str, **changes: Any) -> Ledger:
    given: dict[str, Any] = {
        "artifact_id": artifact,
        "method": "A1",
        "form": "text",
        "verdict": "accept",
        "fallback": None,
        "fallback_reason": None,
        "manifest_bytes": 700,
        "payload_bytes": 200,
        "resent_bytes": 30,
        "control_bytes": 4,
        "lookups": Lookups(count=2, bytes=1000, ms=3.5),
        "wire_bytes": -1,
        "dense_bf16_bytes": 1,
        "ratio": 1.0,
        "tokens": Tokens(sender_prefill=11, receiver_prefill=54, reused=3, generated=6, material=20),
        "ms": Milliseconds(0, 0, 0, 0, 0, 0, 0, first_token=12.5, total=99.0),
        "rows": Rows(),
        "parity": None,
        "resident_bytes": 0,
        "finish_reason": "stop",
        "prompt_version": 1,
        "system": "",
        "runtime": {},
        "outcome": {"facts": 3, "complete": True},
    }
    return Ledger(**(given | changes))


@dataclass
class FakeClient:
    """Answers from ``SAID``; ``refuse`` may raise for a send, ``stumble`` for a question."""

    sends: list[tuple[str, str, str | None, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    refuse: Callable[[str, str], None] = lambda _method, _text: None
    stumble: Callable[[str], None] = lambda _question: None
    gone: str = ""

    def describe_sender(self) -> None:
        if self.gone == "sender":
            raise UnavailableError("127.0.0.1:1: cannot be reached for Describe")

    def describe_receiver(self) -> Any:
        if self.gone == "receiver":
            raise UnavailableError("127.0.0.1:2: cannot be reached for Describe")
        return SimpleNamespace(weights="w", tokenizer="t", chat_template="c", dtype="F32", unix_time=5.0)

    def send(self, *, text: str, method: str, question: str | None, **parameters: Any) -> SendReport:
        self.sends.append((text, method, question, parameters))
        self.refuse(method, text)
        return SendReport(
            artifact_id=digest(repr(self.sends[-1]).encode()).hex(),
            method=method,
            form="text",
            receiver="",
            document_digest="",
            document_bytes=len(text.encode()),
            document_characters=len(text),
            manifest_bytes=0,
            payload_bytes=0,
            moved_bytes=0,
            wire_bytes=0,
            reused=False,
            account=SenderAccount(11, 1, prefill_ms=1.0, method_ms=2.0, encode_ms=4.0, transfer_ms=8.0),
            _client=self,  # type: ignore[arg-type]
        )

    def ask(self, report: SendReport, question: str, *, max_tokens: int) -> Answer:
        self.asked.append((report.artifact_id, question, max_tokens))
        self.stumble(question)
        return Answer(SAID[question], (1, 2), "stop", ledger(report.artifact_id))

    def drop(self, report: SendReport) -> None:
        self.dropped.append(report.artifact_id)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that nobody edits a file between two runs, that every model is there."""
    origin = Provenance("abc", "a processor", 2, "cpu", "Linux", {"kvferry": "1"})
    monkeypatch.setattr(provenance, "here", lambda: origin)
    monkeypatch.setattr(answers.model_store, "resolve", lambda name: missing(name) if name == "none" else name)


def missing(name: str) -> None:
    raise ModelError(f"model: {name}: not here")


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, client: FakeClient) -> list[str]:
    """Lend the experiment the client in place of daemons, and return the list of the models it started."""
    started: list[str] = []

    @contextlib.contextmanager
    def open_bench(name: str) -> Iterator[AnswerBench]:
        started.append(name)
        yield AnswerBench(client)  # type: ignore[arg-type]

    monkeypatch.setattr(answers, "open_bench", open_bench)
    return started


@pytest.fixture
def run(tmp_path: Path, opened: list[str]) -> Callable[..., list[Record]]:
    def start(
        *settings: Setting,
        documents: tuple[Examined, ...] = (HUT, PIER),
        models: tuple[str, ...] = ("m",),
        advance: Callable[[str, float], None] = lambda _text, _share: None,
    ) -> list[Record]:
        return answers.run(AnswerGrid(models, settings, 9), documents, tmp_path / "records.jsonl", advance)

    return start


def test_a_blind_method_sends_once_a_document_and_an_aware_one_for_every_question(
    run: Callable[..., list[Record]], client: FakeClient
) -> None:
    records = run(Setting("A1"), Setting("A3-aware", (("budget", 64),)))
    assert [of_record(record).first_ask for record in records] == [True, False, True, True, True, True]
    assert client.sends == [
        (HUT.text, "A1", None, {}),
        (HUT.text, "A3-aware", CODE.question, {"budget": 64}),
        (HUT.text, "A3-aware", KEEPER.question, {"budget": 64}),
        (PIER.text, "A1", None, {}),
        (PIER.text, "A3-aware", CODE.question, {"budget": 64}),
    ]
    assert [question for _, question, _ in client.asked] == 2 * [CODE.question, KEEPER.question] + 2 * [CODE.question]
    assert {limit for _, _, limit in client.asked} == {9}
    # A message that is done with is dropped before the next crosses; the last one goes with the store.
    messages = list(dict.fromkeys(artifact for artifact, _, _ in client.asked))
    assert client.dropped == messages[:-1]
    assert len(messages) == 5


def test_settings_and_documents_do_not_share_a_message(run: Callable[..., list[Record]], client: FakeClient) -> None:
    records = run(Setting("A3", (("budget", 64),)), Setting("A3", (("budget", 32),)))
    assert len(client.sends) == 4
    assert len({record.figures["artifact"] for record in records}) == 4


def test_an_answers_figures_are_what_was_said_and_the_ledgers(run: Callable[..., list[Record]]) -> None:
    code, keeper = run(Setting("A1"), documents=(HUT,))
    assert (code.model, code.document, code.question, code.method) == ("m", "hut", CODE.question, "A1")
    found, name = of_record(code), of_record(keeper)
    assert (found.prediction, name.prediction) == ("The code is 4417.", "Ada")
    assert (found.first_ask, name.first_ask) == (True, False)
    assert (found.name, found.label, found.aware) == ("full", "custom", False)
    assert found.document_bytes == len(HUT.text)
    assert (found.manifest_bytes, found.payload_bytes, found.control_bytes) == (700, 200, 4)
    # Repeats count, and look-ups are told apart and added.
    assert found.artifact_bytes == 700 + 200 + 30 + 4
    assert (found.lookups, found.lookup_bytes, found.lookup_ms) == (2, 1000, 3.5)
    assert found.wire_bytes == 1934
    assert (found.sender_prefill_ms, found.sender_ms) == (1.0, 6.0)
    assert (found.transfer_ms, found.first_token_ms, found.total_ms) == (8.0, 12.5, 99.0)
    assert (found.sender_prefill_tokens, found.receiver_prefill_tokens) == (11, 54)
    assert (found.reused_tokens, found.generated_tokens, found.finish_reason) == (3, 6, "stop")
    assert outcome(code) == {"facts": 3, "complete": True}


def test_bytes_of_text_are_utf8(run: Callable[..., list[Record]]) -> None:
    (record,) = run(Setting("A1"), documents=(PIER,))
    assert of_record(record).document_bytes == len(PIER.text) + 2


def test_a_refused_send_fails_the_documents_questions_and_is_tried_once(
    run: Callable[..., list[Record]], client: FakeClient
) -> None:
    def refuse(method: str, text: str) -> None:
        if (method, text) == ("A1", HUT.text):
            raise ContextOverflowError("document: too long")

    client.refuse = refuse
    records = run(Setting("A1"), Setting("A0"))
    assert [record.status for record in records] == ["failed", "failed", "done", "done", "done", "done"]
    assert records[1].failure == Failure("CONTEXT_OVERFLOW", "document: too long")
    assert [send[1] for send in client.sends] == ["A1", "A0", "A1", "A0"]


def test_a_failed_question_is_recorded_and_asked_again_and_the_run_goes_on(
    run: Callable[..., list[Record]], client: FakeClient
) -> None:
    def stumble(question: str) -> None:
        if question == CODE.question and len(client.asked) < 3:
            raise PeerError("answer: lost")

    client.stumble = stumble
    first = run(Setting("A1"), documents=(HUT,))
    assert [record.status for record in first] == ["failed", "done"]
    assert first[0].failure == Failure("PEER", "answer: lost")
    second = run(Setting("A1"), documents=(HUT,))
    assert [record.status for record in second] == ["done", "done"]
    assert second[1] == first[1]
    assert [question for _, question, _ in client.asked] == [CODE.question, KEEPER.question, CODE.question]


def test_a_run_that_was_broken_off_goes_on_within_a_document(
    run: Callable[..., list[Record]], client: FakeClient, tmp_path: Path
) -> None:
    before = run(Setting("A1"))
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_bytes(b"".join([lines[0], lines[2], lines[1][:-9]]))
    client.sends.clear(), client.asked.clear()
    after = run(Setting("A1"))
    assert [(one.id, one.status) for one in after] == [(one.id, one.status) for one in before]
    # The message crossed anew.
    assert [of_record(one).first_ask for one in after] == [True, True, True]
    assert [send[0] for send in client.sends] == [HUT.text]
    assert [question for _, question, _ in client.asked] == [KEEPER.question]


def test_an_unknown_method_stops_the_run_before_anything_starts(
    run: Callable[..., list[Record]], opened: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UnknownMethodError, match=r"^method: 'A99' is not one of A0 \(none\), A1"):
        run(Setting("A1"), Setting("A99"))
    with pytest.raises(UnknownMethodError, match=r"^method: '\*' is not one of"):
        run(Setting("*"))
    with pytest.raises(InvalidRequestError, match=r"^stride: method A3 has no such parameter"):
        run(Setting("A1"), Setting("A3", (("stride", 2),)))
    with pytest.raises(ModelError, match="none: not here"):
        run(Setting("A1"), models=("m", "none"))
    assert opened == []
    assert not (tmp_path / "records.jsonl").exists()


def test_models_take_turns_and_progress_goes_forward_to_the_end(
    run: Callable[..., list[Record]], opened: list[str]
) -> None:
    seen: list[tuple[str, float]] = []
    run(Setting("A1"), models=("m", "n"), advance=lambda text, share: seen.append((text, share)))
    assert opened == ["m", "n"]
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert ("n, hut: A1, question 2 of 2", pytest.approx(4 / 6)) in seen


@pytest.mark.parametrize("daemon", ["sender", "receiver"])
def test_a_daemon_that_is_gone_ends_the_run_and_no_cell_is_blamed(
    run: Callable[..., list[Record]], client: FakeClient, tmp_path: Path, daemon: str
) -> None:
    def refuse(method: str, text: str) -> None:
        if (method, text) == ("A0", HUT.text):
            client.gone = daemon
            raise UnavailableError("127.0.0.1:1: cannot be reached for Send")

    client.refuse = refuse
    with pytest.raises(UnavailableError, match="a daemon of this run is gone: 127.0.0.1:.: cannot be reached"):
        run(Setting("A1"), Setting("A0"))
    assert len((tmp_path / "records.jsonl").read_text("utf-8").splitlines()) == len(HUT.questions)


def test_what_only_one_message_cannot_reach_is_that_cells_failure(
    run: Callable[..., list[Record]], client: FakeClient
) -> None:
    def stumble(question: str) -> None:
        if question == CODE.question:
            raise UnavailableError("look-up: the sender cannot be reached")

    client.stumble = stumble
    records = run(Setting("A1"), documents=(HUT,))
    assert [record.status for record in records] == ["failed", "done"]


def test_what_crosses_the_wire_is_still_read_as_what_it_is() -> None:
    classes = error_classes()
    assert classes["UNAVAILABLE"] is UnavailableError
    assert {kind.__module__ for kind in classes.values()} == {"kvferry.core.errors"}
