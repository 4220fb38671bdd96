"""Budgets in the tokens of whatever receiver: texts of every kind by tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import regex
from loading import load

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.method import TextMaterial
from kvferry.sender.text.counted import CountedText, within
from kvferry.sender.text.head_tail import MARK

DOCUMENTS = load("text_documents/documents.py")
TEXTS: dict[str, str] = DOCUMENTS.written() | DOCUMENTS.made()
SHORT = {
    "marks": "Ca\u0308fe\u0301 Z\u0337\u0347\u0308a\u0338\u0324\u035d l\u0334 हिन्दी में क्षि 한각",
    "widths": "Ｔｈｅ ｃｏｄｅ ｉｓ ４４１７, ﬁnal\u2026 ½ of ㍿ and ﷺ, \u1112\u1161\u11ab\u3000\ufb03",
    "emoji": "Ana 👩🏽\u200d🚀 und Bo 👨\u200d👩\u200d👧\u200d👦: 🇩🇰🇸🇪 7\ufe0f\u20e3 ❤\ufe0f\u200d🔥!",
    "crlf": "The key\r\n\r\nof the harbour \u2581 station\r\n",
    "unseen": "\ufeffthe\u200b key\x00 of\u00ad a \u2028 room",
}
KINDS = load("text_documents/vocabularies.py").KINDS
EXTRACTS = ("A2", "A3", "A3-aware")
BUDGETS = (7, 60, 0.3)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", context=16384)


@pytest.fixture(scope="module", params=KINDS)
def counter(request: pytest.FixtureRequest) -> ContentEncoder:
    made: ContentEncoder = KINDS[request.param]()
    return made


@pytest.fixture
def extract(
    workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any], counter: ContentEncoder
) -> Callable[..., TextMaterial]:
    """Return a function: what a method makes of a text for a receiver with this tokenizer."""
    shop = workshop(model)

    def run(method: str, text: str, budget: float) -> TextMaterial:
        found = registry.find(method)
        reading = shop.reading(text, question="Who holds the deposit, and what is the key?")
        reading.counter = counter
        material = drain(found.make(reading, registry.check_parameters(found, {"budget": budget})))
        assert isinstance(material, TextMaterial)
        return material

    return run


def attempt(extract: Callable[..., TextMaterial], method: str, text: str, budget: float) -> TextMaterial | int:
    """Return what a method makes, or the budget that would do."""
    try:
        return extract(method, text, budget)
    except InvalidRequestError as error:
        return int(error.fields["minimum"] or 0)


def edges_of(text: str) -> set[int]:
    return {0, *(found.end() for found in regex.finditer(r"\X", text))}


def check(made: TextMaterial, method: str, document: str, edges: set[int]) -> None:
    """Check that a text is the document's own passages in its order, whole characters, and marks between them."""
    text, at, last = made.text or "", 0, 0
    between = set()
    for span in made.spans:
        assert last <= span.start < span.end
        assert {span.start, span.end} <= edges
        between.add(text[at : span.at])
        at, last = span.at + span.end - span.start, span.end
        assert text[span.at : at] == document[span.start : span.end]
    assert at == len(text)
    assert between <= ({"", MARK} if method == "A2" else {"", "\n"})


# Two words and bytes; spaces of their own; a run that is unknown, and a ligature that falls apart; no spaces.
@pytest.mark.parametrize(
    ("kind", "expected"), [("byte-level BPE", 13), ("BPE with bytes", 13), ("Unigram", 7), ("WordPiece", 5)]
)
def test_each_kind_counts_in_its_own_way(kind: str, expected: int) -> None:
    assert KINDS[kind]().count("the harbour 門門 \ufb01") == expected


@pytest.mark.parametrize("method", EXTRACTS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_budget_is_kept_in_the_receivers_tokens(
    extract: Callable[..., TextMaterial], counter: ContentEncoder, name: str, method: str
) -> None:
    document = TEXTS[name]
    whole, edges = counter.count(document), edges_of(document)
    for budget in BUDGETS:
        allowed = max(1, int(whole * budget)) if isinstance(budget, float) else budget
        made = attempt(extract, method, document, budget)
        assert made == attempt(extract, method, document, budget)
        if isinstance(made, int):
            assert allowed < made <= whole
            assert document.strip()
            made, allowed = extract(method, document, made), made
        check(made, method, document, edges)
        assert made.outcome["tokens"] == counter.count(made.text or "") <= allowed
        assert bool((made.text or "").strip()) is bool(document.strip())
        assert (made.text == document) is (whole <= allowed)


@pytest.mark.parametrize("name", SHORT)
def test_every_budget(extract: Callable[..., TextMaterial], counter: ContentEncoder, name: str) -> None:
    document = SHORT[name]
    edges, least = edges_of(document), 0
    for budget in range(1, counter.count(document) + 2):
        for method in EXTRACTS:
            made = attempt(extract, method, document, budget)
            if isinstance(made, int):
                assert made > budget
                continue
            check(made, method, document, edges)
            assert 0 < counter.count(made.text or "") <= budget
            least += 1
    assert least > 3


@pytest.mark.parametrize("name", SHORT)
def test_a_beginning_within_a_budget(counter: ContentEncoder, name: str) -> None:
    text = SHORT[name]
    edges, whole = edges_of(text), counter.count(text)
    kept = [within(counter, text, budget) for budget in range(whole + 2)]
    for budget, beginning in enumerate(kept):
        assert text.startswith(beginning)
        assert len(beginning) in edges
        assert counter.count(beginning) <= budget
    assert kept[whole:] == [text, text]
    assert len(set(kept)) > whole / 5


@pytest.mark.parametrize("name", SHORT)
def test_cuts_ascend_and_fall_between_characters(counter: ContentEncoder, name: str) -> None:
    counted, edges = CountedText(counter, SHORT[name]), edges_of(SHORT[name])
    assert counted.tokens == counter.count(SHORT[name])
    heads = [counted.head(tokens) for tokens in range(counted.tokens + 1)]
    tails = [counted.tail(tokens) for tokens in range(counted.tokens, -1, -1)]
    assert heads == sorted(heads)
    assert tails == sorted(tails)
    assert edges >= {*heads, *tails}
    assert (heads[0], heads[-1], tails[0], tails[-1]) == (0, len(SHORT[name]), 0, len(SHORT[name]))
    assert all(head <= tail for head, tail in zip(heads, tails, strict=True))
