"""From a quote to its place in the source: the same characters, however they are written; never merely similar ones.

Writing that does not count is folded away (``folding``). What begins or ends within a word or a number of the source
(``word_edges``) does not stand in it: a fee of 50 is no fee of 5.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from kvferry.core import graphemes
from kvferry.sender.text.folding import WIDE, Folded, fold
from kvferry.sender.text.word_edges import is_inside, whole

Span: TypeAlias = tuple[int, int]
Match: TypeAlias = Literal["exact", "folded", "unresolved"]

_FAR = 2**40


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

    Preparing takes time in proportion to the text, once, when the first quote is looked up.

    Attributes:
        text: the document.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str, tuple[Match, tuple[Span, ...]]] = {}

    def resolve(self, quote: str, entity: str = "") -> Resolved:
        """Find a quote.

        Spans hold whole characters as a reader sees them, and whole words and numbers: "e" does not stand in "é", nor
        "f" in a ligature, "Term" in "Termination" or "12" in "2012". Of places that overlap, the earlier one counts.
        Folded writing is looked at only where nothing stands to the letter.

        Args:
            quote: what is said to stand in the source. White space around it is ignored; if that is all, it is
                unresolved.
            entity: of several places, the one nearest to this is chosen, counted in code points between the ends that
                face each other; the earliest of those as near, or of all when the source does not name the entity.
        """
        match, spans = self._find(quote)
        chosen = _nearest(spans, self._find(entity)[1]) if len(spans) > 1 else 0
        return Resolved(spans, chosen, match)

    def at(self, place: Span) -> Resolved:
        """Return everywhere that the words of a place stand, to the letter, and that place as the chosen one."""
        match, found = self._find(self.text[slice(*place)])
        others = [span for span in found if span[1] <= place[0] or place[1] <= span[0]] if match == "exact" else []
        spans = tuple(sorted([*others, place]))
        return Resolved(spans, spans.index(place), "exact")

    def _find(self, quote: str) -> tuple[Match, tuple[Span, ...]]:
        quote = quote.strip()
        if quote not in self._found:
            self._found[quote] = self._search(quote)
        return self._found[quote]

    def _search(self, quote: str) -> tuple[Match, tuple[Span, ...]]:
        wanted = fold(quote).text.strip()
        if not wanted:
            return "unresolved", ()
        if spans := tuple(_occurrences(self.text, quote, self._bounds, self._exact)):
            return "exact", spans
        if spans := tuple(_occurrences(self._folded.text, wanted, self._whole, self._unfolded)):
            return "folded", spans
        return "unresolved", ()

    @cached_property
    def _edges(self) -> bytearray:
        return graphemes.edges(self.text)

    @cached_property
    def _folded(self) -> Folded:
        return fold(self.text)

    @cached_property
    def _whole(self) -> bytearray:
        """Places of the folded text that break no word."""
        return whole(self._folded.marked)

    @cached_property
    def _bounds(self) -> bytearray:
        """Places of the text where a quote may begin or end; what is not seen is no edge of a word."""
        places = np.searchsorted(self._folded.at, np.arange(len(self.text) + 1))
        return bytearray(np.frombuffer(self._edges, np.uint8) & np.frombuffer(self._whole, np.uint8)[places])

    def _exact(self, start: int, end: int) -> Span | None:
        return (start, end) if self._bounds[start] and self._bounds[end] else None

    def _unfolded(self, start: int, end: int) -> Span | None:
        """Return the source of folded[start:end], or None where its ends lie within a character or a word of it."""
        folded, at = self._folded.text, self._folded.at
        if not (self._whole[start] and self._whole[end]):
            return None
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

    It has to stand there as words of its own, where the script has spaces between them, and as a whole number, by the
    rule of ``word_edges``: "5" is not in "15", "5,000", "5'000", "5 000", "1.5", "1/2" or "-5", nor "crate" in
    "crates"; but it is in "3-5", and "2024" in "2024-05-03". Numbers are not converted: "4500" is not in "4,500". A
    blank value stands nowhere.
    """
    marked, wanted = _caseless(quote), _caseless(value).replace(WIDE, " ")
    text = marked.replace(WIDE, " ")
    edges = graphemes.edges(text)
    at = text.find(wanted) if wanted else -1
    while at >= 0:
        if all(edges[end] and not is_inside(marked, end) for end in (at, at + len(wanted))):
            return True
        at = text.find(wanted, at + 1)
    return False


def _caseless(text: str) -> str:
    folded = unicodedata.normalize("NFD", fold(text).marked.casefold()).strip()
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in folded)


def _occurrences(text: str, wanted: str, bounds: bytearray, place: Callable[[int, int], Span | None]) -> Iterator[Span]:
    """Yield the places of what is wanted; ``bounds`` is 1 where one may begin."""
    at = text.find(wanted)
    while at >= 0:
        span = place(at, at + len(wanted))
        if span is not None:
            yield span
        at = text.find(wanted, at + len(wanted) if span is not None else bounds.find(1, at + 1))


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
