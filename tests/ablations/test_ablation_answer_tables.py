"""Answers as tables: every figure in its place, intervals of the same draws, and the pairs that matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.ablations import answer_tables as tables
from kvferry.ablations.answer_arms import gather, pairs
from kvferry.ablations.bootstrap import Bootstrap
from kvferry.ablations.provenance import Provenance
from kvferry.ablations.records import Failure, Record
from kvferry.core.errors import StoreError

ORIGIN = Provenance("abc123", "A Processor", 2, "cpu", "Linux x86_64", {"kvferry": "1.2", "blas": ""})
FIGURES: dict[str, Any] = {
    "artifact": "one",
    "name": "extractive",
    "label": "custom",
    "aware": False,
    "form": "text",
    "kind": "name",
    "prediction": "Ada",
    "exact": False,
    "contains": True,
    "f1": 0.5,
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
    "sender_prefill_tokens": 0,
    "receiver_prefill_tokens": 50,
    "reused_tokens": 0,
    "generated_tokens": 3,
    "sender_ms": 20.0,
    "transfer_ms": 5.0,
    "total_ms": 900.0,
    "first_token_ms": 300.0,
}


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
        record(1, exact=True, f1=1.0, parameters={"budget": 0.25}),
        record(2, lookups=3, lookup_bytes=0, wire_bytes=1000, first_token_ms=None, parameters={"budget": 0.25}),
        record(3, contains=False, f1=0.0, first_token_ms=100.0, parameters={"budget": 0.25}),
        record(1, document="pier", artifact="two", artifact_bytes=400, wire_bytes=600, parameters={"budget": 0.25}),
    ]
    (row,) = tables.rows([*records, record(1, model="other")], "small")
    shown = dict(zip(tables.HEADING, row, strict=True))
    assert {name: value for name, value in shown.items() if "%" not in name} == {
        "method": "A3 extractive",
        "parameters": "budget=0.25",
        "label": "custom",
        "question": "blind",
        "n": "4",
        "wire bytes": "1,000",
        # 1000 and 400 crossed once each, and 200 of look-ups for three of the four.
        "a question": "500",
        "text / wire": "3.00",
        "look-ups": "1.5",
        "sender ms": "20",
        "first token ms": "300",
    }
    draws = Bootstrap(["hut", "hut", "hut", "pier"])
    for name, values in (("exact %", [1, 0, 0, 0]), ("contains %", [1, 1, 0, 1]), ("F1 %", [1, 0.5, 0, 0.5])):
        mean, low, high = (100 * value for value in draws.mean(values))
        assert shown[name] == f"{mean:.1f} ({low:.1f} to {high:.1f})"
        assert mean == pytest.approx(100 * np.mean(values))


def test_settings_keep_the_order_of_the_records_and_failures_are_no_answers() -> None:
    records = [record(1, "A4"), record(1, "A0", aware=True), record(2, "A4", status="failed", figures={}, failure=None)]
    first, second = tables.rows(records, "small")
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
    ]
    arms = gather(record(1, method, parameters=given) for method, given in settings)
    found = [(first.words, second.words) for first, second in pairs(arms)]
    assert found[:2] == [
        ("A3-aware budget=0.25", "A3 budget=0.25"),
        ("A5 constraint=quotes budget=0.1", "A5 budget=0.1 constraint=none"),
    ]
    assert found[2:] == [(arm.words, "A1") for arm in arms if arm.method != "A1"]


def test_a_difference_is_taken_over_the_questions_that_both_answered() -> None:
    whole = [record(number, "A1", document=name, f1=0.25) for name in ("hut", "pier") for number in (1, 2, 3)]
    part = [record(number, "A3", document=name, f1=0.75) for name in ("pier", "hut") for number in (3, 1)]
    shown = section(tables.markdown([*whole, *part], "kvferry"), "Differences")
    assert shown[2] == [
        "A3 − A1",
        "4",
        "+0.0 (+0.0 to +0.0)",
        "+0.0 (+0.0 to +0.0)",
        "+50.0 (+50.0 to +50.0)",
    ]
    alone = [record(1, "A1"), record(2, "A3")]
    assert "Differences" not in tables.markdown(alone, "kvferry")


def test_a_paired_difference_is_narrower_than_its_two_means() -> None:
    random = np.random.default_rng(0)
    records = []
    for name in map(str, range(8)):
        for number in range(6):
            level = float(random.uniform())
            records += [
                record(number, "A1", document=name, f1=level),
                record(number, "A3", document=name, f1=level / 2),
            ]
    text = tables.markdown(records, "kvferry")

    def width(cell: str) -> float:
        low, _, high = cell[cell.index("(") + 1 : -1].partition(" to ")
        return float(high) - float(low)

    (difference,) = section(text, "Differences")[2:]
    whole = section(text, "Questions: 48, on documents: 8.")[2]
    assert width(difference[4]) < 0.7 * width(whole[tables.HEADING.index("F1 %")])


def test_shares_are_counted_by_document_and_by_kind() -> None:
    records = [
        record(1, kind="name"),
        record(2, kind="code", contains=False),
        record(1, document="pier", kind="code"),
        record(1, "A0", kind="name", contains=False),
    ]
    text = tables.markdown(records, "kvferry")
    by_document, by_kind = (section(text, f"Answers that hold an accepted one, by {what}") for what in ("doc", "kind"))
    assert by_document == [["method", "hut", "pier"], ["---"] * 3, ["A3", "1/2", "1/1"], ["A0", "0/1", "-"]]
    assert by_kind == [["method", "code", "name"], ["---"] * 3, ["A3", "1/2", "1/1"], ["A0", "-", "0/1"]]


def test_facts_are_counted_once_a_message() -> None:
    made = {"outcome.facts": 5, "outcome.exact": 3, "outcome.unresolved": 2, "outcome.complete": True}
    cut = {"outcome.facts": 2, "outcome.exact": 1, "outcome.unresolved": 1, "outcome.complete": False}
    records = [
        record(1, "A5", **made),
        record(2, "A5", **made),
        record(1, "A5", document="pier", artifact="two", **cut),
        record(1, "A4", **{"outcome.tokens": 9}),
    ]
    rows = section(tables.markdown(records, "kvferry"), "Facts of all messages")
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
    text = tables.markdown([record(1), *gone, *other], "kvferry ablate answers")
    assert text.startswith("`kvferry ablate answers`, commit abc123, 2026-11-30 to 2026-12-01.\n")
    assert "A Processor, 2 cores" in text
    assert text.index("### small") < text.index("### large")
    assert "\n- hut: A1: CONTEXT_OVERFLOW: document: too long (answers missing: 2)" in text
    assert tables.failed(gone) == ["hut: A1: CONTEXT_OVERFLOW: document: too long (answers missing: 2)"]


def test_a_model_of_failures_only_has_its_section() -> None:
    failure = Failure("MODEL", "no")
    text = tables.markdown([record(1, status="failed", figures={}, failure=failure)], "kvferry")
    assert text.endswith("### small\n\n- hut: A3: MODEL: no (answers missing: 1)")


def test_records_of_another_experiment_are_refused() -> None:
    with pytest.raises(StoreError, match=r"record .*missing"):
        tables.rows([record(1, figures={"kl_mean": 0.1})], "small")
