"""What a fact may quote: the passages of a document, and which of them are worth quoting first."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from kvferry.core import bm25
from kvferry.core.progress import Progress
from kvferry.sender.text import word_edges
from kvferry.sender.text.assembly import Piece
from kvferry.sender.text.evidence_grammars import MAX_QUOTE
from kvferry.sender.text.extractive import aware_scores, blind_scores, read_pieces
from kvferry.sender.text.sentences import pieces


def passages(text: str) -> Iterator[Piece]:
    """Yield the document's sentences, rows and lines, long ones in parts of ``MAX_QUOTE`` code points at most.

    Parts are cut as A3 cuts pieces. White space around them is left out, and so is a part of a word or a number that
    is longer than a part: half of one is not the document's.
    """
    for piece in pieces(text, MAX_QUOTE):
        start, end = piece
        start = word_edges.ceil(text, start, end)
        end = word_edges.floor(text, end, start)
        found = text[start:end]
        if found.strip():
            yield Piece(start + len(found) - len(found.lstrip()), start + len(found.rstrip()))


def left_out(text: str) -> int:
    """Return how many code points of a document no passage holds, white space aside."""
    found = list(passages(text))
    ends, starts = [0, *(end for _, end in found)], [*(start for start, _ in found), len(text)]
    return sum(len("".join(text[end:start].split())) for end, start in zip(ends, starts, strict=True))


def ranked_passages(text: str, question: str | None) -> Generator[Progress, None, list[Piece]]:
    """Return the passages, the best first: as A3 ranks sentences, and for a question that none fits as without one."""
    found, words = yield from read_pieces(text, passages(text))
    if question is not None:
        fitting = aware_scores(question, words)
        if fitting.any():
            return [found[at] for at in bm25.ranked(fitting) if fitting[at] > 0]
    return [found[at] for at in bm25.ranked(blind_scores([text[slice(*passage)] for passage in found], words))]
