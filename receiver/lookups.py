"""Which passages of a document a question needs, and what the passages that came make to read.

Rules and figures are those of docs/wire.md. Places are half-open ranges of the document's code points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvferry.core import bm25
from kvferry.core.evidence import Reference
from kvferry.core.spans import Span
from kvferry.core.words import terms
from kvferry.receiver import edges

MAX_LOOKUPS = 6
"""Most references that one question follows."""
BEFORE = 40
AFTER = 160
"""How far a window reaches around a reference, in code points."""
MAX_WINDOW = 500
"""Longest window, in code points: one always fits the budget, whatever its characters."""
MAX_BYTES = 2000
"""Most UTF-8 that one question fetches."""
BETWEEN = "\n"
"""Stands between passages that do not touch in the document."""


class Place(NamedTuple):
    """A range of a document."""

    start: int
    end: int


@dataclass(frozen=True)
class Wanted:
    """What a question asks of a document.

    Attributes:
        references: those that are followed, the best first.
        reach: for each of them its whole window.
    """

    references: tuple[Reference, ...]
    reach: tuple[Place, ...]

    @cached_property
    def windows(self) -> tuple[tuple[Place, ...], ...]:
        """For each reference what is fetched for its sake: nothing where better ones cover it all."""
        return tuple(tuple(_uncovered(window, self.reach[:at])) for at, window in enumerate(self.reach))

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is fetched, in this order."""
        return tuple(place for window in self.windows for place in window)

    def found(self, passages: int) -> int:
        """Return of how many references the whole window is there once the first ``passages`` places have come."""
        came = self.places[:passages]
        return sum(not _uncovered(window, came) for window in self.reach)


@dataclass(frozen=True)
class Excerpts:
    """Passages put together, and where they stand in the document; the rest is marks between them."""

    text: str
    spans: tuple[Span, ...]


def choose(references: Sequence[Reference], question: str, document: int) -> Wanted:
    """Decide what to fetch for a question.

    Args:
        references: of the artifact.
        question: as it was asked.
        document: code points of the document.
    """
    chosen = tuple(_best(references, question))
    return Wanted(chosen, tuple(_window(reference, document) for reference in chosen))


def put_together(wanted: Wanted, texts: Iterable[str], document: int) -> Excerpts:
    """Return what came, in the order of the document, less words and numbers that a window may have cut.

    Args:
        wanted: what was asked for.
        texts: of the first of its places.
        document: code points of the document.
    """
    parts: list[str] = []
    spans: list[Span] = []
    at = 0
    for place, text in _joined(wanted.places, texts):
        inner = _whole(place, text, wanted.references, document)
        if inner.start == inner.end:
            continue
        if spans:
            parts.append(BETWEEN)
            at += len(BETWEEN)
        spans.append(Span(at, *inner))
        parts.append(text[inner.start - place.start : inner.end - place.start])
        at += inner.end - inner.start
    return Excerpts("".join(parts), tuple(spans))


def _joined(places: Iterable[Place], texts: Iterable[str]) -> list[tuple[Place, str]]:
    """Return what came in the order of the document; what touches is one."""
    found: list[tuple[Place, str]] = []
    for place, text in sorted(zip(places, texts, strict=False)):
        if found and found[-1][0].end == place.start:
            before, passage = found.pop()
            found.append((Place(before.start, place.end), passage + text))
        else:
            found.append((place, text))
    return found


def _whole(place: Place, text: str, references: Iterable[Reference], document: int) -> Place:
    """Return a passage without what its ends may have cut, but with all of the references that it holds whole."""
    held = [item for item in references if place.start <= item.start and item.end <= place.end]
    start, end = place
    if place.end < document:
        end = max(place.start + edges.last_whole(text), *(item.end for item in held), place.start)
    if place.start > 0:
        start = min(place.start + edges.first_whole(text), *(item.start for item in held), place.end)
    # A word that fills the passage may be cut at either end.
    return Place(min(start, end), end)


def _best(references: Sequence[Reference], question: str) -> Iterator[Reference]:
    """Yield the references that share a term with the question, each place once."""
    scores = bm25.scores(terms(question), [terms(f"{item.entity} {item.attribute}") for item in references])
    seen: set[Place] = set()
    for index in bm25.ranked(scores):
        place = Place(references[index].start, references[index].end)
        if scores[index] <= 0 or len(seen) == MAX_LOOKUPS:
            return
        if place not in seen:
            seen.add(place)
            yield references[index]


def _window(reference: Reference, document: int) -> Place:
    start = max(reference.start - BEFORE, 0)
    return Place(start, min(reference.end + AFTER, document, start + MAX_WINDOW))


def _uncovered(window: Place, covered: Iterable[Place]) -> list[Place]:
    left = [window]
    for taken in covered:
        parts = (
            part
            for piece in left
            for part in (Place(piece.start, min(piece.end, taken.start)), Place(max(piece.start, taken.end), piece.end))
        )
        left = [part for part in parts if part.start < part.end]
    return left
