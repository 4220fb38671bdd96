"""Words of any language, for ranking passages: an index term a word, and one or two a character without spaces."""

from __future__ import annotations

import re
import unicodedata

import regex

UNSPACED = (
    r"[[\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Yi}々〆ー]--\p{Nd}]"
)
"""Characters of scripts that put no space between words, but for their digits; for a set in a pattern of ``regex``,
version 1."""
GROUP_SPACES = " \u00a0\u2007\u2009\u202f"
"""White space that may stand between the groups of a number."""
UNWRITTEN = (
    r"\p{Cf}\p{Default_Ignorable_Code_Point}\u0640[[\p{Block=Arabic}&&\p{M}]--[\u0653-\u0655]][\p{Hebrew}&&\p{M}]"
)
"""What is not seen, or mostly not written, for a set in a pattern of ``regex``, version 1.

Soft hyphens, joiners, zero-width spaces, variation selectors and other format characters; tatweel; the marks of Arabic,
but for maddah and hamza, which make other letters; the points of Hebrew.
"""
# ASCII first, which is most of most texts: sets are searched in order.
_LETTERS = rf"A-Za-z0-9[[\p{{L}}\p{{M}}\p{{N}}]--{UNSPACED}]"
# Digits are those of ASCII here. Units and particles of Korean stand right behind numbers, codes and names.
_NO_WORD = rf"{UNSPACED}\p{{Hangul}}"
_TERM = regex.compile(
    rf"""
      (?P<number> [0-9]++ (?: [.,:] [0-9]++ )*+ (?! [\p{{L}}--[{_NO_WORD}]] ) )
    | (?P<run> {UNSPACED} [{UNSPACED}\p{{M}}]*+ )
    | (?P<word>
        [A-Za-z0-9[[\p{{L}}\p{{N}}]--[{_NO_WORD}]]] [A-Za-z0-9[[\p{{L}}\p{{M}}\p{{N}}]--[{_NO_WORD}]]]*+
      | \p{{Hangul}} [\p{{Hangul}}\p{{M}}]*+ )
    """,
    regex.VERBOSE | regex.VERSION1,
)
# The same for texts of ASCII alone, in a third of the time. A look ahead in place of a possessive group, with which the
# library goes wrong before Python 3.11.5: of "4417. Then" it took the full stop along.
_ASCII_TERM = re.compile(
    r"(?=(?P<whole>[0-9]+(?:[.,:][0-9]+)*))(?P<number>(?P=whole))(?![A-Za-z])|(?P<word>[A-Za-z0-9]+)"
)
# A mark on a digit, such as a keycap or a line, makes no other number of it.
_DROPPED = regex.compile(rf"(?<=\p{{Nd}}) [\p{{M}}{UNWRITTEN}]++ | [{UNWRITTEN}]++", regex.VERBOSE | regex.VERSION1)
_OTHER_DIGIT = regex.compile(r"[\p{Nd}\u066b\u066c--0-9]", regex.VERSION1)
_SEPARATORS = {"\u066b": ".", "\u066c": ","}
_HUMP = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})")
_TOKEN = regex.compile(
    rf"""
      {UNSPACED} \p{{M}}*+
    | [{_LETTERS}_]++ (?: [-./:@\#\\]++ [{_LETTERS}_]++ )*+
    """,
    regex.VERBOSE | regex.VERSION1,
)
_CONCRETE = regex.compile(r"\p{N} | _ | \p{Ll}\p{Lu} | \p{L}{2}[./:@\#\\]++\p{L}{2}", regex.VERBOSE | regex.VERSION1)


def terms(text: str) -> list[str]:
    """Return the index terms of a text, in order; the same word in another writing is the same term.

    Compatibility forms, case, what is not seen, vowel marks of Arabic and Hebrew, and the script of digits do not
    count, nor do commas within a number and marks on its digits. A word of several parts (``fooBar``) gives itself and
    its parts. Scripts without spaces give every character and every pair; a number or a word beside them, or beside
    Hangul, is one of its own.
    """
    found: list[str] = []
    matches = _ASCII_TERM.finditer(text) if text.isascii() else _TERM.finditer(_normalised(text))
    for match in matches:
        word = match.group()
        if match.lastgroup == "run":
            found += word
            found += (word[at : at + 2] for at in range(len(word) - 1))
        elif match.lastgroup == "number":
            found.append(word.replace(",", ""))
        else:
            if not _is_plain(word):
                parts = _HUMP.split(word)
                if len(parts) > 1:
                    found += (_folded(part) for part in parts)
            found.append(_folded(word))
    return found


def _normalised(text: str) -> str:
    plain, dropped = _DROPPED.subn("", unicodedata.normalize("NFKC", text))
    if dropped:
        # What was dropped may have stood between a letter and its mark.
        plain = unicodedata.normalize("NFC", plain)
    return _OTHER_DIGIT.sub(_ascii_digit, plain)


def _ascii_digit(match: regex.Match[str]) -> str:
    char = match.group()
    return _SEPARATORS.get(char) or str(unicodedata.decimal(char, char))


def _folded(word: str) -> str:
    # Folding takes apart some letters with two marks that a capital with its marks never had in one.
    return word.casefold() if word.isascii() else unicodedata.normalize("NFC", word.casefold())


def concrete_share(text: str) -> float:
    """Return the share of a text's tokens that hold a digit or look like an identifier; 0 without tokens."""
    tokens = _TOKEN.findall(text if text.isascii() else _DROPPED.sub("", text))
    if not tokens:
        return 0.0
    found = (token for token in tokens if not _is_plain(token))
    return sum(_CONCRETE.search(token) is not None for token in found) / len(tokens)


def _is_plain(word: str) -> bool:
    """Whether a word is letters alone, no capital behind a small one. Most are, and a look is quicker than a search."""
    return word.isalpha() and (word.islower() or word.istitle() or word.isupper())
