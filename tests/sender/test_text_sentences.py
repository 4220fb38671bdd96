"""Pieces of a document: a partition of it, and where people would cut."""

from __future__ import annotations

import time

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from kvferry.sender.text.sentences import LONGEST, pieces

WRAPPED = (
    "The lamp was already lit, although nobody but the keeper had the key to\n"
    "the lamp room. She counted the seconds between one flash and the next, as\n"
    "Dr. Vogt had taught her. Seven. It should have been nine.\n"
)


def split(text: str) -> list[str]:
    return [text[start:end] for start, end in pieces(text)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["The gate is shut. ", "Who shut it? ", "I did! ", "Go."],
        ["Mr. Okafor met Dr. Vogt. ", "They spoke."],
        ["It costs EUR 3.14, i.e. little. ", "Art. 5 and no. 7 apply. ", "He said no. ", "Then he left."],
        ["J. R. Smith came. ", "He lives in the U.S. ", "He stays."],
        ['"Stop!" he said. ', '"Why?" ', "(Nobody knew.) ", "Wait... ", "Go on."],
        ["Write to spares@depots.example or see a.b/c?d=1! ", "Soon."],
        ["„Ja.“ ", "Er ging z.B. heim, vgl. Abs. 3. ", "Gut."],
        ["**Note.** ", "It matters."],
        ["1. Open the door. ", "Wait.\n", "2. Shut it.\n", "iv. Done."],
        ["门没有关好。", "要做什么？", "“没有通行证的人一律不得进入。”", "主管说过。"],
        ["鍵は合いません！", "「異常なし。」", "円周率は３．１４です．", "そう。"],
        ["لا يدخل أحد دون تصريح. ", "من يجوز له الدخول؟ ", "اتصل بالرقم ١٩٩! ", "لا."],
        ["यह पहला है। ", "यह दूसरा है।"],
        ["Voilà. ", "C'est ça, M. Duval\u00a0! ", "Non."],
    ],
    ids=range(14),
)
def test_sentences(sentences: list[str]) -> None:
    assert split("".join(sentences)) == sentences


@pytest.mark.parametrize(
    "lines",
    [
        ["2026-02-11T04:01:12Z WARN w2: disk at 91 %. Threshold is 90 %\n", "2026-02-11T04:01:40Z ERROR w2: failed\n"],
        ["| part | text |\n", "|---|---|\n", "| PX-100 | Bearing, 40 mm. Sealed |\n", "| PX-104 | Open |"],
        ["def f(x):\n", "    return x.y\n\n\n", "value = f(1)\n"],
        ["# Title\n\n", "Text.\n", "- one\n", "- two\n\n"],
        ["Feb 11 04:01:12 host sshd[1]: Failed. Retry\n", "Feb 11 04:01:13 host sshd[1]: ok\n"],
        ["one\r\n", "two\r\n\r\n", "three"],
        [
            "Minutes of the meeting of the harbour board\n",
            "The board met at noon, and although the tide was low nobody had thought of asking the pilots to come. ",
            "They stayed away.",
        ],
        ["result = compute(first[0], second[1]) * 3 - 4;\n", "other = 5\n"],
        ["- the first thing that has to be done here today\n", "- the second thing"],
        ["one\u2028", "two\u2029", "three\x0b", "four\x85", "five\r", "six"],
    ],
    ids=["log", "table", "code", "markdown", "syslog", "crlf", "heading", "statement", "bullets", "separators"],
)
def test_lines(lines: list[str]) -> None:
    assert split("".join(lines)) == lines


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_wrapped_prose_is_put_together(end: str) -> None:
    found = [sentence.replace(end, " ") for sentence in split(WRAPPED.replace("\n", end))]
    assert found == [
        "The lamp was already lit, although nobody but the keeper had the key to the lamp room. ",
        "She counted the seconds between one flash and the next, as Dr. Vogt had taught her. ",
        "Seven. ",
        "It should have been nine. ",
    ]


def test_nothing_and_nearly_nothing() -> None:
    assert split("") == []
    assert split("word") == ["word"]
    assert split(" \n\t\r\n") == [" \n\t\r\n"]
    assert split("\n\n Yes. \n\n") == ["\n\n Yes. \n\n"]


def test_what_holds_no_sentence_is_cut_at_clauses_words_or_characters() -> None:
    clauses = split("the door is open, the gate is shut; " * 100)
    assert all(piece.endswith((", ", "; ")) for piece in clauses)
    words = split("warehouse " * 500)
    assert all(piece.endswith("warehouse ") for piece in words)
    digits = split("7" * 3000)
    assert [len(piece) for piece in digits] == [LONGEST] * 5
    family = split("👨\u200d👩\u200d👧\u200d👦" * 500)
    assert all(len(piece) % 7 == 0 for piece in family)
    for found in (clauses, words, family):
        assert LONGEST / 2 <= min(map(len, found[:-1])) <= max(map(len, found)) <= LONGEST


@pytest.mark.parametrize("number", ["45,000.75", "45'000", "4/5", "10:45", "45 000", "45\u202f000", "word"])
def test_no_cut_falls_within_a_number_or_a_word(number: str) -> None:
    for length in range(LONGEST - 12, LONGEST + 2):
        for filling in ("x|", "x "):
            before = (filling * LONGEST)[: length - 1] + "|"
            assert any(number in piece for piece in split(f"{before}{number}|{before}"))


def test_a_shorter_length_is_cut_in_the_same_way() -> None:
    text = "the door is open, the gate is shut; " * 20
    found = [text[start:end] for start, end in pieces(text, 100)]
    assert "".join(found) == text
    assert {len(piece) for piece in found[:-1]} == {90}
    assert all(piece.endswith((", ", "; ")) for piece in found)


def test_one_character_may_be_longer_than_any_piece() -> None:
    giant = "a" + "\u0301" * (2 * LONGEST)
    assert split(f"{giant}b") == [giant, "b"]


ODD = st.sampled_from(
    [
        *"aZ .!?\n\r\t\"'()[]|,;:-0。！「」“”門\u0301\u200d\u2028\x85\x00\u0627\u061f",
        *("\r\n", "\n\n", "Mr.", "U.S.", "e.g.", "3.14", "👩\u200d🚀", "🇩🇰", "word " * 150, "x" * 700),
    ]
)


@given(st.lists(ODD, max_size=40).map("".join) | st.text(max_size=300))
def test_pieces_are_a_partition_at_character_boundaries(text: str) -> None:
    found = list(pieces(text))
    assert "".join(text[start:end] for start, end in found) == text
    assert [start for start, _ in found] == [0, *(end for _, end in found)][: len(found)]
    edges = {match.end() for match in regex.finditer(r"\X", text)}
    assert {end for _, end in found} <= edges
    blank = [text[start:end] for start, end in found if not text[start:end].strip()]
    # White space is split off only where it is too much for one piece.
    assert not blank or not text.strip() or max(map(len, regex.findall(r"\s+", text))) > LONGEST / 2


@pytest.mark.parametrize(
    "text",
    [
        "🇩🇰" * 50_000,
        " " * 200_000,
        "\r\n" * 50_000,
        "." * 200_000,
        "A. " * 30_000,
        " . " * 30_000,
        '."' * 100_000,
        "a" + "\u0301" * 200_000,
        "1." * 100_000,
        "门开了。" * 20_000,
        ("abcdefgh " * 6 + "\n") * 5_000,
        "e\u0301" * 150_000,
        "कु" * 150_000,
        "。🏽" * 30_000,
        "‼🏽\u200d" * 20_000,
    ],
    ids=[
        *("flags", "spaces", "lines", "dots", "initials", "stops", "quotes", "marks", "numbers", "chinese", "wrapped"),
        *("accents", "vowels", "stops with marks", "stops in a character"),
    ],
)
def test_time_grows_with_the_text_and_no_faster(text: str) -> None:
    start = time.process_time()
    assert sum(end - begin for begin, end in pieces(text)) == len(text)
    assert time.process_time() - start < 4
