"""Answers as tables: every figure in its place, intervals of the same draws, and the pairs that matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.ablations.answers.questions import Examined, Question
from kvferry.ablations.harness.provenance import Provenance
from kvferry.ablations.harness.records import Failure, Record
from kvferry.ablations.report import answer_tables as tables
from kvferry.ablations.report.answer_arms import gather, pairs, scores
from kvferry.ablations.report.bootstrap import Bootstrap
from kvferry.core.errors import StoreError

ORIGIN = Provenance("abc123", "A Processor", 2, "cpu", "Linux x86_64", {"kvferry": "1.2", "blas": ""})
FIGURES: dict[str, Any] = {
    "artifact": "one",
    "name": "extractive",
    "label": "custom",
    "aware": False,
    "form": "text",
    "prediction": "Say Ada.",
    "finish_reason": "stop",
    "fallback": "",
    "document_bytes": 3000,
    "artifact_bytes": 1000,
    "manifest_bytes": 700,
    "payload_bytes": 200,
    "control_bytes": 100,
    "lookups": 1,
    "lookup_bytes": 200,
    "lookup_ms": 1.0,
    "wire_bytes": 1200,
    "sender_prefill_tokens": 40,
    "sender_prefill_ms": 7000.0,
    "receiver_prefill_tokens": 50,
    "reused_tokens": 0,
    "generated_tokens": 3,
    "sender_ms": 20.0,
    "transfer_ms": 5.0,
    "total_ms": 900.0,
    "first_token_ms": 300.0,
    "first_ask": True,
}
RIGHT, HALF, WRONG = "Ada", "Say Ada.", "Bo"
"""Exact, contains and F1 are all, the last two (2/3), and none of them."""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def asked(*kinds: str, answers: tuple[str, ...] = ("Ada",)) -> tuple[Question, ...]:
    return tuple(Question(f"Question {at}?", answers, "Ada", kind) for at, kind in enumerate(kinds, 1))  # type: ignore[arg-type]


DOCUMENTS = (
    Examined("hut", "Ada", asked("name", "code", "name")),
    Examined("pier", "Ada", asked("code", "name", "name")),
    *(Examined(str(name), "", asked(*["name"] * 6, answers=(" ".join(WORDS),))) for name in range(8)),
)


def record(question: int, method: str = "A3", *, document: str = "hut", **changes: Any) -> Record:
    figures = FIGURES | {name: value for name, value in changes.items() if name in FIGURES or "." in name}
    given: dict[str, Any] = {
        "id": f"{method}{document}{question}{changes.get('parameters')}",
        "status": "done",
        "model": "small",
        "document": document,
        "question": f"Question {question}?",
        "method": method,
        "parameters": {},
        "figures": figures,
        "date": "2026-11-30",
        "provenance": ORIGIN,
    }
    return Record(**(given | {name: value for name, value in changes.items() if name in given or name == "failure"}))


def markdown(records: list[Record]) -> str:
    return tables.markdown(records, DOCUMENTS, "kvferry", len(records))


def section(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a line that begins so, without its heading."""
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = []
    while at < len(lines) and lines[at].startswith("|"):
        rows.append([cell.strip() for cell in lines[at].strip("|").split("|")])
        at += 1
    return rows


def test_a_row_shows_every_figure() -> None:
    records = [
        record(1, prediction=RIGHT),
        record(2, lookups=3, lookup_bytes=0, wire_bytes=1000, first_token_ms=None, first_ask=False),
        record(3, prediction=WRONG, first_token_ms=100.0, first_ask=False),
        record(
            1,
            document="pier",
            artifact="two",
            artifact_bytes=400,
            wire_bytes=600,
            sender_prefill_tokens=0,
            sender_prefill_ms=0.0,
            sender_ms=30.0,
            first_token_ms=500.0,
        ),
    ]
    (row,) = tables.rows([*records, record(1, model="other")], "small", DOCUMENTS)
    shown = dict(zip(tables.HEADING, row, strict=True))
    assert {name: value for name, value in shown.items() if "%" not in name} == {
        "method": "A3 extractive",
        "parameters": "",
        "label": "custom",
        "question": "blind",
        "n": "4",
        "wire bytes": "1,000",
        # 1000 and 400 crossed once each, and 200 of look-ups for three of the four.
        "a question": "500",
        "text / wire": "3.00",
        "look-ups": "1.5",
        # Of the one message that had to be read for, of both messages, of their first questions, and of the others.
        "reading ms": "7,000",
        "sender ms": "25",
        "first token ms": "400",
        "later ms": "100",
    }
    draws = Bootstrap(["hut", "hut", "hut", "pier"])
    for name, values in (("exact %", [1, 0, 0, 0]), ("contains %", [1, 1, 0, 1]), ("F1 %", [1, 2 / 3, 0, 2 / 3])):
        mean, low, high = (100 * value for value in draws.mean(values))
        assert shown[name] == f"{mean:.1f} ({low:.1f} to {high:.1f})"
        assert mean == pytest.approx(100 * np.mean(values))


def test_settings_keep_the_order_of_the_records_and_failures_are_no_answers() -> None:
    records = [record(1, "A4"), record(1, "A0", aware=True), record(2, "A4", status="failed", figures={}, failure=None)]
    first, second = tables.rows(records, "small", DOCUMENTS)
    assert (first[0], first[tables.HEADING.index("n")]) == ("A4 extractive", "1")
    assert second[tables.HEADING.index("question")] == "aware"


def test_what_is_compared() -> None:
    small, large = {"budget": 0.1}, {"budget": 0.25}
    quotes, none = {"constraint": "quotes", "budget": 0.1}, {"budget": 0.1, "constraint": "none"}
    settings = [
        ("A0", {}),
        ("A1", {}),
        ("A3", small),
        ("A3", large),
        ("A3-aware", large),
        ("A4-aware", small),
        ("A5", quotes),
        ("A5", none),
        ("evidence", {"budget": 0.1}),
        ("A5-aware", {"constraint": "passages"} | small),
    ]
    arms = gather((record(1, method, parameters=given) for method, given in settings), DOCUMENTS)
    found = [(first.words, second.words) for first, second in pairs(arms)]
    assert found[:4] == [
        ("A3-aware budget=0.25", "A3 budget=0.25"),
        # What a grid leaves to its default is the same setting, and a name is as good as an id.
        ("A5-aware constraint=passages budget=0.1", "evidence budget=0.1"),
        ("A5 constraint=quotes budget=0.1", "A5 budget=0.1 constraint=none"),
        ("evidence budget=0.1", "A5 budget=0.1 constraint=none"),
    ]
    assert found[4:] == [(arm.words, "A1") for arm in arms if arm.words != "A1"]


def test_a_difference_is_taken_over_the_questions_that_both_answered() -> None:
    whole = [record(number, "A1", document=name) for name in ("hut", "pier") for number in (1, 2, 3)]
    part = [record(number, "A3", document=name, prediction=RIGHT) for name in ("pier", "hut") for number in (3, 1)]
    part[0] = record(3, "A3", document="pier", prediction=WRONG)
    shown = section(markdown([*whole, *part]), "Differences")[2]
    # Exact: 0, 1, 1, 1 minus nothing. Contains: 0, 1, 1, 1 minus 1.
    assert (shown[0], shown[1], *(cell.partition(" ")[0] for cell in shown[2:])) == (
        "A3 − A1",
        "4",
        "+75.0",
        "-25.0",
        "+8.3",
    )
    alone = [record(1, "A1"), record(2, "A3")]
    assert "Differences" not in markdown(alone)


def test_answers_that_are_alike_and_those_on_one_document_have_no_interval() -> None:
    alike = [record(number, document=name) for name in ("hut", "pier") for number in (1, 2)]
    (row,) = tables.rows(alike, "small", DOCUMENTS)
    assert row[5:8] == ("0.0", "100.0", "66.7")
    (row,) = tables.rows([record(1, prediction=RIGHT), record(2), record(3)], "small", DOCUMENTS)
    assert row[5:8] == ("33.3", "100.0", "77.8")


def test_a_paired_difference_is_narrower_than_its_two_means() -> None:
    random = np.random.default_rng(0)
    records = []
    for name in map(str, range(8)):
        for number in range(1, 7):
            known = int(random.integers(2, 11))
            records += [
                record(number, "A1", document=name, prediction=" ".join(WORDS[:known])),
                record(number, "A3", document=name, prediction=" ".join(WORDS[: known - 1])),
            ]
    text = markdown(records)

    def width(cell: str) -> float:
        low, _, high = cell[cell.index("(") + 1 : -1].partition(" to ")
        return float(high) - float(low)

    (difference,) = section(text, "Differences")[2:]
    whole = section(text, "Questions: 48, on documents: 8.")[2]
    assert width(difference[4]) < 0.7 * width(whole[tables.HEADING.index("F1 %")])


def test_shares_are_counted_by_document_and_by_kind() -> None:
    records = [
        record(1),
        record(2, prediction=WRONG),
        record(1, document="pier"),
        record(1, "A0", prediction=WRONG),
    ]
    text = markdown(records)
    by_document, by_kind = (section(text, f"Answers that hold an accepted one, by {what}") for what in ("doc", "kind"))
    assert by_document == [["method", "hut", "pier"], ["---"] * 3, ["A3", "1/2", "1/1"], ["A0", "0/1", "-"]]
    assert by_kind == [["method", "code", "name"], ["---"] * 3, ["A3", "1/2", "1/1"], ["A0", "-", "0/1"]]


def test_every_record_has_its_score_whichever_model_answered() -> None:
    records = [
        record(1, id="a", prediction=RIGHT),
        record(1, id="b", model="large", prediction=WRONG),
        record(1, "A0", id="c", model="large"),
        record(2, id="d", status="failed", figures={}),
    ]
    found = scores(records, DOCUMENTS)
    assert {name: (one.exact, one.contains) for name, one in found.items()} == {
        "a": (True, True),
        "b": (False, False),
        "c": (False, True),
    }


def test_what_is_sent_for_one_question_is_a_message_of_its_own() -> None:
    """Two questions may be sent the same content, whose id is then the same."""
    same = [record(number, "A3-aware", aware=True, **{"outcome.facts": 0}) for number in (1, 2)]
    (row,) = tables.rows(same, "small", DOCUMENTS)
    assert row[tables.HEADING.index("a question")] == "1,200"
    assert section(markdown(same), "Facts of all messages")[2][:2] == ["A3-aware", "2"]


def test_facts_are_counted_once_a_message() -> None:
    made = {"outcome.facts": 5, "outcome.exact": 3, "outcome.unresolved": 2, "outcome.complete": True}
    cut = {"outcome.facts": 2, "outcome.exact": 1, "outcome.unresolved": 1, "outcome.complete": False}
    records = [
        record(1, "A5", **made),
        record(2, "A5", **made),
        record(1, "A5", document="pier", artifact="two", **cut),
        record(1, "A4", **{"outcome.tokens": 9}),
    ]
    rows = section(markdown(records), "Facts of all messages")
    shown = dict(zip(rows[0], rows[2], strict=True))
    assert len(rows) == 3
    assert [shown[name] for name in ("method", "messages", "facts", "exact", "unresolved", "complete", "folded")] == [
        "A5",
        "2",
        "7",
        "4",
        "3",
        "1",
        "-",
    ]


def test_a_document_says_what_was_run_and_what_failed() -> None:
    failure = Failure("CONTEXT_OVERFLOW", "document: too long")
    gone = [record(number, "A1", status="failed", figures={}, failure=failure) for number in (1, 2)]
    other = [record(1, model="large", date="2026-12-01")]
    text = tables.markdown([record(1), *gone, *other], DOCUMENTS, "kvferry ablate answers", 8)
    assert "\n\nA part: 2 of 8 answers. " in text
    assert text.startswith("`kvferry ablate answers`, commit abc123, 2026-11-30 to 2026-12-01.\n")
    assert "A Processor, 2 cores" in text
    assert text.index("### small") < text.index("### large")
    assert "\n- hut: A1: CONTEXT_OVERFLOW: document: too long (answers missing: 2)" in text
    assert tables.failed(gone) == ["hut: A1: CONTEXT_OVERFLOW: document: too long (answers missing: 2)"]


def test_a_model_of_failures_only_has_its_section() -> None:
    failure = Failure("MODEL", "no")
    text = markdown([record(1, status="failed", figures={}, failure=failure)])
    assert text.endswith("### small\n\n- hut: A3: MODEL: no (answers missing: 1)")


def test_records_of_another_experiment_are_refused() -> None:
    with pytest.raises(StoreError, match=r"record .*missing"):
        tables.rows([record(1, figures={"kl_mean": 0.1})], "small", DOCUMENTS)
