"""A3: the document's own sentences, ranked, within the budget, in order."""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.bm25 import ranked
from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import Progress, finish
from kvferry.core.words import terms
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.method import TextMaterial
from kvferry.sender.text.assembly import Piece
from kvferry.sender.text.centrality import centrality
from kvferry.sender.text.extractive import aware_scores, blind_scores, read_pieces
from kvferry.sender.text.selection import select
from kvferry.sender.text.sentences import pieces

SENTENCES = [
    "The north warehouse opens at seven. ",
    "Its access code is 4417. ",
    "Nobody remembers who painted the door.\n",
    "The south warehouse has no code. ",
    "Ada Lindqvist keeps the keys of both warehouses. ",
    "Rain fell.",
]
TEXT = "".join(SENTENCES)
QUESTION = "What is the access code of the north warehouse?"
WORDS = st.sampled_from(["gate", "code", "north", "the", "4417", "ledger"])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def extract(workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]) -> Callable[..., TextMaterial]:
    """Return a function: what a method makes of a text."""

    def run(method: str, text: str, budget: float = 0.25, question: str | None = QUESTION) -> TextMaterial:
        found = registry.find(method)
        reading = workshop(model).reading(text, question=question)
        material = drain(found.make(reading, registry.check_parameters(found, {"budget": budget})))
        assert isinstance(material, TextMaterial)
        assert material.text is not None
        assert model.prompt.content.count(material.text) == material.outcome["tokens"]
        return material

    return run


def passages(material: TextMaterial, text: str) -> list[str]:
    """Return the passages that a material takes from a text, checked against what was sent."""
    found = []
    sent = material.text or ""
    for at, start, end in material.spans:
        assert sent[at : at + end - start] == text[start:end] != ""
        found.append(text[start:end])
    return found


def cost(model: LoadedModel, text: str) -> int:
    return len(model.prompt.prefix(text)) - len(model.prompt.prefix(""))


@pytest.mark.parametrize("method", ["A3", "A3-aware"])
@pytest.mark.parametrize("text", ["", " ", "\n\n\r\n\t", "One.", "...", "One. Two.", "One. One.", "\u3000"])
def test_hardly_anything_to_choose_from(extract: Callable[..., TextMaterial], method: str, text: str) -> None:
    assert extract(method, text, budget=1.0).text == text
    assert extract(method, text, budget=1000).text == text


@pytest.mark.parametrize("method", ["A3", "A3-aware"])
@pytest.mark.parametrize(
    "text",
    [TEXT, "One.", "...", "\n\nRain fell. \n \n", SENTENCES[0] * 3, "44" * 300 + "x" * 600, "北の倉庫。門は赤い。"],
)
def test_a_budget_that_holds_no_piece_is_refused_with_the_least_that_does(
    extract: Callable[..., TextMaterial], model: LoadedModel, method: str, text: str
) -> None:
    least = min(cost(model, text[start:end]) for start, end in pieces(text) if text[start:end].strip())
    for budget in {1, least - 1} - {0}:
        with pytest.raises(InvalidRequestError) as caught:
            extract(method, text, budget=budget)
        assert caught.value.fields == {"field": "budget", "value": budget, "minimum": least}
        assert caught.value.message.startswith(f"budget: {budget} tokens do not suffice for the shortest piece")
        assert caught.value.message.endswith(f" {least}")
    assert (extract(method, text, budget=least).text or "").strip()


def test_what_looks_cheaper_among_others_does_not_take_the_place_of_what_fits() -> None:
    prompt: Any = SimpleNamespace(count=lambda text: 9 if text == "aaa" else len(text))
    # Within the document three tokens, by itself nine.
    document: Any = SimpleNamespace(text="aaabbb", costs=lambda _: [3, 3])
    two = [Piece(0, 3), Piece(3, 6)]
    found = finish(select(prompt, document, two, [0, 1], 3))
    assert (found.made.text, found.tokens, found.pieces) == ("bbb", 3, 1)
    with pytest.raises(InvalidRequestError, match=r"^budget: 2 tokens .* takes 3$"):
        finish(select(prompt, document, two, [0, 1], 2))


def test_pieces_that_take_fewer_tokens_together_make_room_and_are_counted_once_on_the_way() -> None:
    counts: list[str] = []

    def count(text: str) -> int:
        counts.append(text)
        return len(text) - 2 * (text.startswith("aaabbb"))

    prompt: Any = SimpleNamespace(count=count)
    document: Any = SimpleNamespace(text="aaabbbcccddd", costs=lambda _: [3, 3, 3, 3])
    four = [Piece(at, at + 3) for at in range(0, 12, 3)]
    # Six by their own tokens, four together: the third fits, and so the fourth does not.
    found = finish(select(prompt, document, four, [0, 1, 2, 3], 7))
    assert (found.made.text, found.tokens, found.pieces) == ("aaabbbccc", 7, 3)
    assert counts == ["aaabbb", "aaabbbccc"]


@pytest.mark.parametrize("method", ["A3", "A3-aware"])
def test_a_document_within_the_budget_is_sent_whole(
    extract: Callable[..., TextMaterial], model: LoadedModel, method: str
) -> None:
    whole = extract(method, TEXT, budget=cost(model, TEXT))
    assert whole.text == TEXT
    assert [tuple(span) for span in whole.spans] == [(0, 0, len(TEXT))]
    assert (whole.outcome["sentences"], whole.outcome["of"]) == (len(SENTENCES), len(SENTENCES))


def test_a_match_counts_alone_and_outranks_what_does_not_match() -> None:
    assert aware_scores(QUESTION, [terms("The access code.")])[0] > 0
    hit, miss = aware_scores(QUESTION, [terms("Rain fell."), terms("The access code.")])[::-1]
    assert hit > miss == 0


def test_the_best_match_comes_first(extract: Callable[..., TextMaterial], model: LoadedModel) -> None:
    budget = cost(model, SENTENCES[1])
    assert extract("A3-aware", TEXT, budget=budget).text == SENTENCES[1]
    other = extract("A3-aware", TEXT, budget=cost(model, SENTENCES[4]), question="Who keeps the keys?")
    assert other.text == SENTENCES[4]


def test_sentences_stand_in_the_documents_order_and_neighbours_are_one_span(
    extract: Callable[..., TextMaterial], model: LoadedModel
) -> None:
    budget = cost(model, SENTENCES[0]) + cost(model, SENTENCES[1]) + cost(model, SENTENCES[4])
    made = extract("A3-aware", TEXT, budget=budget, question="access code, north gate, keys of Ada")
    assert made.text == SENTENCES[0] + SENTENCES[1] + SENTENCES[4]
    assert passages(made, TEXT) == [SENTENCES[0] + SENTENCES[1], SENTENCES[4]]


def test_what_does_not_fit_is_skipped_for_what_does(extract: Callable[..., TextMaterial], model: LoadedModel) -> None:
    long = "The access code, the access code and again the access code of the north warehouse stays secret. "
    text = f"{long}Code. Rain fell."
    made = extract("A3-aware", text, budget=cost(model, "Code. "), question="access code")
    assert made.text == "Code. "


@pytest.mark.parametrize("method", ["A3", "A3-aware"])
@pytest.mark.parametrize("budget", [12, 16, 20, 33, 50, 70, 90])
def test_nothing_that_is_left_out_would_still_fit(
    extract: Callable[..., TextMaterial], model: LoadedModel, method: str, budget: int
) -> None:
    made = extract(method, TEXT, budget=budget)
    assert cost(model, made.text or "") <= budget
    taken = {(start, end) for _, start, end in made.spans}
    for piece in pieces(TEXT):
        if not any(start <= piece.start < end for start, end in taken):
            # A token may be gained where two pieces meet.
            assert cost(model, made.text or "") + cost(model, TEXT[piece.start : piece.end]) > budget - 2


def test_a_hit_is_reported_and_so_is_none(extract: Callable[..., TextMaterial]) -> None:
    assert extract("A3-aware", TEXT, budget=40).outcome["hit"] is True
    missed = extract("A3-aware", TEXT, budget=40, question="Zebra xylophone?")
    assert missed.outcome["hit"] is False
    # Without a hit, the beginning.
    assert (missed.text or "").startswith(SENTENCES[0])
    assert "hit" not in extract("A3", TEXT, budget=40).outcome


def test_the_question_needs_no_spaces_in_its_language(extract: Callable[..., TextMaterial], model: LoadedModel) -> None:
    text = "今日は雨です。北の倉庫の暗証番号は4417です。扉は赤い。"
    made = extract("A3-aware", text, budget=cost(model, "北の倉庫の暗証番号は4417です。"), question="暗証番号は?")
    assert made.text == "北の倉庫の暗証番号は4417です。"


@pytest.mark.parametrize(
    ("best", "question"),
    [
        ("北の倉庫は45,000円です。", "Which one is 45000?"),
        ("โกดังเหนือราคา๔๕,๐๐๐บาท\n", "Which one is 45000?"),
        ("북쪽 창고는 45,000원이다. ", "Which one is 45,000?"),
        ("The in\u00adner door is red. ", "Inner?"),
        ("\u0642\u064e\u0644\u064e\u0645\u064c. ", "\u0642\u0644\u0645"),
    ],
)
def test_a_match_is_found_in_any_writing(
    extract: Callable[..., TextMaterial], model: LoadedModel, best: str, question: str
) -> None:
    text = f"今日は雨です。\n{best}\nRain fell. "
    found = extract("A3-aware", text, budget=cost(model, best) + 2, question=question)
    assert found.outcome["hit"] is True
    assert best.strip() in (found.text or "")


def test_blind_takes_no_question_and_never_changes_with_it(extract: Callable[..., TextMaterial]) -> None:
    assert list(inspect.signature(blind_scores).parameters) == ["sentences", "words"]
    found = {extract("A3", TEXT, budget=40, question=question).text for question in (None, "", QUESTION, "Rain?")}
    assert len(found) == 1
    assert extract("A3-aware", TEXT, budget=40, question="Rain?").text not in found


@pytest.mark.parametrize("question", [None, ""])
def test_aware_needs_a_question(extract: Callable[..., TextMaterial], question: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="^question: method A3-aware needs the question$"):
        extract("A3-aware", TEXT, question=question)


def mean_cosine(passages: list[list[str]]) -> list[float]:
    """Work the centrality out pair by pair."""
    count = len(passages)

    def vector(passage: list[str]) -> dict[str, float]:
        weights = {}
        for term in set(passage):
            holders = sum(term in other for other in passages)
            weights[term] = passage.count(term) * math.log(1 + (count - holders + 0.5) / (holders + 0.5))
        return weights

    def cosine(one: dict[str, float], other: dict[str, float]) -> float:
        norms = math.hypot(*one.values()) * math.hypot(*other.values())
        return sum(weight * other.get(term, 0.0) for term, weight in one.items()) / norms if norms else 0.0

    vectors = [vector(passage) for passage in passages]
    return [
        sum(cosine(vectors[at], vectors[other]) for other in range(count) if other != at) / max(count - 1, 1)
        for at in range(count)
    ]


@given(st.lists(st.lists(WORDS, max_size=6), max_size=7))
def test_centrality_is_the_mean_cosine_to_the_others(passages: list[list[str]]) -> None:
    np.testing.assert_allclose(centrality(passages), mean_cosine(passages), rtol=0, atol=1e-9)


def test_blind_prefers_what_is_central_and_concrete() -> None:
    plain = ["the north gate is shut", "the north gate is open", "rain fell"]
    scores = blind_scores(plain, [terms(sentence) for sentence in plain])
    assert scores[0] == pytest.approx(scores[1])
    assert scores[0] > scores[2] == 0
    # The same words in the same number, one of them a number.
    dense = ["the gate code", "the gate 4417", "the gate code 4417"]
    words = [terms(sentence) for sentence in dense]
    expected = [share * one for share, one in zip((1.0, 4 / 3, 5 / 4), mean_cosine(words), strict=True)]
    assert blind_scores(dense, words).tolist() == pytest.approx(expected)


def test_reading_gives_every_piece_with_its_terms_and_says_how_far_it_is() -> None:
    text = "Gate 7. " * 1500
    split = [Piece(at, at + 8) for at in range(0, len(text), 8)]
    seen: list[Progress] = []
    found, words = finish(read_pieces(text, iter(split)), seen.append)
    assert (found, words) == (split, [["gate", "7"]] * 1500)
    assert [progress.done for progress in seen] == [0, 512 * 8, 1024 * 8, len(text)]
    assert {(progress.stage, progress.total) for progress in seen} == {("tokenise", len(text))}


def test_equal_scores_go_in_the_documents_order() -> None:
    assert ranked(np.array([0.5, 1.0, 0.5, 1.0 + 1e-15, 0.0])) == [1, 3, 0, 2, 4]
    assert ranked(np.array([])) == []


def test_passages_never_run_into_one_another(extract: Callable[..., TextMaterial], model: LoadedModel) -> None:
    # One line of digits is cut by length only, so the pieces end in the middle of nothing.
    text = "44" * 300 + "x" * 600 + "17" * 300
    found = [text[start:end] for start, end in pieces(text)]
    assert len(found) == 3
    made = extract("A3-aware", text, budget=cost(model, found[0]) + cost(model, found[2]) + 1, question=found[2])
    assert made.text == f"{found[0]}\n{found[2]}"
    assert passages(made, text) == [found[0], found[2]]


def test_fifty_thousand_words_in_a_second(
    workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any], text_documents: Any
) -> None:
    text = text_documents.long_report()
    assert len(text.split()) == 50_000
    for name in ("A3", "A3-aware"):
        method = registry.find(name)
        reading = workshop(model).reading(text, question=QUESTION)
        parameters = registry.check_parameters(method, {"budget": 256})
        # The tokenizer is the model's, and this one, with its few merges, is slower than any real one.
        tokenizing = time.process_time()
        model.prompt.content.offsets(text)
        tokenizing = time.process_time() - tokenizing
        start = time.process_time()
        material = drain(method.make(reading, parameters))
        spent = time.process_time() - start - tokenizing
        assert 200 < material.outcome["tokens"] <= 256
        assert spent < 1.0, f"{name}: {spent:.2f} s of one core"


def test_progress_and_giving_up(workshop: Callable[..., Any], model: LoadedModel, text_documents: Any) -> None:
    text = text_documents.long_report(12_000)
    method = registry.find("A3")
    reading = workshop(model).reading(text)
    parameters = registry.check_parameters(method, {"budget": 64})
    seen = list(method.make(reading, parameters))
    stages = itertools.groupby(seen, key=lambda progress: progress.stage)
    for (stage, steps), least in zip(stages, (4, 2), strict=True):
        found = list(steps)
        assert stage == {4: "tokenise", 2: "method"}[least]
        assert [progress.done for progress in found] == sorted(progress.done for progress in found)
        assert {progress.total for progress in found} == {found[-1].done}
        assert len(found) >= least
    steps = method.make(reading, parameters)
    for _ in range(3):
        next(steps)
    steps.close()
