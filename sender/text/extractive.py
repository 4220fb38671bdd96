"""A3, extractive selection: the document's own sentences, the best first while the budget lasts, in its own order.

Aware of the question, sentences are ranked by BM25 of the question over them. Blind, by how central they are to the
document, weighted by how many of their words hold digits or look like identifiers: what questions are mostly about.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core import bm25, container
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.core.words import concrete_share, terms
from kvferry.sender.method import TextMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.assembly import Piece
from kvferry.sender.text.centrality import centrality
from kvferry.sender.text.counted import BudgetParameters, CountedText, budget_tokens
from kvferry.sender.text.selection import select
from kvferry.sender.text.sentences import pieces as split

_STEP = 512
Scores = npt.NDArray[np.float64]


def blind_scores(sentences: Sequence[str], words: Sequence[Sequence[str]]) -> Scores:
    """Return centrality times density, one score a sentence; ``words`` holds the terms of each."""
    density = np.array([1.0 + concrete_share(sentence) for sentence in sentences])
    scores: Scores = centrality(words) * density
    return scores


def aware_scores(question: str, words: Sequence[Sequence[str]]) -> Scores:
    """Return BM25 of the question, one score a sentence; ``words`` holds the terms of each."""
    return bm25.scores(terms(question), words)


def read_pieces(text: str, pieces: Iterable[Piece]) -> Generator[Progress, None, tuple[list[Piece], list[list[str]]]]:
    """Read a text piece by piece.

    Args:
        text: the document.
        pieces: of it, in its order.

    Yields:
        How far into the text that is.

    Returns:
        The pieces, and the terms of each.
    """
    found: list[Piece] = []
    words: list[list[str]] = []
    for piece in pieces:
        if len(found) % _STEP == 0:
            yield Progress("tokenise", piece.start, len(text))
        found.append(piece)
        words.append(terms(text[piece.start : piece.end]))
    yield Progress("tokenise", len(text), len(text))
    return found, words


class Extractive:
    """A3 without the question."""

    info = MethodInfo(
        id="A3",
        name="extractive",
        form="text",
        label="custom",
        aware=False,
        source="kvferry",
        summary="the document's own sentences, those that are central and hold facts first",
    )
    parameters = BudgetParameters

    def make(self, reading: Reading, parameters: BudgetParameters) -> Generator[Progress, None, TextMaterial]:
        """Select without looking at the question.

        Raises:
            InvalidRequestError: when not one sentence fits the budget.
        """
        return (yield from _extract(reading, parameters, None))


class ExtractiveAware:
    """A3 for one question."""

    info = MethodInfo(
        id="A3-aware",
        name="extractive-aware",
        form="text",
        label="custom",
        aware=True,
        source="kvferry; BM25 of Robertson and Zaragoza 2009 with Lucene's idf",
        summary="the document's own sentences, those that match the question first",
    )
    parameters = BudgetParameters

    def make(self, reading: Reading, parameters: BudgetParameters) -> Generator[Progress, None, TextMaterial]:
        """Select for the question.

        Raises:
            InvalidRequestError: when there is none, or not one sentence fits the budget.
        """
        return (yield from _extract(reading, parameters, reading.asked(self.info.id)))


def _extract(
    reading: Reading, parameters: BudgetParameters, question: str | None
) -> Generator[Progress, None, TextMaterial]:
    counter, text = reading.counter, reading.text
    yield Progress("tokenise", 0, len(text))
    document = CountedText(counter, text)
    pieces, words = yield from read_pieces(text, split(text))
    sentences = [text[piece.start : piece.end] for piece in pieces]
    scores = blind_scores(sentences, words) if question is None else aware_scores(question, words)
    budget = budget_tokens(parameters.budget, document.tokens)
    selection = yield from select(counter, document, pieces, bm25.ranked(scores), budget)
    outcome = {"tokens": selection.tokens, "sentences": selection.pieces, "of": len(pieces)}
    if question is not None:
        # Without a hit the ranking is the document's order, and whoever reads the answer should know.
        outcome["hit"] = bool(scores.any())
    return TextMaterial(selection.made.text, kind=container.EXCERPTS, spans=selection.made.spans, outcome=outcome)
