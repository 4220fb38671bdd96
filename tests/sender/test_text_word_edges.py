"""Words and numbers as wholes: where one goes on, nothing may begin or end."""

from __future__ import annotations

import itertools

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from kvferry.sender.text.word_edges import ceil, floor, is_inside, whole

SPACES = [" ", "\u00a0", "\u2007", "\u2009", "\u202f"]
MARKS = [*".,:'/", *"\uff0e\uff0c\uff1a\uff07\uff0f\u066b\u066c\u2018\u2019\u2032\u2044\u2215"]


def parts(text: str) -> list[str]:
    """Return a text in the pieces between its edges."""
    edges = [at for at, edge in enumerate(whole(text)) if edge]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("mark", MARKS, ids=ascii)
def test_a_number_goes_on_across_a_mark_between_digits(mark: str) -> None:
    assert parts(f"x 5{mark}0 {mark}") == ["x", " ", f"5{mark}0", " ", mark]
    assert f"5{mark}0{mark}25" in parts(f" 5{mark}0{mark}25 ")
    assert "5" in parts(f" 5{mark} 0 ")
    assert "5" in parts(f" 5{mark * 2}0 ")


@pytest.mark.parametrize("space", SPACES, ids=ascii)
def test_a_number_goes_on_across_a_space_between_groups(space: str) -> None:
    for number in (f"5{space}000", f"12{space}000{space}000", f"125{space}000,50", f"-1{space}250"):
        assert parts(f"({number}) kg") == ["(", number, ")", " ", "kg"]
    for other in (
        f"5{space}00",
        f"5{space}0000",
        f"2024{space}500",
        f"5{space * 2}000",
        f"a{space}000",
        f"5{space}abc",
    ):
        assert parts(other)[0] == other[: other.index(space)]


@pytest.mark.parametrize("space", ["\n", "\t", "\r\n", "\u2028", "\u3000", " \n"], ids=ascii)
def test_no_number_goes_across_a_line_or_a_column(space: str) -> None:
    assert parts(f"5{space}000") == ["5", *space, "000"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2024-05-03", ["2024", "-", "05", "-", "03"]),
        ("2024-05-03 100", ["2024", "-", "05", "-", "03", " ", "100"]),
        ("12:30:45 200", ["12:30:45", " ", "200"]),
        ("3–5", ["3", "–", "5"]),
        ("(-5", ["(", "-5"]),
        ("\u22125", ["\u22125"]),
        ("C-4", ["C", "-", "4"]),
        ("10²", ["10²"]),
        ("id_5x", ["id_5x"]),
        ("第15条", ["第", "15", "条"]),
        ("門開", ["門", "開"]),
        ("ด๔๕,๐๐๐ด", ["ด", "๔๕,๐๐๐", "ด"]),
        ("ក៤៥", ["ក", "៤៥"]),
        ("서울에", ["서", "울", "에"]),
        ("٥٫٣", ["٥٫٣"]),
        ("don't", ["don", "'", "t"]),
        ("", []),
    ],
)
def test_words_and_numbers(text: str, found: list[str]) -> None:
    assert parts(text) == found


@given(st.lists(st.sampled_from([*"ab15漢한-–_²\u0301\n\t", *SPACES, *MARKS, "000", "250"]), max_size=20).map("".join))
def test_one_place_or_all_is_the_same(text: str) -> None:
    assert [bool(edge) for edge in whole(text)] == [not is_inside(text, at) for at in range(len(text) + 1)]


@given(
    st.lists(st.sampled_from([*"ab15漢한-–_ \u0301\u200d👩🇩कि", ",000", "\u094d", "\r\n", "🏽"]), max_size=20).map(
        "".join
    ),
    st.data(),
)
def test_the_nearest_place_is_the_nearest_of_all(text: str, data: st.DataObject) -> None:
    edges = [0, *(match.end() for match in regex.finditer(r"\X", text))]
    places = [at for at in edges if whole(text)[at]]
    at = data.draw(st.integers(0, len(text)))
    since = data.draw(st.sampled_from([edge for edge in edges if edge <= at]))
    assert floor(text, at, since) == max((place for place in places if since <= place <= at), default=since)
    first, until = sorted(data.draw(st.tuples(st.sampled_from(edges), st.sampled_from(edges))))
    assert ceil(text, first, until) == min((place for place in places if first <= place <= until), default=until)
