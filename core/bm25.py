"""BM25 of a question over passages, in Lucene's form: every term that occurs counts for something."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import bm25s
import numpy as np
import numpy.typing as npt

K1 = 1.5
B = 0.75
_DECIMALS = 12


def scores(question: Sequence[str], passages: Sequence[Sequence[str]]) -> npt.NDArray[np.float64]:
    """Score passages, each a list of terms.

    For every term of the question, as often as it occurs there: idf * tf (k1 + 1) / (tf + k1 (1 - b + b dl / avgdl))
    with idf = ln(1 + (N - n + 0.5) / (n + 0.5)), Robertson and Zaragoza 2009 with the idf of Apache Lucene.

    Returns:
        One score a passage; 0 exactly when it shares no term with the question.
    """
    vocabulary: dict[str, int] = {}
    numbered = [[vocabulary.setdefault(term, len(vocabulary)) for term in passage] for passage in passages]
    asked = [vocabulary[term] for term in question if term in vocabulary]
    # The library divides by the mean length.
    if not asked:
        return np.zeros(len(passages))
    # Its logger is set to show everything, whatever the program's level.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25(method="atire", idf_method="lucene", k1=K1, b=B, dtype="float64")
    index.index((numbered, dict(vocabulary)), show_progress=False)
    found: npt.NDArray[np.float64] = index.get_scores_from_ids(asked)
    return found


def ranked(found: npt.NDArray[np.float64]) -> list[int]:
    """Return what was scored by its number, best first; equal scores, to twelve decimals, in the order given.

    A sum of floats depends on the order of its terms, and what depends on that is no difference.
    """
    order: list[int] = np.argsort(-np.round(found, _DECIMALS), kind="stable").tolist()
    return order
