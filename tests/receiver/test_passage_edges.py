"""What may be cut at the ends of a passage, against documents of which every number and unit is known."""

from __future__ import annotations

import time

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from kvferry.receiver import edges

NUMBERS = (
    "45,000",
    "1 234 567",
    "1\u202f234\u202f567,89",
    "1\u00a0200",
    "1\u2007200",
    "1\u2009200",
    "4.5 million",
    "12 kg",
    "7:30",
    "17.05.2024",
    "2024-05-17",
    "6203\u20114471",
    "3/4",
    "45k",
    "B-4417",
    "12 m²",
    "100'000",
    "٤٥٬٠٠٠ كجم",
)
WORDS = ("fee", "is", "EUR", "north-west", "the", "Zoë", "don't", "(net)", "due.", "and,", "€", "%")
UNSPACED = ("価格は45,000円です。", "四十五万円", "門が12,500個ある。", "ราคา45,000บาท")


def digits(text: str) -> set[int]:
    return {at for at, char in enumerate(text) if char.isnumeric()}


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WORDS)), min_size=1, max_size=4),
    st.data(),
)
def test_no_part_of_a_number_is_left_and_none_without_its_unit(
    parts: list[tuple[bool, str, str]], data: st.DataObject
) -> None:
    phrases = [part for number, one, word in parts for part in (["net", one, word] if number else ["net", word])]
    document = " ".join(["x", *phrases, "x"])
    cut, end = sorted(data.draw(st.tuples(st.integers(0, len(document)), st.integers(0, len(document)))))
    passage = document[cut:end]
    left = range(cut + edges.first_whole(passage), cut + edges.last_whole(passage))
    at = 2
    for phrase in phrases:
        numerals = {at + place for place in digits(phrase)}
        kept = numerals & set(left)
        # What came before a passage is nobody's unit; what comes behind it is.
        needed = set(range(min(numerals), at + len(phrase))) if numerals else set()
        assert not kept or needed <= set(left), (phrase, document[left.start : left.stop])
        at += len(phrase) + 1


@given(st.lists(st.sampled_from(WORDS + NUMBERS), max_size=6).map(" ".join), st.data())
def test_only_the_outermost_is_left_out_and_no_word_is_left_in_half(document: str, data: st.DataObject) -> None:
    cut, end = sorted(data.draw(st.tuples(st.integers(0, len(document)), st.integers(0, len(document)))))
    passage = document[cut:end]
    first, last = edges.first_whole(passage), edges.last_whole(passage)
    for before, behind, at in ((passage[:first], passage[first:], first), (passage[:last], passage[last:], last)):
        assert not (before[-1:].isalnum() and behind[:1].isalnum()), at
    # Of words alone, one at either end: what stands between the white space.
    if not digits(passage):
        assert len(passage[:first].split()) <= 1
        assert len(passage[last:].split()) <= 1


@pytest.mark.parametrize("text", UNSPACED)
def test_scripts_without_spaces_lose_a_character_that_may_go_on_and_the_number_at_a_cut(text: str) -> None:
    numerals = digits(text) | {at for at, char in enumerate(text) if char in ",万"}
    runs = [at for at in sorted(numerals) if at - 1 not in numerals]
    ends = [at + 1 for at in sorted(numerals) if at + 1 not in numerals]

    def number_before(cut: int) -> int:
        return next((start for start, end in zip(runs, ends, strict=True) if start < cut <= end), cut)

    clusters = [0, *(found.end() for found in regex.finditer(r"\X", text))]
    for cut in range(1, len(text)):
        left = number_before(cut)
        if left == cut and text[cut - 1] != "。":
            left = number_before(max(at for at in clusters if at < cut))
        assert edges.last_whole(text[:cut]) == left
        behind = next((end for start, end in zip(runs, ends, strict=True) if start <= cut < end), cut)
        assert edges.first_whole(text[cut:]) == min(at for at in clusters if at >= behind) - cut


CLUSTERS = (
    "👩\u200d🚀",
    "👨\u200d👩\u200d👧\u200d👦",
    "👍🏿",
    "🇩🇰",
    "🇸🇪",
    "❤\ufe0f\u200d🔥",
    "7\ufe0f\u20e3",
    "#\ufe0f\u20e3",
    "🚀",
    "ที่",
    "か\u3099",
    "門\U000e0100",
    "ក្រ",
    "မြို့",
    "क्षि",
    "e\u0301",
    "한",
    "각",
    "=\u0338",
    "<",
    "\r\n",
    "価",
    "north",
    " ",
    "。",
    "45",
)


@given(st.lists(st.sampled_from(CLUSTERS), min_size=1, max_size=8).map("".join), st.data())
def test_no_character_is_left_in_part(document: str, data: st.DataObject) -> None:
    boundaries = {0, *(found.end() for found in regex.finditer(r"\X", document))}
    cut, end = sorted(data.draw(st.tuples(st.integers(0, len(document)), st.integers(0, len(document)))))
    passage = document[cut:end]
    first, last = edges.first_whole(passage), edges.last_whole(passage)
    if last > first:
        # A line feed whose carriage return was cut off is still a line's end.
        assert cut + first in boundaries or passage[first] == "\n"
        assert cut + last in boundaries or passage[last - 1] == "\r"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("the crew 👩", "the crew "),
        ("the crew 👩\u200d", "the crew "),
        ("flags 🇩🇰🇸", "flags 🇩🇰"),
        ("press #", "press "),
        ("ราคาท", "ราคา"),
        ("は45円", "は"),
        ("価格は高い。", "価格は高い。"),
        ("がか", "が"),
        # A stroke through it would say the opposite.
        ("the valve is =", "the valve is "),
        ("a <\u0338", "a "),
        ("👩", ""),
    ],
)
def test_an_end_within_a_character(text: str, left: str) -> None:
    assert text[: edges.last_whole(text)] == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("🚀 flies", " flies"),
        ("\u200d🚀 flies", " flies"),
        ("\ufe0f\u200d🔥! It", "! It"),
        ("🏿 was", " was"),
        ("🇰🇸🇪 sail", " sail"),
        ("\u0e48ราคา", "ราคา"),
        ("\u3099い", "い"),
        ("価格", "価格"),
        ("© 2024", " 2024"),
    ],
)
def test_a_beginning_within_a_character(text: str, left: str) -> None:
    assert text[edges.first_whole(text) :] == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ""),
        ("45", ""),
        ("fee is EUR 45", "fee is EUR "),
        ("fee is EUR 45,", "fee is EUR "),
        ("fee is EUR 45 ", "fee is EUR "),
        ("fee is EUR 45 mil", "fee is EUR "),
        # That a sentence or a bracket ended is seen.
        ("ends in 4417. ", "ends in 4417. "),
        ("ends in 4417.\nThe", "ends in 4417.\n"),
        ("opens at seven.", "opens at seven."),
        ("(45)", "(45)"),
        ("45%", "45%"),
        ("page 12 kg of ri", "page 12 kg of "),
        # Numbers that follow one another are whole but for the last.
        ("4417 4418 44", "4417 4418 "),
        ("row 12 34 5", "row 12 "),
    ],
)
def test_an_end(text: str, left: str) -> None:
    assert text[: edges.last_whole(text)] == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ""),
        ("arehouse opens", " opens"),
        ("5,000 and", " and"),
        (",000 and", " and"),
        (" 000 and", " and"),
        ("34 567 and", " and"),
        (" 4417 and", " 4417 and"),
        (". The", ". The"),
        (" The", " The"),
        ("45円", "円"),
    ],
)
def test_a_beginning(text: str, left: str) -> None:
    assert text[edges.first_whole(text) :] == left


@pytest.mark.parametrize("part", ["1 ", "a-", "123 ", "4", "a.", "1 234 ", "-", ",1", " "])
def test_time_grows_with_the_length_alone(part: str) -> None:
    text = (part * 32_000)[:32_000] + "("
    start = time.process_time()
    assert edges.first_whole(text) <= len(text)
    assert edges.last_whole(text) <= len(text)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("gap", [" ", "\u00a0", "\u2007", "\u2009", "\u202f"])
def test_every_space_may_stand_between_thousands(gap: str) -> None:
    """The fee was 45 000 000 once, or may go on so."""
    assert f"{gap}000{gap}000 once"[edges.first_whole(f"{gap}000{gap}000 once") :] == " once"
    passage = f"a fee of 45{gap}000{gap}000"
    assert passage[: edges.last_whole(passage)] == "a fee of "
