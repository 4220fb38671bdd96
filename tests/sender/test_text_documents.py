"""Every method that shortens text, on documents of every kind: budget, spans, order, determinism."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import regex
from loading import load

from kvferry.core import container, evidence
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.spans import from_bytes
from kvferry.core.stored import Stored
from kvferry.engine.model import LoadedModel

WRITTEN = list(load("text_documents/documents.py").written())
MADE = ["crlf", "empty", "blank", "one word", "one character", "without spaces", "clusters", "control strings"]
KINDS = {"A2": container.ENDS, "A3": container.EXCERPTS, "A3-aware": container.EXCERPTS, "A4": container.SUMMARY}
KINDS["A4-aware"] = container.SUMMARY
EXTRACTS = ("A2", "A3", "A3-aware")
BUDGETS = (1, 17, 96, 0.3)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", context=16384)


@pytest.fixture(scope="module")
def documents(text_documents: ModuleType) -> dict[str, str]:
    return dict(text_documents.written() | text_documents.made())


def test_these_are_the_documents(documents: dict[str, str]) -> None:
    assert list(documents) == [*WRITTEN, *MADE]
    assert {"contract", "service", "chapter", "table", "code", "chinese", "japanese", "arabic", "emoji"} < set(WRITTEN)
    assert documents["crlf"].count("\r\n") == documents["contract"].count("\n") > 30
    assert "\r" not in documents["contract"]


def check(stored: Stored, method: str, model: LoadedModel, document: str, budget: float) -> str:
    """Check an artifact from its bytes alone, and return its text."""
    kind = KINDS[method]
    assert [section.name for section in stored.manifest.sections] == [container.SYSTEM, kind, container.SPANS]
    text = bytes(stored.sections.read(kind)).decode("utf-8")
    whole = len(model.prompt.prefix(document)) - len(model.prompt.prefix(""))
    tokens = len(model.prompt.prefix(text, kind=kind)) - len(model.prompt.prefix("", kind=kind))
    assert tokens <= (max(1, int(whole * budget)) if isinstance(budget, float) else budget)
    assert stored.manifest.method.params["outcome.tokens"] == tokens
    spans = from_bytes("spans", stored.sections.read(container.SPANS), len(text), len(document))
    edges = {0, *(match.end() for match in regex.finditer(r"\X", document))}
    at = last = 0
    between = []
    for span in spans:
        assert text[span.at : span.at + span.end - span.start] == document[span.start : span.end]
        assert {span.start, span.end} <= edges
        assert last <= span.start
        between.append(text[at : span.at])
        at, last = span.at + span.end - span.start, span.end
    if method in EXTRACTS:
        assert at == len(text)
        assert set(between) <= {"", "\n", "\n...\n"}
        assert text.count("\ufffd") <= document.count("\ufffd")
    else:
        assert spans == ()
    return text


def refused(shop: Any, method: str, document: str, budget: float) -> int:
    """Return the budget that would do, where this one is refused; 0 where it is not."""
    try:
        shop.make(method, document, budget=budget)
    except InvalidRequestError as error:
        least: int = error.fields["minimum"] if error.fields["field"] == "budget" else 0  # type: ignore[assignment]
        return least
    return 0


@pytest.mark.parametrize("method", EXTRACTS)
@pytest.mark.parametrize("name", [*WRITTEN, *MADE])
def test_extracts(
    workshop: Callable[..., Any], model: LoadedModel, documents: dict[str, str], name: str, method: str
) -> None:
    document = documents[name]
    for budget in BUDGETS:
        least = refused(workshop(model), method, document, budget)
        if least:
            # What says something is never sent as a text that does not, and the least that would do does.
            assert document.strip()
            assert least > budget
            enough = workshop(model).make(method, document, budget=least).stored
            assert check(enough, method, model, document, least).strip()
            continue
        first, second = (workshop(model).make(method, document, budget=budget).stored for _ in range(2))
        assert first.encoded == second.encoded
        assert bool(check(first, method, model, document, budget).strip()) is bool(document.strip())
        assert first.payload_path.read_bytes() == second.payload_path.read_bytes()
    whole = workshop(model).make(method, document, budget=1.0).stored
    assert check(whole, method, model, document, 1.0) == document


@pytest.mark.parametrize("method", ["A4", "A4-aware"])
@pytest.mark.parametrize(
    "name",
    ["contract", "arabic", "japanese", "chinese", "emoji", "crlf", "empty", "blank", "one word", "one character"],
)
def test_summaries(
    workshop: Callable[..., Any], model: LoadedModel, documents: dict[str, str], name: str, method: str
) -> None:
    document = documents[name]
    first, second = (workshop(model).make(method, document, budget=12).stored for _ in range(2))
    assert first.encoded == second.encoded
    check(first, method, model, document, 12)


FEW = ("chinese", "emoji", "table", "blank", "control strings")


@pytest.mark.parametrize(
    ("name", "constraint"),
    [
        *((name, "passages") for name in [*WRITTEN, *MADE] if name != "without spaces"),
        *itertools.product(FEW, ["quotes", "schema", "none"]),
    ],
)
def test_evidence(
    workshop: Callable[..., Any], model: LoadedModel, documents: dict[str, str], name: str, constraint: str
) -> None:
    document = documents[name]
    budget = 150
    first, second = (
        workshop(model).make("A5", document, budget=budget, constraint=constraint).stored for _ in range(2)
    )
    assert first.encoded == second.encoded
    params = first.manifest.method.params
    assert params["outcome.tokens"] <= budget
    assert constraint == "passages" or params["outcome.generated"] <= budget
    data = first.sections.read(container.EVIDENCE)
    found = evidence.evidence_from_bytes("evidence", data, len(document))
    assert params["outcome.facts"] == len(found.facts)
    if constraint in {"passages", "quotes"}:
        assert params["outcome.unresolved"] == 0
    if not document.strip():
        assert (found.facts, found.complete) == ((), True)
    edges = {0, *(match.end() for match in regex.finditer(r"\X", document))}
    assert all({start, end} <= edges for fact in found.facts for start, end in fact.spans)


@pytest.mark.parametrize("constraint", ["passages", "quotes"])
def test_a_document_of_one_giant_word_holds_nothing_to_quote(
    workshop: Callable[..., Any], model: LoadedModel, documents: dict[str, str], constraint: str
) -> None:
    with pytest.raises(ModelError, match="^document: nothing in its 4000 characters can be quoted"):
        workshop(model).make("A5", documents["without spaces"], budget=150, constraint=constraint)


@pytest.mark.parametrize("method", EXTRACTS)
def test_fifty_thousand_words(
    workshop: Callable[..., Any], model: LoadedModel, text_documents: ModuleType, method: str
) -> None:
    document = text_documents.long_report()
    text = check(workshop(model).make(method, document, budget=256).stored, method, model, document, 256)
    assert len(text) > 200


QUESTIONS = {
    "contract": ("Who holds the deposit?", "Kestrel Trust"),
    "service": ("Which shard has 0 replicas?", "shard 6"),
    "chapter": ("What is the number of the order?", "1187"),
    "table": ("What does the safety valve for 10 bar cost?", "92.00"),
    "code": ("What clearance does the lock scheduler use by default?", "2.25"),
    "chinese": ("主管的电话是多少？", "6203-4471"),
    "japanese": ("四番の鍵は何の鍵ですか。", "灯室"),
    "arabic": ("ما رقم المشرفة ليلى حداد؟", "4471-620"),
    "emoji": ("Which crane works with a badge?", "A-0093"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_selected_for_a_question_holds_its_answer(
    workshop: Callable[..., Any], model: LoadedModel, documents: dict[str, str], drain: Callable[..., Any], name: str
) -> None:
    from kvferry.sender import registry

    question, answer = QUESTIONS[name]
    document = documents[name]
    assert answer in document
    method = registry.find("A3-aware")
    reading = workshop(model).reading(document, question=question)
    material = drain(method.make(reading, registry.check_parameters(method, {"budget": 0.25})))
    assert answer in material.text
    assert material.outcome["hit"] is True
