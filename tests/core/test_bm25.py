"""BM25 against the formula, and on corpora where others divide by zero."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.bm25 import scores

WORDS = st.sampled_from(["gate", "code", "north", "the", "4417", "ledger"])
PASSAGES = st.lists(st.lists(WORDS, max_size=8), max_size=8)


def formula(question: list[str], passages: list[list[str]]) -> list[float]:
    """Work BM25 out term by term, k1 1.5 and b 0.75, with ln(1 + (N - n + 0.5) / (n + 0.5)) for idf."""
    count = len(passages)
    found = []
    for passage in passages:
        total = 0.0
        for term in question:
            frequency = passage.count(term)
            if not frequency:
                continue
            holders = sum(term in other for other in passages)
            mean = sum(len(other) for other in passages) / count
            idf = math.log(1 + (count - holders + 0.5) / (holders + 0.5))
            total += idf * frequency * 2.5 / (frequency + 1.5 * (0.25 + 0.75 * len(passage) / mean))
        found.append(total)
    return found


@given(st.lists(WORDS | st.just("absent"), max_size=6), PASSAGES)
def test_scores_are_those_of_the_formula(question: list[str], passages: list[list[str]]) -> None:
    np.testing.assert_allclose(scores(question, passages), formula(question, passages), rtol=0, atol=1e-6)


def test_known_numbers() -> None:
    passages = [["the", "code", "is", "4417"], ["the", "gate", "is", "shut"]]
    # idf of "code": ln(1 + 1.5 / 1.5) = ln 2; lengths are equal, so the rest is 2.5 / 2.5.
    assert scores(["code"], passages).tolist() == pytest.approx([math.log(2), 0.0])


@pytest.mark.parametrize("passages", [[], [[]], [[], []]])
@pytest.mark.parametrize("question", [[], ["code"], ["code", "code"]])
def test_nothing_to_rank(question: list[str], passages: list[list[str]]) -> None:
    assert scores(question, passages).tolist() == [0.0] * len(passages)


def test_a_match_counts_when_it_is_the_only_passage_or_one_of_two() -> None:
    assert scores(["code"], [["the", "code"]])[0] > 0
    hit, miss = scores(["the", "code"], [["the", "code"], ["the", "gate"]])
    assert hit > miss > 0


def test_a_term_in_every_passage_still_counts() -> None:
    assert (scores(["the"], [["the"], ["the", "gate"], ["the"]]) > 0).all()


def test_a_repeated_question_term_counts_again() -> None:
    passages = [["gate", "code"], ["north"]]
    once, twice = scores(["code"], passages)[0], scores(["code", "code"], passages)[0]
    assert twice == pytest.approx(2 * once)


def test_the_library_writes_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        scores(["code"], [["code"], ["gate"]])
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
