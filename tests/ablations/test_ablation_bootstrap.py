"""Intervals: against every outcome of a tiny set, the closed form of a larger one, and what pairing must do."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from kvferry.ablations.report.bootstrap import Bootstrap

TWO = ["a", "a", "b", "b", "b"]
VALUES = [0.0, 1.0, 0.25, 0.5, 4.0]


def every_outcome() -> Counter[float]:
    """Return how likely each mean is: two documents drawn, then as many of its questions as each has."""
    groups = {"a": VALUES[:2], "b": VALUES[2:]}
    found: Counter[float] = Counter()
    for pair in itertools.product("ab", repeat=2):
        draws = [itertools.product(groups[name], repeat=len(groups[name])) for name in pair]
        outcomes = [(*first, *second) for first, second in itertools.product(*map(list, draws))]
        for outcome in outcomes:
            found[round(float(np.mean(outcome)), 9)] += 1 / 4 / len(outcomes)  # type: ignore[assignment]
    return found


def test_a_tiny_set_meets_its_exact_distribution() -> None:
    exact = every_outcome()
    means = np.round(Bootstrap(TWO, resamples=40_000)._weights @ np.array(VALUES), 9)
    drawn = Counter(means.tolist())
    assert set(drawn) <= set(exact)
    for outcome, probability in exact.items():
        share = drawn[outcome] / len(means)
        assert share == pytest.approx(probability, abs=5 * np.sqrt(probability / len(means)))


def test_the_bounds_are_the_quantiles_of_the_exact_distribution() -> None:
    outcomes = sorted(every_outcome().items())
    below = np.cumsum([probability for _, probability in outcomes])
    interval = Bootstrap(TWO, resamples=40_000).mean(VALUES)
    assert interval.mean == pytest.approx(np.mean(VALUES))
    for bound, tail in ((interval.low, 0.025), (interval.high, 0.975)):
        near = [value for (value, _), share in zip(outcomes, below, strict=True) if abs(share - tail) < 0.01]
        at = int(np.searchsorted(below, tail))
        allowed = [*near, outcomes[at][0], outcomes[at + 1][0]]
        assert min(allowed) <= bound <= max(allowed)


def test_the_spread_has_its_closed_form() -> None:
    """With documents of equal size: between documents / D, and within them / D n."""
    random = np.random.default_rng(3)
    documents, each = 12, 6
    values = random.normal(size=(documents, 1)) + 0.7 * random.normal(size=(documents, each))
    names = [name for name in range(documents) for _ in range(each)]
    means = Bootstrap(names)._weights @ values.ravel()
    expected = values.mean(axis=1).var() / documents + values.var(axis=1).mean() / (documents * each)
    assert means.var() == pytest.approx(expected, rel=0.06)
    interval = Bootstrap(names).mean(values.ravel().tolist())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * np.sqrt(expected), rel=0.06)


def test_questions_of_one_document_are_no_independent_ones() -> None:
    """Ten questions with one answer each a document: as uncertain as the documents, not as the questions."""
    values = [float(document % 2) for document in range(10) for _ in range(10)]
    clustered = Bootstrap([document for document in range(10) for _ in range(10)]).mean(values)
    alone = Bootstrap(range(100)).mean(values)
    assert clustered.high - clustered.low > 2.5 * (alone.high - alone.low)


def test_a_difference_is_paired_by_question() -> None:
    random = np.random.default_rng(1)
    first = random.integers(0, 2, 60).astype(float).tolist()
    names = [number // 6 for number in range(60)]
    shifted = [value + 0.5 for value in first]
    assert Bootstrap(names).mean(np.subtract(shifted, first).tolist()) == pytest.approx((0.5, 0.5, 0.5))
    second = random.integers(0, 2, 60).astype(float).tolist()
    apart = np.subtract(first, second)
    found, turned = Bootstrap(names).mean(apart.tolist()), Bootstrap(names).mean((-apart).tolist())
    assert found.mean == pytest.approx(np.mean(first) - np.mean(second))
    assert (found.low, found.high) == (pytest.approx(-turned.high), pytest.approx(-turned.low))
    assert found.low < found.mean < found.high


def test_neither_the_run_nor_the_order_of_the_documents_matters() -> None:
    assert Bootstrap(TWO).mean(VALUES) == Bootstrap(TWO).mean(VALUES)
    mixed = ["a", "b", "a", "b", "b"]
    weights = Bootstrap(mixed)._weights
    assert weights.sum(axis=1) == pytest.approx(1.0)
    # Drawn twice (a quarter), a document is all there is; drawn once (a half), each question weighs a fifth.
    first, second = 1 / 4 * 1 / 2 + 1 / 2 * 1 / 5, 1 / 4 * 1 / 3 + 1 / 2 * 1 / 5
    assert weights.mean(axis=0) == pytest.approx([first, second, first, second, second], abs=0.01)
    assert Bootstrap(TWO, seed=1).mean(VALUES) != Bootstrap(TWO, seed=2).mean(VALUES)


def test_one_question_is_no_evidence_of_a_spread() -> None:
    assert Bootstrap(["a"]).mean([0.3]) == pytest.approx((0.3, 0.3, 0.3))


def test_wrong_numbers_of_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one question is needed, got none"):
        Bootstrap([])
    with pytest.raises(ValueError, match=r"5 questions were drawn, got shape \(4,\)"):
        Bootstrap(TWO).mean(VALUES[:4])
