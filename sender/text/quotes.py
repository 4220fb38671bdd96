"""From a quote to its place in the source: the same characters, however they are written; never merely similar ones.

Writing that does not count is folded away: canonical equivalents (NFC, NFD), amounts and kinds of white space, curly
and angled quotation marks, kinds of dash, characters that are not seen (soft hyphens, zero-width spaces, variation
selectors), ligatures, width and other presentation forms. Case, punctuation and accents count, and so does whatever
would change a number: 10² is not 102. Joiners and the tags of flags stay, because emoji differ by them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import regex

from kvferry.core.words import UNSPACED

Span: TypeAlias = tuple[int, int]
Match: TypeAlias = Literal["exact", "folded", "unresolved"]
Positions: TypeAlias = npt.NDArray[np.intp]

_SINGLE = "\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u02bc"
_DOUBLE = "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u301d\u301e\u301f"
_STRAIGHT = dict.fromkeys(_SINGLE, "'") | dict.fromkeys(_DOUBLE, '"')
_MINUS = "\u2212"
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}--[\u200d\U000e0020-\U000e007f]]", regex.VERSION1)
# Forms that say something of their own: a power, an index, a numbered item, a unit.
_MEANT = ("<super>", "<sub>", "<circle>", "<square>")
_FAR = 2**40
_SPACES = regex.compile(" {2,}")

# Pairs of flag letters are counted from the place where they are met: \X would count them from the first, every time.
_CLUSTER = regex.compile(
    r"""
      (?P<single> [\p{GCB=Other}\p{GCB=LV}\p{GCB=LVT}]+ (?! [\p{GCB=EX}\p{GCB=ZWJ}\p{GCB=SM}\p{GCB=V}\p{GCB=T}] ) )
    | \p{GCB=RI}{2} [\p{GCB=EX}\p{GCB=ZWJ}\p{GCB=SM}]*+
    | \X
    """,
    regex.VERBOSE,
)

# Scripts that put no space between words, or none before a particle.
_UNBOUNDED = rf"{UNSPACED}\p{{Hangul}}\u3099\u309a"
_LETTERS = rf"[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNBOUNDED}]]"
_INSIDE = regex.compile(
    rf"""
      (?<={_LETTERS}) (?={_LETTERS})
    | (?<=\p{{Nd}}[.,:]) (?=\p{{Nd}})
    | (?<=\p{{Nd}}) (?=[.,:]\p{{Nd}})
    | (?<= (?<! [\p{{L}}\p{{M}}\p{{N}}_] ) - ) (?=\p{{Nd}})
    """,
    regex.VERBOSE | regex.VERSION1,
)


@dataclass(frozen=True)
class Resolved:
    """Where a quote stands.

    Attributes:
        spans: every place, ascending and apart from each other; code points of the source, end exclusive.
        chosen: which of them is meant; 0 when there is none.
        match: "exact" when every span is the quote to the letter, but for white space around it; "folded" when every
            span is written in another way; "unresolved" when there is none.
    """

    spans: tuple[Span, ...]
    chosen: int
    match: Match


class Source:
    """A document in which quotes are looked up.

    Preparing takes time in proportion to the text, once, when the first quote is not found to the letter.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: dict[str, tuple[Match, tuple[Span, ...]]] = {}

    def resolve(self, quote: str, entity: str = "") -> Resolved:
        """Find a quote.

        Spans hold whole characters as a reader sees them: "e" does not stand in "é", nor "f" in a ligature. Of places
        that overlap, the earlier one counts. Folded writing is looked at only where nothing stands to the letter.

        Args:
            quote: what is said to stand in the source. White space around it is ignored; if that is all, it is
                unresolved.
            entity: of several places, the one nearest to this is chosen, counted in code points between the ends that
                face each other; the earliest of those as near, or of all when the source does not name the entity.
        """
        match, spans = self._find(quote)
        chosen = _nearest(spans, self._find(entity)[1]) if len(spans) > 1 else 0
        return Resolved(spans, chosen, match)

    def _find(self, quote: str) -> tuple[Match, tuple[Span, ...]]:
        quote = quote.strip()
        if quote not in self._found:
            self._found[quote] = self._search(quote)
        return self._found[quote]

    def _search(self, quote: str) -> tuple[Match, tuple[Span, ...]]:
        wanted = _fold(quote).text.strip()
        if not wanted:
            return "unresolved", ()
        if spans := tuple(_occurrences(self._text, quote, self._exact)):
            return "exact", spans
        if spans := tuple(_occurrences(self._folded.text, wanted, self._unfolded)):
            return "folded", spans
        return "unresolved", ()

    @cached_property
    def _edges(self) -> bytearray:
        return _edges(self._text)

    @cached_property
    def _folded(self) -> _Folded:
        return _fold(self._text)

    def _exact(self, start: int, end: int) -> Span | None:
        return (start, end) if self._edges[start] and self._edges[end] else None

    def _unfolded(self, start: int, end: int) -> Span | None:
        """Return the source of folded[start:end], or None where its ends lie within a character of the source."""
        folded, at = self._folded
        # Marks are sorted, across unseen characters too: only in front of other characters do both texts agree.
        if unicodedata.combining(folded[start]) or (end < len(folded) and unicodedata.combining(folded[end])):
            return None
        first = self._edges.rfind(1, 0, int(at[start]) + 1)
        last = self._edges.find(1, int(at[end - 1]) + 1)
        if (start and at[start - 1] >= first) or at[end] < last:
            return None
        return first, last


def supports(quote: str, value: str) -> bool:
    """Whether a value stands in its quote: folded as quotes are, and whatever the case and the script of digits.

    It has to stand there as words of its own, where the script has spaces between them, and as a whole number: "5" is
    not in "15", "5,000", "1.5" or "-5", nor "crate" in "crates". Numbers are not converted: "4500" is not in "4,500".
    A blank value stands nowhere.
    """
    text, wanted = _caseless(quote), _caseless(value)
    edges = _edges(text)
    at = text.find(wanted) if wanted else -1
    while at >= 0:
        if all(edges[end] and not _INSIDE.match(text, end) for end in (at, at + len(wanted))):
            return True
        at = text.find(wanted, at + 1)
    return False


class _Folded(NamedTuple):
    """A text in its folded writing; ``at`` has where each character comes from, and the length of the text."""

    text: str
    at: Positions


def _fold(text: str) -> _Folded:
    codes = _codes(text)
    distinct, which = np.unique(codes, return_inverse=True)
    table = {code: _fold_character(code) for code in distinct.tolist()}
    widths = np.array([len(folded) for folded in table.values()], dtype=np.intp)
    at = np.repeat(np.arange(len(codes), dtype=np.intp), widths[which])
    # All is decomposed, so this only sorts marks: nothing in front of a starter moves past it.
    folded = unicodedata.normalize("NFD", text.translate(table))
    blank = _codes(folded) == ord(" ")
    kept = np.ones(len(folded), dtype=bool)
    kept[:-1] = ~(blank[:-1] & blank[1:])
    return _Folded(_SPACES.sub(" ", folded), np.append(at[kept], len(text)))


def _edges(text: str) -> bytearray:
    """Return 1 for every place between characters as a reader sees them, its ends among them, else 0."""
    edges = bytearray(b"\x01") * (len(text) + 1)
    if text.isascii() and "\r\n" not in text:
        return edges
    for match in _CLUSTER.finditer(text):
        if match.lastgroup is None:
            start, end = match.span()
            edges[start + 1 : end] = bytes(end - start - 1)
    return edges


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _fold_character(code: int) -> str:
    if ord(" ") <= code <= ord("~"):
        return chr(code)
    canonical = unicodedata.normalize("NFD", chr(code))
    return unicodedata.normalize("NFD", "".join(map(_unshaped, canonical)))


def _unshaped(char: str) -> str:
    plain = _plain(char)
    shape = unicodedata.decomposition(char)
    if plain != char or not shape.startswith("<") or shape.startswith(_MEANT):
        return plain
    expanded = unicodedata.normalize("NFKD", char)
    # A fraction or an item number would join digits before it, and a spacing accent is no space.
    if " " in expanded or (len(expanded) > 1 and any(map(str.isdigit, expanded))):
        return char
    return "".join(map(_plain, expanded))


def _plain(char: str) -> str:
    if char.isspace():
        return " "
    if _UNSEEN.match(char):
        return ""
    if char == _MINUS or unicodedata.category(char) == "Pd":
        return "-"
    return _STRAIGHT.get(char, char)


def _caseless(text: str) -> str:
    folded = unicodedata.normalize("NFD", _fold(text).text.casefold()).strip()
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in folded)


def _occurrences(text: str, wanted: str, place: Callable[[int, int], Span | None]) -> Iterator[Span]:
    at = text.find(wanted)
    while at >= 0:
        span = place(at, at + len(wanted))
        if span is not None:
            yield span
        at = text.find(wanted, at + (len(wanted) if span is not None else 1))


def _nearest(spans: tuple[Span, ...], places: tuple[Span, ...]) -> int:
    """Return the first of the spans that are nearest to a place. Both are ascending and apart."""
    if not places:
        return 0
    starts, ends = np.array(spans).T
    firsts, lasts = np.array(places).T
    following = np.searchsorted(firsts, starts)
    ahead = np.append(firsts, _FAR)[following] - ends
    behind = starts - np.insert(lasts, 0, -_FAR)[following]
    return int(np.argmin(np.maximum(0, np.minimum(ahead, behind))))
