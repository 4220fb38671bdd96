"""The metrics against the formula, written out position by position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvferry.ablations.methods.fidelity import Fidelity, compare
from kvferry.core.errors import InvalidRequestError, ModelError


def log_probability(row: Any, token: int) -> float:
    """One entry of a log-softmax, in plain Python."""
    values = [float(value) for value in row]
    return values[token] - math.log(math.fsum(math.exp(value) for value in values))


def divergence(p_row: Any, q_row: Any) -> float:
    """KL(p || q) in nats, by its definition."""
    terms = []
    for token in range(len(p_row)):
        p = math.exp(log_probability(p_row, token))
        terms.append(p * (log_probability(p_row, token) - log_probability(q_row, token)))
    return math.fsum(terms)


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(value) for value in probabilities]


@pytest.fixture
def pair() -> tuple[Any, Any, list[int]]:
    """Return float32 logits of 70 positions, more than are taken at once, and the tokens that came."""
    random = np.random.default_rng(3)
    reference = random.normal(0, 3, (70, 11)).astype(np.float32)
    candidate = (reference + random.normal(0, 0.7, (70, 11))).astype(np.float32)
    return reference, candidate, random.integers(0, 11, 70).tolist()


def test_every_figure_is_that_of_the_formula(pair: tuple[Any, Any, list[int]]) -> None:
    reference, candidate, truth = pair
    found = compare(reference, candidate, truth)
    each = [divergence(p, q) for p, q in zip(reference, candidate, strict=True)]
    flips = [list(p).index(max(p)) != list(q).index(max(q)) for p, q in zip(reference, candidate, strict=True)]
    changes = [
        log_probability(p, token) - log_probability(q, token)
        for p, q, token in zip(reference, candidate, truth, strict=True)
    ]
    assert found.positions == 70
    assert found.kl_mean == pytest.approx(math.fsum(each) / 70, abs=1e-12)
    # 0.99 * 69 = 68.31, and the next observed value above it is the highest.
    assert found.kl_p99 == pytest.approx(sorted(each)[69], abs=1e-12)
    assert 0 < sum(flips) < 70
    assert found.flip_rate == sum(flips) / 70
    assert found.delta_nll == pytest.approx(math.fsum(changes) / 70, abs=1e-12)


def test_p99_is_an_observed_value_and_not_the_highest_of_many() -> None:
    reference = np.zeros((301, 2))
    candidate = np.zeros((301, 2))
    candidate[:, 0] = np.arange(301) / 100
    found = compare(reference, candidate, [0] * 301)
    # 0.99 * 300 = 297: three positions are worse.
    assert found.kl_p99 == pytest.approx(divergence([0, 0], [2.97, 0]), abs=1e-12)


def test_the_divergence_is_from_the_reference() -> None:
    """By hand: p = (1/2, 1/2), q = (1/4, 3/4). KL(p||q) = ln(2/sqrt 3); KL(q||p) = 3/4 ln 3 - ln 2."""
    p, q = np.array([logits_of(0.5, 0.5)]), np.array([logits_of(0.25, 0.75)])
    assert compare(p, q, [0]).kl_mean == pytest.approx(math.log(2 / math.sqrt(3)), abs=1e-12)
    assert compare(q, p, [0]).kl_mean == pytest.approx(0.75 * math.log(3) - math.log(2), abs=1e-12)


def test_a_less_likely_truth_is_a_positive_change() -> None:
    p, q = np.array([logits_of(0.5, 0.5)]), np.array([logits_of(0.25, 0.75)])
    assert compare(p, q, [0]).delta_nll == pytest.approx(math.log(2))
    assert compare(p, q, [1]).delta_nll == pytest.approx(math.log(0.5 / 0.75))


def test_the_reference_against_itself_is_nothing(pair: tuple[Any, Any, list[int]]) -> None:
    reference, _, truth = pair
    assert compare(reference, reference.copy(), truth) == Fidelity(70, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("constant", [1.0, -250.0, 3000.0])
def test_a_constant_over_the_vocabulary_changes_nothing(pair: tuple[Any, Any, list[int]], constant: float) -> None:
    reference = pair[0].astype(np.float64)
    found = compare(reference, reference + constant, pair[2])
    assert found.kl_mean == pytest.approx(0.0, abs=1e-10)
    assert found.kl_p99 == pytest.approx(0.0, abs=1e-10)
    assert found.flip_rate == 0.0
    assert found.delta_nll == pytest.approx(0.0, abs=1e-10)


def test_large_logits_do_not_overflow() -> None:
    found = compare(np.array([[4e4, 0.0]], np.float32), np.array([[0.0, 4e4]], np.float32), [0])
    assert found.kl_mean == pytest.approx(4e4)
    assert found.flip_rate == 1.0


def test_equal_logits_are_no_flip_and_the_lower_token_counts() -> None:
    tied = np.array([[1.0, 1.0, 0.0]])
    assert compare(tied, np.array([[1.5, 1.0, 0.0]]), [0]).flip_rate == 0.0
    assert compare(tied, np.array([[1.0, 1.5, 0.0]]), [0]).flip_rate == 1.0


@pytest.mark.parametrize(
    ("kl_mean", "kl_p99", "flip_rate", "tier"),
    [
        (0.01, 0.10, 0.01, "good"),
        (0.0101, 0.10, 0.01, "marginal"),
        (0.01, 0.11, 0.01, "marginal"),
        (0.01, 0.10, 0.02, "marginal"),
        (0.10, 1.0, 0.05, "marginal"),
        (0.11, 1.0, 0.05, "poor"),
        (0.0, 1.1, 0.0, "poor"),
        (0.0, 0.0, 0.06, "poor"),
    ],
)
def test_tiers(kl_mean: float, kl_p99: float, flip_rate: float, tier: str) -> None:
    assert Fidelity(500, kl_mean, kl_p99, flip_rate, -1.0).tier == tier


@pytest.mark.parametrize(
    ("reference", "candidate", "truth", "message"),
    [
        ((2, 3), (2, 4), [0, 0], r"^candidate: logits of shape \(2, 4\), the reference has \(2, 3\)"),
        ((2, 3), (3, 3), [0, 0], r"^candidate: logits of shape \(3, 3\)"),
        ((3,), (3,), [0], r"both must be \[N, V\]"),
        ((2, 3), (2, 3), [0], r"^truth: 1 tokens for 2 rows"),
        ((0, 3), (0, 3), [], r"^truth: 0 tokens for 0 rows"),
        ((2, 3), (2, 3), [0, 3], r"^truth: token 3, the vocabulary has 3"),
        ((2, 3), (2, 3), [-1, 0], r"^truth: token -1"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    reference: tuple[int, ...], candidate: tuple[int, ...], truth: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        compare(np.zeros(reference), np.zeros(candidate), truth)  # type: ignore[arg-type]  # shapes are the point


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused_by_name(value: float) -> None:
    good, bad = np.zeros((40, 3)), np.zeros((40, 3))
    bad[35, 1] = value
    with pytest.raises(ModelError, match=r"^candidate: .* position 35$"):
        compare(good, bad, [0] * 40)
    with pytest.raises(ModelError, match=r"^reference: .* position 35$"):
        compare(bad, good, [0] * 40)
