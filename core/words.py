"""Words of any language, for ranking passages: an index term a word, and one or two a character without spaces."""

from __future__ import annotations

import unicodedata

import regex

# Scripts that put no space between words.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Yi}々〆ー"
# ASCII first, which is most of most texts: sets are searched in order.
_LETTERS = rf"A-Za-z0-9[[\p{{L}}\p{{M}}\p{{N}}]--[{_UNSPACED}]]"
_TERM = regex.compile(
    rf"""
      (?P<number> \p{{Nd}}++ (?: [.,:] \p{{Nd}}++ )*+ (?! [\p{{L}}\p{{M}}] ) )
    | (?P<run> [{_UNSPACED}] [{_UNSPACED}\p{{M}}]*+ )
    | (?P<word> [{_LETTERS}]++ )
    """,
    regex.VERBOSE | regex.VERSION1,
)
_HUMP = regex.compile(r"(?<=\p{Ll})(?=\p{Lu})")
_TOKEN = regex.compile(
    rf"[{_UNSPACED}]\p{{M}}*+ | [{_LETTERS}_]++ (?: [-./:@\#\\]++ [{_LETTERS}_]++ )*+", regex.VERBOSE | regex.VERSION1
)
_CONCRETE = regex.compile(r"\p{N} | _ | \p{Ll}\p{Lu} | \p{L}{2}[./:@\#\\]++\p{L}{2}", regex.VERBOSE | regex.VERSION1)


def terms(text: str) -> list[str]:
    """Return the index terms of a text, in order; the same word in another writing is the same term.

    Compatibility forms, case and the script of digits do not count, nor do commas within a number. A word of several
    parts (``fooBar``) gives itself and its parts. Scripts without spaces give every character and every pair.
    """
    found: list[str] = []
    for match in _TERM.finditer(unicodedata.normalize("NFKC", text)):
        word = match.group()
        if match.lastgroup == "run":
            found += word
            found += (word[at : at + 2] for at in range(len(word) - 1))
        elif match.lastgroup == "number":
            found.append(_digits(word).replace(",", ""))
        else:
            parts = _HUMP.split(word)
            if len(parts) > 1:
                found += (part.casefold() for part in parts)
            found.append(word.casefold())
    return found


def concrete_share(text: str) -> float:
    """Return the share of a text's tokens that hold a digit or look like an identifier; 0 without tokens."""
    tokens = _TOKEN.findall(text)
    return sum(_CONCRETE.search(token) is not None for token in tokens) / len(tokens) if tokens else 0.0


def _digits(number: str) -> str:
    if number.isascii():
        return number
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in number)
