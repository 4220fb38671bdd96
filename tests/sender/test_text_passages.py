"""What a fact may quote: whole sentences, rows and lines, and whole words of those that are long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from keys import SENTENCES, TEXT

from kvferry.sender.text.evidence_grammars import MAX_QUOTE
from kvferry.sender.text.passages import left_out, passages, ranked_passages
from kvferry.sender.text.quotes import Source

ORDERED = "It rained. The code of the hut is 4417. The keeper is Ada. The code of the barn is B-9923."


@pytest.mark.parametrize(
    ("question", "first", "absent"),
    [
        ("Who is the keeper?", "The keeper is Ada.", ["It rained."]),
        ("Which code has the barn?", "The code of the barn is B-9923.", ["It rained."]),
        ("Ferry?", "The code of the hut is 4417.", []),
        (None, "The code of the hut is 4417.", []),
    ],
)
def test_the_best_passage_comes_first(
    drain: Callable[..., Any], question: str | None, first: str, absent: list[str]
) -> None:
    found = drain(ranked_passages(ORDERED, question))
    assert ORDERED[slice(*found[0])] == first
    assert [ORDERED[slice(*place)] for place in passages(ORDERED) if place not in found] == absent


# No mark of its own: where white space is cut off before one, what is left begins within a character.
ATOMS = [
    *"ab15é漢字ทข한:.,;!?'\"\\_²½|[\t\u2028\u00a0",
    "Ann ",
    "7:40 ",
    "-5 ",
    "e\u0301",
    "👩\u200d🚀",
    "🇩🇪",
    "\r\n",
    "\n",
    " ",
    ". ",
]
LONG = st.lists(st.sampled_from(ATOMS) | st.sampled_from(ATOMS).map(lambda atom: atom * 210), max_size=30).map("".join)


def check_passages(text: str) -> list[str]:
    """Return a text's passages when they are its own, in order, between characters, and hold all but giant words."""
    edges = {0, *(cluster.end() for cluster in regex.finditer(r"\X", text))}
    at, quotes, without = 0, [], ""
    for start, end in passages(text):
        assert at <= start < end
        assert {start, end} <= edges | {at + len(text[at:]) - len(text[at:].lstrip())}
        check_left_out(text, at, start)
        without += "".join(text[at:start].split())
        quotes.append(text[start:end])
        assert quotes[-1] == quotes[-1].strip()
        assert len(quotes[-1]) - len(regex.findall(r"\X", quotes[-1])[-1]) < MAX_QUOTE
        at = end
    check_left_out(text, at, len(text))
    assert left_out(text) == len(without + "".join(text[at:].split()))
    return quotes


def check_left_out(text: str, start: int, end: int) -> None:
    """Check that between two passages nothing is, or what belongs to a word or number too long to be quoted."""
    if text[start:end].strip():
        run = regex.search(r"(?r)[\w\p{N}\p{M}.,:'\u2019/\u066b -]*", text[: start + 1]).group()
        run += regex.match(r"[\w\p{N}\p{M}.,:'\u2019/\u066b -]*", text[start + 1 :]).group()
        assert len(run) > MAX_QUOTE / 2


def test_sentences_rows_and_lines_can_be_quoted() -> None:
    assert check_passages(TEXT) == SENTENCES
    assert check_passages("| a | 1. B |\n| c | 2 |\n\n# Title\nx = 5; y = 6\n") == [
        "| a | 1. B |",
        "| c | 2 |",
        "# Title",
        "x = 5; y = 6",
    ]


# A text, and what of it is never cut.
LONG_NUMBERS = {
    "EUR 45,000": "45,000",
    "45,000.75": "45,000.75",
    "CHF 45\u2019000": "45\u2019000",
    "45 000 crowns": "45 000",
    "45\u202f000\u202f000": "45\u202f000\u202f000",
    "٤٥٫٠٣": "٤٥٫٠٣",
    "-4500": "-4500",
    "10:45:30": "10:45:30",
    "21/32": "21/32",
    "2024-05-03": "2024-05-03",
    "Termination": "Termination",
}


@pytest.mark.parametrize("filling", ["word ", "one, two; ", "x=", "a|", "“", "門", "x.y/z?"])
@pytest.mark.parametrize("number", LONG_NUMBERS)
def test_no_cut_falls_within_a_number_or_a_word(filling: str, number: str) -> None:
    for length in range(MAX_QUOTE - 24, MAX_QUOTE + 3):
        before = (filling * length)[: length - 2] + "| "
        text = f"{before}{number}{'|' if filling != 'word ' else ' '}{filling * 30}"
        quotes = check_passages(text)
        assert "".join("".join(quotes).split()) == "".join(text.split())
        assert any(LONG_NUMBERS[number] in quote for quote in quotes)
        for quote in quotes:
            assert Source(text).resolve(quote).match == "exact"


def test_a_number_is_quoted_as_a_whole() -> None:
    text = "x" * 150 + " " + "-" * 44 + "EUR 45,000 together and some more words than a quote may hold, " + "w " * 40
    assert any("45,000 together" in quote for quote in check_passages(text))
    text = "/" * 197 + "45,000/" + "/" * 50
    assert check_passages(text) == ["/" * 197, "45,000/" + "/" * 50]


def test_what_is_long_is_quoted_in_parts() -> None:
    sentence = "word " * 99 + "end."
    assert list(map(len, check_passages(sentence))) == [199, 199, 99]
    assert check_passages("word " * 20 + "clause, " * 12 + "word " * 20)[0].endswith("clause,")
    assert check_passages("門" * 1000) == ["門" * 200] * 5


def test_half_a_word_is_not_quoted_and_what_is_around_it_is() -> None:
    assert check_passages("x" * 1000) == []
    assert check_passages("7" * 1000) == []
    assert check_passages("x" * 200) == ["x" * 200]
    assert check_passages("the token: " + "x" * 1000 + " is long") == ["the token:", "is long"]
    assert check_passages("Look: " + "1.0," * 150 + " so!") == ["Look:", ",", "so!"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        (TEXT, 0),
        ("\ufeff \x00", 0),
        ("x" * 250, 250),
        ("x" * 200, 0),
        ("the token: " + "x" * 1000 + " is long", 1000),
        ("7" * 300 + "\n\n" + "\u00e9" * 201 + " \u3000", 501),
    ],
)
def test_what_no_passage_holds_is_counted_without_white_space(text: str, expected: int) -> None:
    assert left_out(text) == expected


@pytest.mark.parametrize("cluster", ["🇩🇪", "👩\u200d👩\u200d👧", "門\u0301", "\r\n", "門" + "\u0301" * 500])
def test_no_character_is_cut_in_two(cluster: str) -> None:
    parts = check_passages("x" + cluster * 150)
    assert "".join(parts) == ("x" + cluster * 150).strip()


@pytest.mark.parametrize("text", ["", " ", "\n\n \t\r\n"])
def test_of_nothing_nothing_can_be_quoted(text: str) -> None:
    assert list(passages(text)) == []


@given(LONG)
def test_passages_hold_the_whole_text_and_stand_in_it(text: str) -> None:
    source = Source(text)
    for quote in check_passages(text):
        assert source.resolve(quote).match == "exact"
