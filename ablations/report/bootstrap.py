"""Intervals for the mean of many judgements, and for the difference between two methods on the same questions.

Percentile bootstrap (Efron & Tibshirani 1993), in two stages because questions about one document are not independent:
as many documents as there are, drawn with replacement, and in every drawn one as many of its questions as it has,
drawn with replacement. A difference is the mean of differences question by question, a paired one. The seed is fixed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
SEED = 20_261_130
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and the bounds of its 95 % interval."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """Draws of one set of questions."""

    def __init__(self, documents: Sequence[Hashable], *, resamples: int = RESAMPLES, seed: int = SEED) -> None:
        """Draw.

        Args:
            documents: which document each question is about; at least one question.
            resamples: how often the whole is drawn.
            seed: of the draws.

        Raises:
            ValueError: when there is no question.
        """
        if not documents:
            raise ValueError("documents: at least one question is needed, got none")
        self._weights = _draw(documents, resamples, np.random.default_rng(seed))

    def mean(self, values: Sequence[float]) -> Interval:
        """Return the mean of a value a question, and its interval.

        Raises:
            ValueError: when there are more or fewer values than questions.
        """
        given = np.asarray(values, dtype=np.float64)
        if given.shape != self._weights.shape[1:]:
            raise ValueError(f"values: {self._weights.shape[1]} questions were drawn, got shape {given.shape}")
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(self._weights @ given, (tail, 1 - tail))
        return Interval(float(given.mean()), float(low), float(high))


def _draw(documents: Sequence[Hashable], resamples: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return how much every question weighs in every resample: float64 [resamples, questions], rows sum to 1."""
    questions: dict[Hashable, list[int]] = {}
    for number, document in enumerate(documents):
        questions.setdefault(document, []).append(number)
    picks = random.multinomial(len(questions), np.full(len(questions), 1 / len(questions)), size=resamples)
    weights = np.empty((resamples, len(documents)))
    for column, numbers in enumerate(questions.values()):
        # Drawn twice, a document gives twice as many draws of its questions.
        count = len(numbers)
        weights[:, numbers] = random.multinomial(picks[:, column] * count, np.full(count, 1 / count))
    shares: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return shares
