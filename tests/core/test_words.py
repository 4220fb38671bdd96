"""Index terms in every kind of writing."""

from __future__ import annotations

import itertools
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.words import concrete_share, terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The access code is 4417.", ["the", "access", "code", "is", "4417"]),
        ("NW-4417/b", ["nw", "4417", "b"]),
        ("snake_case getUserName HTTP", ["snake", "case", "get", "user", "name", "getusername", "http"]),
        ("EUR 11,750.00 and 3.14 at 7:30", ["eur", "11750.00", "and", "3.14", "at", "7:30"]),
        ("4417th 3.5mm B4", ["4417th", "3", "5mm", "b4"]),
        ("is 4417. Then 1.2.3x, 7: 8", ["is", "4417", "then", "1", "2", "3x", "7", "8"]),
        ("don't l\u2019eau", ["don", "t", "l", "eau"]),
        ("Straße ÅNGSTRÖM \ufb01ne", ["strasse", "ångström", "fine"]),
        ("２０２６ ٤٤١٧ ４，５", ["2026", "4417", "45"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("", []),
        (" \n\t—…!? 🚢👩\u200d🚀", []),
    ],
)
def test_words_and_numbers(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("倉庫の鍵", {"倉", "庫", "の", "鍵", "倉庫", "庫の", "の鍵"}),
        ("门", {"门"}),
        ("コード", {"コ", "ー", "ド", "コー", "ード"}),
        ("甲4417库", {"甲", "4417", "库"}),
        ("กุญแจ", {"ก", "ุ", "ญ", "แ", "จ", "กุ", "ุญ", "ญแ", "แจ"}),
    ],
)
def test_scripts_without_spaces_give_characters_and_pairs(text: str, expected: set[str]) -> None:
    assert set(terms(text)) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Käfer", "Ka\u0308fer"),
        ("WAREHOUSE", "warehouse"),
        ("1,400,000", "1400000"),
        ("ｱｸｾｽ", "アクセス"),
        ("٣٥٠", "350"),
        # Letters with two marks have no capital of their own.
        *(
            (f"ab{letter}cd", f"ab{letter}cd".upper())
            for letter in "\u0390\u03b0\u1fd2\u1fd3\u1fd7\u1fe2\u1fe3\u1fe7\u0149\u01f0"
        ),
    ],
)
def test_another_writing_of_the_same_word_is_the_same_term(one: str, other: str) -> None:
    assert terms(one) == terms(other) != []


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("well-known facts", 0.0),
        ("e.g. this", 0.0),
        ("The code is NW-4417.", 1 / 4),
        ("see foo.bar and a_b", 2 / 4),
        ("getUserName to x@depots.example in /srv/backup", 3 / 5),
        ("库房四 7号", 1 / 5),
    ],
)
def test_tokens_with_digits_or_of_an_identifiers_shape(text: str, share: float) -> None:
    assert concrete_share(text) == pytest.approx(share)


@given(st.text(max_size=200))
def test_any_text_has_terms_without_white_space(text: str) -> None:
    assert all(term and not any(char.isspace() for char in term) for term in terms(text))
    assert 0.0 <= concrete_share(text) <= 1.0


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_ascii_is_no_special_case(text: str) -> None:
    assert terms(text) == terms(f"{text} \u00e9")[:-1]


@given(st.text(st.sampled_from("abAB\u01c5\u00df\u00e9\u00c9"), min_size=1, max_size=6))
def test_a_word_of_letters_is_concrete_for_a_capital_behind_a_small_letter(word: str) -> None:
    humps = any(a.islower() and b.isupper() and unicodedata.category(b) == "Lu" for a, b in itertools.pairwise(word))
    assert concrete_share(word) == humps
    parts = [part.casefold() for part in re.split(r"(?<=[ab\u00df\u00e9])(?=[AB\u00c9])", word)]
    if unicodedata.is_normalized("NFKC", word):
        assert terms(word) == [*(parts if len(parts) > 1 else []), word.casefold()]
