"""Words of any language, for ranking passages: an index term a word, and one or two a character without spaces."""

from __future__ import annotations

import re
import unicodedata

import regex

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Yi}々〆ー"
"""Characters of scripts that put no space between words, for a set in a pattern of ``regex``."""
GROUP_SPACES = " \u00a0\u2007\u2009\u202f"
"""White space that may stand between the groups of a number."""
# ASCII first, which is most of most texts: sets are searched in order.
_LETTERS = rf"A-Za-z0-9[[\p{{L}}\p{{M}}\p{{N}}]--[{UNSPACED}]]"
_TERM = regex.compile(
    rf"""
      (?P<number> \p{{Nd}}++ (?: [.,:] \p{{Nd}}++ )*+ (?! [\p{{L}}\p{{M}}] ) )
    | (?P<run> [{UNSPACED}] [{UNSPACED}\p{{M}}]*+ )
    | (?P<word> [{_LETTERS}]++ )
    """,
    regex.VERBOSE | regex.VERSION1,
)
# The same for texts of ASCII alone, in a third of the time. A look ahead in place of a possessive group, with which the
# library goes wrong before Python 3.11.5: of "4417. Then" it took the full stop along.
_ASCII_TERM = re.compile(
    r"(?=(?P<whole>[0-9]+(?:[.,:][0-9]+)*))(?P<number>(?P=whole))(?![A-Za-z])|(?P<word>[A-Za-z0-9]+)"
)
_HUMP = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})")
_TOKEN = regex.compile(
    rf"[{UNSPACED}]\p{{M}}*+ | [{_LETTERS}_]++ (?: [-./:@\#\\]++ [{_LETTERS}_]++ )*+", regex.VERBOSE | regex.VERSION1
)
_CONCRETE = regex.compile(r"\p{N} | _ | \p{Ll}\p{Lu} | \p{L}{2}[./:@\#\\]++\p{L}{2}", regex.VERBOSE | regex.VERSION1)


def terms(text: str) -> list[str]:
    """Return the index terms of a text, in order; the same word in another writing is the same term.

    Compatibility forms, case and the script of digits do not count, nor do commas within a number. A word of several
    parts (``fooBar``) gives itself and its parts. Scripts without spaces give every character and every pair.
    """
    found: list[str] = []
    matches = _ASCII_TERM.finditer(text) if text.isascii() else _TERM.finditer(unicodedata.normalize("NFKC", text))
    for match in matches:
        word = match.group()
        if match.lastgroup == "run":
            found += word
            found += (word[at : at + 2] for at in range(len(word) - 1))
        elif match.lastgroup == "number":
            found.append(_digits(word).replace(",", ""))
        else:
            if not _is_plain(word):
                parts = _HUMP.split(word)
                if len(parts) > 1:
                    found += (_folded(part) for part in parts)
            found.append(_folded(word))
    return found


def _folded(word: str) -> str:
    # Folding takes apart some letters with two marks that a capital with its marks never had in one.
    return word.casefold() if word.isascii() else unicodedata.normalize("NFC", word.casefold())


def concrete_share(text: str) -> float:
    """Return the share of a text's tokens that hold a digit or look like an identifier; 0 without tokens."""
    tokens = _TOKEN.findall(text)
    if not tokens:
        return 0.0
    found = (token for token in tokens if not _is_plain(token))
    return sum(_CONCRETE.search(token) is not None for token in found) / len(tokens)


def _is_plain(word: str) -> bool:
    """Whether a word is letters alone, no capital behind a small one. Most are, and a look is quicker than a search."""
    return word.isalpha() and (word.islower() or word.istitle() or word.isupper())


def _digits(number: str) -> str:
    if number.isascii():
        return number
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in number)
