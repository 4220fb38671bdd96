"""B4: the same rows everywhere for the same seed, others for any other, and each row as often as the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.kv.random_rows import RandomRows, draw_key, random_order
from kvferry.sender.kv.selecting import Subject

PREFIX = digest(b"a prefix")
GOLDEN_KEY = 0x894BE6E1AD452B34074E56885783AB63
GOLDEN_ORDER = [1, 3, 0, 5, 8, 2, 7, 6, 4, 11, 9, 10]


def test_a_seed_gives_these_rows_on_every_platform() -> None:
    assert draw_key(PREFIX, 7, 2, 1) == GOLDEN_KEY
    assert random_order(GOLDEN_KEY, 12).tolist() == GOLDEN_ORDER


def philox(key: int, words: int) -> list[int]:
    """Philox4x64-10 by its definition, from counter 1 on: what numpy's must give everywhere."""
    low, found = 2**64 - 1, list[int]()
    for block in range(1, words // 4 + 2):
        first, second, counter = key & low, key >> 64, [block, 0, 0, 0]
        for _ in range(10):
            one, two = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [two >> 64 ^ counter[1] ^ first, two & low, one >> 64 ^ counter[3] ^ second, one & low]
            first, second = first + 0x9E3779B97F4A7C15 & low, second + 0xBB67AE8584CAA73B & low
        found += counter
    return found[:words]


@pytest.mark.parametrize("key", [0, 1, GOLDEN_KEY, 2**128 - 1])
def test_draws_are_the_top_53_bits_of_philox(key: int) -> None:
    words = philox(key, 50)
    assert random_order(key, 50).tolist() == sorted(range(50), key=lambda row: (words[row] >> 11, row))


def test_the_key_is_that_of_the_documented_bytes() -> None:
    numbers = bytes([7, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0])
    assert draw_key(PREFIX, 7, 2, 1) == int.from_bytes(
        digest(b"kvferry random rows 1" + PREFIX + numbers)[:16], "little"
    )


def test_every_row_is_kept_equally_often() -> None:
    """Over 10,000 seeds each of 40 rows is among the first 10 about 2,500 times, and pairs show no pattern."""
    seeds, rows, count = 10_000, 40, 10
    kept = np.zeros((seeds, rows))
    for seed in range(seeds):
        kept[seed, random_order(draw_key(PREFIX, seed, 0, 0), rows)[:count]] = 1
    assert (kept.sum(axis=1) == count).all()
    frequency = kept.mean(axis=0)
    p = count / rows
    # Draws without replacement: chi-squared with 39 degrees of freedom; 73 is its 99.9 % point.
    chi = seeds * ((frequency - p) ** 2).sum() / (p * (1 - p)) * (rows - 1) / rows
    assert chi < 73
    assert chi > 15
    # Two rows are kept together with probability 10 * 9 / (40 * 39), also neighbours.
    together = (kept[:, :-1] * kept[:, 1:]).mean(axis=0)
    assert np.abs(together - 90 / 1560).max() < 5 * np.sqrt(0.0577 * 0.9423 / seeds)


def test_anything_that_differs_gives_other_rows() -> None:
    keys = [
        draw_key(prefix, seed, layer, head)
        for prefix in (PREFIX, digest(b"another"))
        for seed in (0, 1, 256, 2**63 - 1)
        for layer in (0, 1, 256)
        for head in (0, 1, 256)
    ]
    assert len({tuple(random_order(key, 50)[:10]) for key in keys}) == len(keys) == 72


def test_an_order_holds_every_row_once() -> None:
    for rows in (1, 2, 63, 1000):
        order = random_order(5, rows)
        assert order.dtype == np.int32
        assert sorted(order.tolist()) == list(range(rows))


@pytest.fixture(scope="module")
def subject(tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]) -> Subject:
    model = tiny_model("llama", heads=6, kv_heads=3, head_dim=8, layers=3)
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 300, 60)]
    return Subject(drain(model.prefill(ids)), model, ids, None)


def ranked(subject: Subject, drain: Callable[..., Any], **given: Any) -> Any:
    return drain(RandomRows().rank(subject, registry.check_parameters(RandomRows(), given)))


def test_every_layer_and_head_draws_its_own(subject: Subject, drain: Callable[..., Any]) -> None:
    kept = ranked(subject, drain)(15)
    assert [len(heads) for heads in kept] == [3, 3, 3]
    rows = [tuple(head.tolist()) for heads in kept for head in heads]
    assert len(set(rows)) == 9
    for head in rows:
        assert len(head) == 15
        assert list(head) == sorted(set(head))
        assert 0 <= head[0] <= head[-1] < 60


def test_a_larger_budget_adds_rows_and_takes_none_away(subject: Subject, drain: Callable[..., Any]) -> None:
    keep = ranked(subject, drain, seed=3)
    for smaller, larger in ((1, 2), (15, 16), (15, 59), (59, 60), (60, 100)):
        for few, many in zip(keep(smaller), keep(larger), strict=True):
            assert all(set(one.tolist()) <= set(two.tolist()) for one, two in zip(few, many, strict=True))


def test_the_seed_and_the_document_decide(subject: Subject, drain: Callable[..., Any]) -> None:
    def rows(of: Subject, seed: int) -> list[list[int]]:
        return [head.tolist() for heads in ranked(of, drain, seed=seed)(15) for head in heads]

    other = Subject(subject.cache, subject.model, [*subject.ids[:-1], subject.ids[-1] + 1], None)
    assert rows(subject, 4) == rows(subject, 4)
    assert rows(subject, 4) != rows(subject, 5)
    assert rows(subject, 4) != rows(other, 4)


@pytest.mark.parametrize("seed", [-1, 2**63, "x"])
def test_seeds_out_of_range_are_refused_by_name(seed: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^seed: "):
        registry.check_parameters(RandomRows(), {"seed": seed})
