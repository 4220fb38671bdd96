"""Where the whole words, numbers and characters of a passage begin and end, when it may have been cut anywhere.

What stands on the other side of a cut is not known: "EUR 45" may have been "EUR 45,000", and a person part of a family.
docs/wire.md states the rule.
"""

from __future__ import annotations

import regex

from kvferry.core import graphemes
from kvferry.core.words import GROUP_SPACES, UNSPACED

# Scripts without spaces show no words, but their numerals count as digits.
_DIGIT = r"[\p{N}\p{Numeric_Type=Numeric}]"
_LETTER = rf"[[[\p{{L}}\p{{M}}\p{{N}}_]--[{UNSPACED}]]||{_DIGIT}]"
_JOINER = r"[.,:;/#@&+\\'\u2019\u066b\u066c\u00b7\u2212\p{Pd}]"
_GAP = rf"[{GROUP_SPACES}]"
_FLAGS = regex.VERBOSE | regex.VERSION1

_RUN = regex.compile(rf"{_LETTER}++ (?: {_JOINER}++ {_LETTER}++ )*+", _FLAGS)
_NUMBER = regex.compile(_DIGIT, _FLAGS)
_WHITE = regex.compile(r"\s++", _FLAGS)
# What may stand within a number, or between a number and its unit.
_OPEN = regex.compile(rf"{_JOINER}++ | \s++", _FLAGS)
# Thousands that are set apart.
_LEADING, _GROUP, _BETWEEN = (regex.compile(text, _FLAGS) for text in (r"\p{Nd}{1,3}", r"\p{Nd}{3}", _GAP))
_START = regex.compile(
    rf"""
    (?: {_JOINER}*+ {_RUN.pattern} )?+
    (?: (?<= \A | {_DIGIT} ) (?: {_GAP} {_GROUP.pattern} (?! {_LETTER} ) )++ (?: {_JOINER}++ {_LETTER}++ )*+ )?+
    """,
    _FLAGS,
)
# Characters as a reader sees them (UAX #29) that may have begun on the other side: flags, which are pairs, marks, and
# what a joiner may have tied to something.
_CONTINUES = regex.compile(
    r"""
    \A \p{RI}++
    | [\p{GCB=EX}\p{GCB=SM}\p{GCB=ZWJ}\p{GCB=V}\p{GCB=T}]*+
      (?: (?<= \A | \u200d ) (?= \p{Extended_Pictographic} ) \X )?+
    """,
    _FLAGS,
)
# What does not go on. A mark may follow punctuation too, and in text does not; after = it makes another sign of it.
_CLOSED = regex.compile(r"[[\p{P}\p{Z}\p{Sc}\p{Cc}]--[\p{Extended_Pictographic}\#*]]", _FLAGS)


def first_whole(text: str) -> int:
    """Return how much of a passage's beginning may be the rest of a word, a number or a character."""
    words = _START.match(text)
    character = _CONTINUES.match(text, words.end() if words else 0)
    return graphemes.ceil(text, character.end()) if character else 0


def last_whole(text: str) -> int:
    """Return where a passage must end: before a word, a number or a character that may go on, or lacks its unit."""
    end = _last_words(text)
    if end == len(text) > 0:
        last = graphemes.floor(text, end - 1)
        if not _CLOSED.match(text, last):
            end = _last_words(text[:last])
    return graphemes.floor(text, end)


def _last_words(text: str) -> int:
    runs = [found.span() for found in _RUN.finditer(text)]
    if not runs or not _may_go_on(text, *runs[-1]):
        return len(text)
    start, _ = runs[-1]
    # A number's unit goes with the number.
    if not text[start].isdecimal() and len(runs) > 1:
        before, end = runs[-2]
        if _NUMBER.search(text, before, end) and _WHITE.fullmatch(text, end, start):
            runs.pop()
    return _number_start(text, runs)


def _may_go_on(text: str, start: int, end: int) -> bool:
    return end == len(text) or bool(_NUMBER.search(text, start, end) and _OPEN.fullmatch(text, end))


def _number_start(text: str, runs: list[tuple[int, int]]) -> int:
    """Return where the last run begins, with the groups of digits before it that are of the same number."""
    start, _ = runs.pop()
    group = text[start].isdecimal()
    while runs and group and _LEADING.fullmatch(text, *runs[-1]) and _BETWEEN.fullmatch(text, runs[-1][1], start):
        start, end = runs.pop()
        group = _GROUP.fullmatch(text, start, end) is not None
    return start
