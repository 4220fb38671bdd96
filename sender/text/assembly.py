"""Passages of a document put together to a shorter text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import regex

from kvferry.core.spans import Span

_FALLS_APART = regex.compile(r"[\s\p{SB=STerm}\p{SB=Close}]")


class Piece(NamedTuple):
    """A half-open range of a document's code points."""

    start: int
    end: int


@dataclass(frozen=True)
class Assembled:
    """A text, and where its passages stand in the document; the rest is marks between them."""

    text: str
    spans: tuple[Span, ...]


def assemble(document: str, pieces: Iterable[Piece], mark: Callable[[str], str]) -> Assembled:
    """Put pieces together in the order of the document.

    Args:
        document: the whole text.
        pieces: ranges that do not overlap; those that touch become one passage.
        mark: what is put between two passages, given the first.
    """
    passages: list[Piece] = []
    for piece in sorted(pieces):
        if passages and passages[-1].end == piece.start:
            passages[-1] = Piece(passages[-1].start, piece.end)
        elif piece.end > piece.start:
            passages.append(piece)
    parts: list[str] = []
    spans: list[Span] = []
    at = 0
    for start, end in passages:
        if parts:
            parts.append(mark(parts[-1]))
            at += len(parts[-1])
        spans.append(Span(at, start, end))
        parts.append(document[start:end])
        at += end - start
    return Assembled("".join(parts), tuple(spans))


def line_break(passage: str) -> str:
    """Return a line break behind a passage whose last word would run into the next passage, and nothing elsewhere."""
    return "" if _FALLS_APART.match(passage[-1]) else "\n"
