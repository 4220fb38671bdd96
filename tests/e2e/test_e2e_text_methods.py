"""Shortened text from document to answer, through two daemons in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core import errors, evidence, words
from kvferry.core.stored import Stored
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM, LABELS, SUMMARY_SYSTEM

DOCUMENT = "The access code of the north warehouse is 4417. Größe: 12 m², 門 🚢. <|im_end|> The ferry leaves. " * 4
QUESTION = "What is the access code?"
BUDGET = 40
KINDS = {
    "A2": "document.ends",
    "A3": "document.excerpts",
    "A3-aware": "document.excerpts",
    "A4": "document.summary",
    "A4-aware": "document.summary",
}


@pytest.mark.parametrize("method", KINDS)
def test_from_document_to_answer(both: Any, pair_model: LoadedModel, method: str) -> None:
    text = f"{method}. {DOCUMENT}"
    given = {"question": QUESTION} if method.endswith("-aware") else {}
    sent = both.send(text, method, parameters={"budget": BUDGET}, **given)
    assert (sent.end.method, sent.end.form) == (method, "text")
    assert sent.end.moved_bytes == sent.end.payload_bytes > 0
    # The material is a part of the document or shorter than it; manifest, spans and system prompt come on top.
    assert sent.end.payload_bytes < len(text.encode()) + len(DEFAULT_SYSTEM.encode()) + 400
    prompt = pair_model.prompt
    account = json.loads(sent.end.account_json)
    written = len(prompt.prefix(text, SUMMARY_SYSTEM)) if method.startswith("A4") else 0
    assert account["prefill_tokens"] == written
    asked = both.ask(sent.end.artifact_id, QUESTION)
    frame = len(prompt.prefix("", kind=KINDS[method])) + len(prompt.fresh(QUESTION))
    tokens = asked.ledger["tokens"]
    assert tokens["receiver_prefill"] == frame + tokens["material"]
    assert tokens["material"] <= BUDGET
    assert asked.ledger["method"] == method
    assert asked.ledger["wire_bytes"] == sent.end.wire_bytes
    assert asked.ledger["fallback"] is None
    again = both.send(text, method, parameters={"budget": BUDGET}, **given)
    assert (again.end.artifact_id, again.end.reused) == (sent.end.artifact_id, True)


@pytest.mark.parametrize("method", ["A3-aware", "A4-aware"])
def test_aware_methods_need_the_question(both: Any, method: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=f"question: method {method} needs the question"):
        both.send(DOCUMENT, method)


def test_another_question_is_another_artifact_for_aware_methods_only(both: Any) -> None:
    ids = {
        method: {
            both.send(DOCUMENT, method, question=question).end.artifact_id for question in (QUESTION, "The ferry?")
        }
        for method in ("A3", "A3-aware")
    }
    assert (len(ids["A3"]), len(ids["A3-aware"])) == (1, 2)


def test_progress_goes_through_every_stage(both: Any) -> None:
    for method, stages in (("A3", ["tokenise", "method"]), ("A4", ["tokenise", "prefill", "method"])):
        sent = both.send(f"Progress. {DOCUMENT}", method)
        seen = list(dict.fromkeys(stage for stage, _, _ in sent.progress))
        assert seen == [*stages, "encode", "offer", "transfer", "commit"]


def test_every_kind_has_its_label() -> None:
    assert set(KINDS.values()) | {"document.text", "document.compressed", "document.evidence"} == set(LABELS)


@pytest.mark.parametrize("constraint", ["passages", "quotes", "schema", "none"])
def test_evidence_from_document_to_answer(both: Any, pair_model: LoadedModel, constraint: str) -> None:
    sent = both.send(DOCUMENT, "A5", parameters={"budget": 300, "constraint": constraint})
    assert (sent.end.method, sent.end.form) == ("A5", "evidence")
    asked = both.ask(sent.end.artifact_id, QUESTION)
    prompt = pair_model.prompt
    frame = len(prompt.prefix("", kind="document.evidence")) + len(prompt.fresh(QUESTION))
    assert frame <= asked.ledger["tokens"]["receiver_prefill"] <= frame + 300
    assert (asked.ledger["form"], asked.ledger["lookups"]["hit"], asked.ledger["fallback"]) == ("evidence", None, None)
    assert asked.ledger["wire_bytes"] == sent.end.wire_bytes


def test_references_from_document_to_answer(
    both: Any, pair_model: LoadedModel, artifact: Callable[..., Stored]
) -> None:
    sent = both.send(DOCUMENT, "A6", parameters={"budget": 400})
    assert (sent.end.method, sent.end.form) == ("A6", "references")
    same = artifact(pair_model, "A6", DOCUMENT, budget=400)
    data = same.sections.read("document.references")
    found = evidence.references_from_bytes("references", data, len(DOCUMENT)).references
    named = next(item for item in found if words.terms(item.entity))
    prompt = pair_model.prompt
    for question, hit in ((named.entity, True), ("\u2603 \u2603", False)):
        ledger = both.ask(sent.end.artifact_id, question, sender=both.sender).ledger
        lookups = ledger["lookups"]
        assert (lookups["hit"], lookups["calls"], lookups["missing"]) == (hit, int(hit), [])
        assert ledger["wire_bytes"] == sent.end.wire_bytes + lookups["bytes"]
        frame = len(prompt.prefix("", kind="document.excerpts")) + len(prompt.fresh(question))
        assert ledger["tokens"]["receiver_prefill"] == frame + ledger["tokens"]["material"]
        assert (0 < lookups["text_bytes"] <= 2000) is hit
        assert (ledger["tokens"]["material"] > 0) is hit
