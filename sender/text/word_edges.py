r"""Where a text may begin or end so that no word and no number is broken.

A word is letters, marks, digits and ``_``; scripts that put no space between words, or none before a particle, have no
such edge to respect. A number goes on

- across one full stop, comma, colon, apostrophe, slash, or Arabic decimal or thousands separator between digits:
  4,500 and 5'000 and 1/2 and 7:40;
- across one space, as wide as any but neither tab nor line break, between one to three digits and exactly three: 5 000.
  What ends a date (2024-05-03) or a time with seconds (12:30:45) begins no such number;
- behind a sign: -5, where no letter or digit stands before it. So dates and ranges with a dash are several numbers.

All functions take a text as written or in its folded writing.
"""

from __future__ import annotations

import regex

from kvferry.core import graphemes
from kvferry.core.words import GROUP_SPACES, UNSPACED

_DASH = r"[\p{Pd}\u2212]"
_POINTS = r".\uff0e\u066b,\uff0c\u066c:\uff1a"
_APOSTROPHES = r"'\uff07\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u02bc"
_MARK = rf"[{_POINTS}{_APOSTROPHES}/\uff0f\u2044\u2215]"
_GAP = rf"[{GROUP_SPACES}]"
_GROUP = r"\p{Nd}{3}(?!\p{Nd})"
_FIRST_GROUP = rf"(?<! \p{{Nd}} | {_DASH}\p{{Nd}}{{2}}{_DASH} | :\p{{Nd}}{{2}}: ) \p{{Nd}}{{1,3}}"

INSIDE_NUMBER = rf"""
    (?<=\p{{Nd}}) (?={_MARK}\p{{Nd}})
  | (?<=\p{{Nd}}{_MARK}) (?=\p{{Nd}})
  | (?<={_FIRST_GROUP}) (?={_GAP}{_GROUP})
  | (?<={_FIRST_GROUP}{_GAP}) (?={_GROUP})
  | (?<= (?<! [\p{{L}}\p{{M}}\p{{N}}_] ) {_DASH} ) (?=\p{{Nd}})
"""
"""A verbose pattern of ``regex`` for a place within a number, but between two of its digits."""

_UNBOUNDED = rf"{UNSPACED}\p{{Hangul}}\u3099\u309a"
_LETTERS = rf"[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNBOUNDED}]]"
_INSIDE = regex.compile(rf"(?<={_LETTERS}) (?={_LETTERS}) | {INSIDE_NUMBER}", regex.VERBOSE | regex.VERSION1)
_WORD = regex.compile(rf"{_LETTERS}{{2,}}+", regex.VERSION1)
_NUMBER = regex.compile(INSIDE_NUMBER, regex.VERBOSE | regex.VERSION1)


def is_inside(text: str, at: int) -> bool:
    """Whether a place lies within a word or a number."""
    return _INSIDE.match(text, at) is not None


def floor(text: str, at: int, since: int) -> int:
    """Return the last place at or before ``at`` between characters, words and numbers; ``since`` if there is none."""
    at = graphemes.floor(text, at, since)
    if at > since and is_inside(text, at):
        edges = graphemes.edges(text[since:at])
        while at > since and is_inside(text, at):
            at = since + edges.rfind(1, 0, at - since)
    return at


def ceil(text: str, at: int, until: int) -> int:
    """Return the first place from ``at`` on between characters, words and numbers; ``until`` if there is none.

    Both are between characters.
    """
    if at < until and is_inside(text, at):
        edges, start = graphemes.edges(text[at:until]), at
        while at < until and is_inside(text, at):
            at = start + edges.find(1, at - start + 1)
    return at


def whole(text: str) -> bytearray:
    """Return 1 for every place of a text, both ends among them, that lies within no word and no number, else 0."""
    places = bytearray(b"\x01") * (len(text) + 1)
    for word in _WORD.finditer(text):
        start, end = word.span()
        places[start + 1 : end] = bytes(end - start - 1)
    for match in _NUMBER.finditer(text):
        places[match.start()] = 0
    return places
