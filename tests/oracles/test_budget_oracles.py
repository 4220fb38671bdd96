from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest


def test_snapkv_keeps_all_only_below_its_capacity(budget_oracles: Any) -> None:
    assert budget_oracles.snapkv_scored(319, 320, 64) == 255
    assert budget_oracles.snapkv_scored(320, 320, 64) == 256
    assert budget_oracles.snapkv_scored(9999, 320, 64) == 256
    assert budget_oracles.snapkv_scored(10, 320, 64) == 0


def test_kvpress_rounds_down_but_keeps_one(budget_oracles: Any) -> None:
    assert [budget_oracles.kvpress_count(11, r) for r in (0.0, 0.5, 0.75, 0.99)] == [11, 5, 2, 1]


@pytest.mark.parametrize("row", range(6))
def test_the_golden_pyramids(budget_oracles: Any, row: int) -> None:
    capacity, window, layers, bottom, top, mean = budget_oracles.PYRAMID_GOLDEN[row]
    scored = budget_oracles.pyramid_scored(100_000, capacity, window, layers)
    assert (scored[0], scored[-1], len(scored)) == (bottom, top, layers)
    rows = budget_oracles.pyramid_rows(100_000, capacity, window, layers)
    assert rows == [count + window for count in scored]
    assert sum(rows) / layers == mean
    assert len({low - high for low, high in pairwise(rows)}) == 1


def test_the_golden_table_is_the_published_one(budget_oracles: Any) -> None:
    assert [row[3:] for row in budget_oracles.PYRAMID_GOLDEN] == [
        (234, 18, 134.0),
        (983, 38, 518.5),
        (63, 9, 68.0),
        (110, 2, 64.0),
        (1935, 75, 1037.0),
        (3978, 103, 2048.5),
    ]


def test_a_pyramid_s_three_branches(budget_oracles: Any) -> None:
    def rows(length: int) -> list[int]:
        found: list[int] = budget_oracles.pyramid_rows(length, 512, 32, 28)
        return found

    assert rows(20) == [20] * 28
    assert rows(511) == [511] * 28
    assert rows(512) == [512] * 28
    assert rows(959) == [512] * 28
    assert rows(960)[0] == 960
    assert rows(968)[0] == 968
    assert rows(969)[0] == 968
    # At 960: hi = 928, lo = 32, step = 896 // 27 = 33.
    assert rows(960)[1] == 960 - 33
    assert rows(960)[27] == 960 - 27 * 33
    for length in (960, 968, 969, 5000):
        assert rows(length) == sorted(rows(length), reverse=True)


def test_a_pyramid_of_one_or_two_layers(budget_oracles: Any) -> None:
    assert budget_oracles.pyramid_rows(9999, 512, 32, 1) == [512]
    assert budget_oracles.pyramid_rows(9999, 512, 32, 2) == [936 + 32, 24 + 32]
    assert budget_oracles.pyramid_rows(960, 512, 32, 2) == [928 + 32, 32 + 32]


SCORES = np.array([[9.0, 8, 7, 6, 0, 0], [5.0, 1, 0, 0, 0, 0]])


def test_heads_share_a_layer_s_rows_by_score(budget_oracles: Any) -> None:
    assert budget_oracles.adakv_counts(SCORES, 2) == [4, 0]
    assert budget_oracles.adakv_counts(SCORES, 3) == [4, 2]
    # Capacity 6, window 4: Bh = 2.
    assert budget_oracles.adakv_caps(SCORES, 6, 4, 0.0) == [4, 0]
    assert budget_oracles.adakv_caps(SCORES, 6, 4, 0.5) == [3, 1]
    assert budget_oracles.adakv_caps(SCORES, 6, 4, 1.0) == [2, 2]


def test_alpha_1_is_snapkv(budget_oracles: Any) -> None:
    scores = np.random.default_rng(0).random((3, 50))
    assert budget_oracles.adakv_caps(scores, 20, 8, 1.0) == [budget_oracles.snapkv_scored(58, 20, 8)] * 3


def test_a_head_with_all_the_mass(budget_oracles: Any) -> None:
    scores = np.zeros((3, 50))
    scores[1] = 1 + np.arange(50)
    # The floor is 3, and 36 * .75 come on top of it.
    assert budget_oracles.adakv_caps(scores, 20, 8, 0.25) == [3, 30, 3]


def test_rounding_is_half_to_even_and_may_move_the_total(budget_oracles: Any) -> None:
    scores = np.array([[9.0, 8, 7, 0, 0, 0], [6.0, 0, 0, 0, 0, 0]])
    # c = (3, 1), Bh = 2: 1.5 + 1 and .5 + 1.
    assert budget_oracles.adakv_caps(scores, 6, 4, 0.5) == [2, 2]
    scores = np.array([[9.0, 8, 7, 7, 7, 0], [6.0, 0, 0, 0, 0, 0]])
    # c = (5, 1), Bh = 3: 2.5 + 1 and .5 + 1: 2 rows more than 2 * 3 would be 3.5 + 1.5.
    assert budget_oracles.adakv_caps(scores, 7, 4, 0.5) == [4, 2]


def test_ties_between_heads(budget_oracles: Any) -> None:
    level = np.ones((2, 6))
    assert budget_oracles.adakv_counts(level, 2) == [4, 0]
    assert budget_oracles.adakv_counts(level, 2, ties="row") == [2, 2]


def test_a_prompt_below_the_capacity_is_kept_whole(budget_oracles: Any) -> None:
    assert budget_oracles.adakv_caps(SCORES, 11, 4, 1.0) == [6, 6]
    assert budget_oracles.adakv_caps(SCORES, 10, 4, 1.0) == [6, 6]


def test_safe_rows_keep_the_total_exact(budget_oracles: Any) -> None:
    assert budget_oracles.adakv_safe_counts(SCORES, 2, 0.0) == [4, 0]
    assert budget_oracles.adakv_safe_counts(SCORES, 2, 0.2) == [3, 1]
    assert budget_oracles.adakv_safe_counts(SCORES, 2, 1.0) == [2, 2]
    scores = np.random.default_rng(1).random((4, 30))
    counts = budget_oracles.adakv_safe_counts(scores, 10, 0.2)
    assert sum(counts) == 40
    assert min(counts) >= 2


def test_h2o_masks_have_a_tenth_each(budget_oracles: Any) -> None:
    assert budget_oracles.h2o_mask_budgets(199) == (19, 19)
    assert budget_oracles.h2o_mask_budgets(200, 0.2, 0.05) == (40, 10)
