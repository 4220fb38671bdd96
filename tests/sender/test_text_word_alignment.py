"""Spans of kept words: exact whatever the words are, and complete where the texts allow it."""

from __future__ import annotations

import unicodedata

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core.spans import Span, from_bytes, to_bytes
from kvferry.sender.text.word_alignment import Word, beginning, copied

ALPHABET = "ab. \n#\u0301\u00e9\ufb01\u2026\u1100\u1161\u0915\u093e\uff11\u9580\U0001f6a2\u200d\U0001f468\u00b4"


def words(text: str, kept: str) -> list[Word]:
    """Cut a text at white space; "1" keeps a word."""
    return [Word(word, mark == "1") for word, mark in zip(text.split(), kept, strict=True)]


def test_neighbours_make_one_span_and_equal_words_keep_their_places() -> None:
    document = "the red crate and the blue crate"
    assert copied(document, "red crate the crate", words(document, "0110101")) == (
        (0, 4, 13),
        (10, 18, 21),
        (14, 27, 32),
    )


def test_other_white_space_parts_spans() -> None:
    document = "one two\nthree  four"
    assert copied(document, "one two three four", words(document, "1111")) == ((0, 0, 7), (8, 8, 13), (14, 15, 19))


def test_what_was_rewritten_has_no_span_and_its_neighbours_do() -> None:
    document = "the \ufb01nal code is \uff14\uff14 now"
    listed = [Word(word, kept=True) for word in ("the", "final", "code", "is", "44", "now")]
    made = "the final code is 44 now"
    assert [made[at : at + end - start] for at, start, end in copied(document, made, listed)] == [
        "the",
        "code is",
        "now",
    ]


def test_what_the_tokenizer_does_not_know_is_stepped_over() -> None:
    document = "\u2603\u2603 a dog sees \u2603 a red bird and \u2603\u2603\u2603 sings on"
    listed = words("a dog sees a red bird and sings on", "000100011")
    spans = copied(document, "a sings on", listed)
    assert [document[start:end] for _, start, end in spans] == ["a", "sings on"]
    assert spans[0].start == document.index("a red")


def test_a_word_that_is_nowhere_does_not_lose_the_others() -> None:
    document = "alpha beta gamma delta epsilon zeta"
    listed = [Word(word, kept=True) for word in ("alpha", "XXX", "gamma", "delta", "epsilon", "zeta")]
    spans = copied(document, "alpha XXX gamma delta epsilon zeta", listed)
    assert [document[start:end] for _, start, end in spans] == ["alpha", "gamma delta epsilon zeta"]


def test_words_without_letters_and_no_words_at_all() -> None:
    assert copied("a b", "", []) == ()
    assert copied(
        "a b", "b", [Word("", kept=True), Word("a", kept=False), Word(" ", kept=True), Word("b", kept=True)]
    ) == ((0, 2, 3),)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, ()), (1, ((0, 5, 6),)), (3, ((0, 5, 8),)), (4, ((0, 5, 8),)), (6, ((0, 5, 8), (4, 20, 22))), (9, "all")],
)
def test_spans_of_a_beginning(length: int, expected: object) -> None:
    spans = (Span(0, 5, 8), Span(4, 20, 25))
    assert beginning(spans, length) == (spans if expected == "all" else expected)


@given(
    document=st.text(ALPHABET, max_size=60),
    cuts=st.lists(st.booleans(), max_size=60),
    form=st.sampled_from(["", "NFKC"]),
    other=st.lists(st.text(ALPHABET, max_size=4), max_size=4),
)
@example(document="\u0915\u093e \u0915\u093e", cuts=[True] * 5, form="", other=[])
def test_spans_are_exact_for_any_words(document: str, cuts: list[bool], form: str, other: list[str]) -> None:
    source = unicodedata.normalize("NFKC", document) if form else document
    parts = regex.findall(r"\S{1,3}", source)
    listed = [Word(part, kept) for part, kept in zip(parts, cuts + [True] * len(parts), strict=False)]
    listed[1:1] = [Word(part, kept=True) for part in other]
    made = " ".join(word.text for word in listed if word.kept)
    spans = copied(document, made, listed)
    assert from_bytes("spans", to_bytes(spans), len(made), len(document)) == spans
    last = 0
    for at, start, end in spans:
        assert made[at : at + end - start] == document[start:end]
        assert last <= start
        last = end


@given(document=st.text("ab.\u9580 \n", max_size=80), kept=st.lists(st.booleans(), min_size=80, max_size=80))
def test_every_kept_word_of_plain_text_has_its_span(document: str, kept: list[bool]) -> None:
    found = list(regex.finditer(r"\S+", document))
    listed = [Word(match.group(), keep) for match, keep in zip(found, kept, strict=False)]
    made = "\t".join(word.text for word in listed if word.kept)
    expected = [match.span() for match, word in zip(found, listed, strict=True) if word.kept]
    assert [(start, end) for _, start, end in copied(document, made, listed)] == expected
