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
        ("#\ufe0f\u20e3 \u2014\u0301", []),
        ("\u0622\u0646 \u0627\u0646", ["\u0622\u0646", "\u0627\u0646"]),
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
    ("text", "expected"),
    [
        ("45,000円", ["45000", "円"]),
        ("第12章", ["第", "12", "章"]),
        ("2024年5月", ["2024", "年", "5", "月"]),
        ("第２，５００号", ["第", "2500", "号"]),
        ("7:30に", ["7:30", "に"]),
        ("ด๔๕", ["ด", "45"]),
        ("๔๕,๐๐๐.๕๐ด", ["45000.50", "ด"]),
        ("ກ໔໕ກ", ["ກ", "45", "ກ"]),
        ("ក៤៥ក", ["ក", "45", "ក"]),
        ("က၄၅က", ["က", "45", "က"]),
        ("ཀ༤༥ཀ", ["ཀ", "45", "ཀ"]),
        ("45,000원", ["45000", "원"]),
        ("제12조", ["제", "12", "조"]),
        ("3차원", ["3", "차원"]),
        # What is no number alone is none beside such a script.
        ("abc123円", ["abc123", "円"]),
        ("円4417x", ["円", "4417x"]),
        ("4417x円", ["4417x", "円"]),
        ("4417é", ["4417é"]),
        ("1.2.3é 4,417é", ["1", "2", "3é", "4", "417é"]),
        ("B٤ x๔5", ["b4", "x45"]),
        # A particle of Korean is no part of a name or a code.
        ("PX-815는 Python은", ["px", "815", "는", "python", "은"]),
    ],
)
def test_a_number_and_a_word_are_the_same_beside_scripts_without_spaces(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@given(
    st.from_regex(r"[0-9]{1,3}([.,:][0-9]{1,3}){0,2}", fullmatch=True),
    st.sampled_from(["円", "に", "カ", "ๆ", "บาท", "ກ", "ក", "က", "ཀ", "ꀀ", "원", "ㄅ"]),
    st.sampled_from(["0", "٠", "०", "๐", "໐", "០", "၀", "༠", "０"]),
)
def test_a_number_is_its_own_term_in_every_script(number: str, beside: str, zero: str) -> None:
    written = "".join(chr(ord(zero) + int(char)) if char.isdigit() else char for char in number)
    assert terms(beside + written + beside) == [*terms(beside), number.replace(",", ""), *terms(beside)]


UNSEEN = ["\u00ad", "\u034f", "\u180e", "\u200b", "\u200c", "\u200d", "\u200f", "\u2060", "\u3164", "\ufe0f", "\ufeff"]


@given(st.text(st.sampled_from("ab4٤,. AéＢe\u0301각ᄀ\u1161ม๔ำ倉کن-\u05d0क\u093f"), max_size=12), st.data())
def test_what_is_not_seen_does_not_count(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    unseen = data.draw(st.sampled_from([*UNSEEN, "\U000e0100"]))
    assert terms(text[:at] + unseen + text[at:]) == terms(text)
    assert concrete_share(text[:at] + unseen + text[at:]) == concrete_share(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Käfer", "Ka\u0308fer"),
        ("WAREHOUSE", "warehouse"),
        ("1,400,000", "1400000"),
        ("ｱｸｾｽ", "アクセス"),
        ("٣٥٠", "350"),
        ("٤٥٬٠٠٠٫٥", "45,000.5"),
        # Vowel marks, tatweel, marks of recitation; maddah comes with its letter.
        ("\u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f", "\u0645\u062d\u0645\u062f"),
        ("\u0645\u0640\u0640\u062d\u0645\u062f", "\u0645\u062d\u0645\u062f"),
        ("\u0631\u062d\u0645\u0670\u0646\u06e1", "\u0631\u062d\u0645\u0646"),
        ("\u0627\u064e\u0653", "\u0622"),
        ("\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("\ufb2a\u05b8\u05dc\u05d5\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0645\u06cc\u062e\u0648\u0627\u0647\u0645"),
        ("4\ufe0f\u20e34\ufe0f\u20e31\u20e37", "4417"),
        ("4\u03324\u0332", "44"),
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
        ("ด๔๕", 1 / 2),
        ("in\u00adter\u00adval 7", 1 / 2),
        ("two words 7\ufe0f\u20e3", 1 / 3),
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
