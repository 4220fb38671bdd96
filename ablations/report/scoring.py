"""How well a short answer fits: exact match, token F1 and containment, for text in any script.

The measures are those of SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250, and its evaluation script): both texts are
normalised, and the best of the accepted answers counts. Changed, because its rules know English in ASCII only:

- Text is brought to NFKC and case-folded. Digits of every script become ASCII, keycap digits plain ones. Arabic is read
  without vowel marks and tatweel, Hebrew without points, everything without characters that are not seen.
- Punctuation separates tokens instead of joining what stands beside it, and so do letters and digits: "w3/w4" holds
  "w3", and 40kg is 40 kg. A number keeps its decimal point, its colon and its sign: 14.20 is not 1420, and -24 is not
  24. Commas that group digits do not count.
- A script without spaces gives one token a character; an emoji is a token. A number that such a script spells out is
  whole: 十四番 does not hold 四番.
- For F1 a code is one token, as SQuAD has it: PX-815 has nothing of PX-411. English ordinals are numbers: 31st is 31.
- English articles are dropped only before a word, and "A" only where a sentence begins: the letter of "berth A" stays.
- "Contains" is new: the tokens of the answer stand in the prediction, one after the other. Small models answer in whole
  sentences, which exact match punishes whatever they say. What else a prediction says does not count: one that names
  every candidate, or denies the right one, holds the answer too.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from kvferry.core.words import UNSPACED, UNWRITTEN

_DROPPED = regex.compile(rf"[{UNWRITTEN}\u20E3]", regex.VERSION1)
_GROUPING_COMMA = regex.compile(r"(?<=\p{Nd})[,\u066C](?=\p{Nd}{3}(?!\p{Nd}))")
_ORDINAL = regex.compile(r"(?<=\b\p{Nd}+)(?:st|nd|rd|th)\b")
_ARTICLE = regex.compile(r"(?:(?<![\p{L}\p{N}\p{M}_-])(?:[Tt]he|[Aa]n|a)|(?:^|[.!?])\W*A)\s+(?=\S)")
_TOKEN = regex.compile(
    rf"""
      (?: (?<! [[\p{{L}}\p{{N}}]--[{UNSPACED}]] ) - )? \p{{Nd}}++ (?: [.:\u066B] \p{{Nd}}++ )*+
    | [{UNSPACED}] \p{{M}}*+
    | [[\p{{L}}\p{{M}}\p{{N}}]--[\p{{Nd}}{UNSPACED}]]++
    | \p{{RI}}{{2}}
    | (?! [\#*] ) \p{{Extended_Pictographic}}
    """,
    regex.VERBOSE | regex.VERSION1,
)

# Letters and digits with hyphens between; a number with a unit is none.
_SPACED = rf"[[\p{{L}}\p{{Nd}}]--[{UNSPACED}]]"
_CODE = regex.compile(
    rf"""
    (?<! {_SPACED} )
    (?! \p{{Nd}}++ \p{{L}}++ (?! -?{_SPACED} ) )
    (?= [\p{{L}}-]*+ \p{{Nd}} ) (?= [\p{{Nd}}-]*+ \p{{L}} )
    {_SPACED}++ (?: - {_SPACED}++ )*+
    """,
    regex.VERBOSE | regex.VERSION1,
)
_NUMERAL = frozenset("〇零一二三四五六七八九十百千万萬億亿兆两兩")


@dataclass(frozen=True)
class Score:
    """What an answer is worth.

    Attributes:
        exact: it is an accepted answer, normalised.
        contains: an accepted answer stands in it.
        f1: of its tokens, 0 to 1.
    """

    exact: bool
    contains: bool
    f1: float


def score(prediction: str, answers: Sequence[str]) -> Score:
    """Judge a prediction; each measure takes the accepted answer that suits it best."""
    given, accepted = tokens(prediction), [tokens(answer) for answer in answers]
    whole = _tokens(prediction, whole_codes=True)
    return Score(
        exact=given in accepted,
        contains=any(_holds(given, answer) for answer in accepted),
        f1=max((_f1(whole, _tokens(answer, whole_codes=True)) for answer in answers), default=0.0),
    )


def contains(text: str, answer: str) -> bool:
    """Return whether an answer stands in a text; one without a token stands in none."""
    return _holds(tokens(text), tokens(answer))


def tokens(text: str) -> list[str]:
    """Return the normalised tokens of a text, in order."""
    return _tokens(text, whole_codes=False)


def _tokens(text: str, *, whole_codes: bool) -> list[str]:
    plain = _DROPPED.sub("", unicodedata.normalize("NFKC", text).replace("\u2212", "-"))
    # What was dropped may have stood between a letter and its mark.
    plain = unicodedata.normalize("NFC", plain)
    plain = _ARTICLE.sub(" ", _ORDINAL.sub("", _GROUPING_COMMA.sub("", plain)))
    found: list[str] = []
    at = 0
    for code in _CODE.finditer(plain) if whole_codes else ():
        found += _TOKEN.findall(plain, at, code.start())
        found.append(code.group().replace("-", ""))
        at = code.end()
    found += _TOKEN.findall(plain, at)
    return [_plain_digits(token.casefold()) for token in found]


def _holds(given: Sequence[str], answer: Sequence[str]) -> bool:
    length = len(answer)
    return length > 0 and any(
        given[at : at + length] == answer and not _cuts_numeral(given, at) and not _cuts_numeral(given, at + length)
        for at in range(len(given) - length + 1)
    )


def _cuts_numeral(given: Sequence[str], at: int) -> bool:
    """Return whether a place between two tokens lies within a number of single characters."""
    return 0 < at < len(given) and {given[at - 1], given[at]} <= _NUMERAL


def _f1(given: Sequence[str], answer: Sequence[str]) -> float:
    common = (Counter(given) & Counter(answer)).total()
    # Twice what is common over all there is: the harmonic mean of precision and recall.
    return 2 * common / (len(given) + len(answer)) if common else 0.0


def _plain_digits(token: str) -> str:
    if token.isascii():
        return token
    return "".join(str(unicodedata.decimal(char, char)) for char in token).replace("\u066b", ".")
