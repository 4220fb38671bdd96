from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest


def test_ties_go_to_the_lower_index_and_the_result_ascends(selector_oracles: Any) -> None:
    assert selector_oracles.keep([1, 5, 3, 5, 5], 3).tolist() == [1, 3, 4]
    assert selector_oracles.keep([1, 5, 3, 5, 5], 2).tolist() == [1, 3]
    assert selector_oracles.keep([0.0] * 6, 4).tolist() == [0, 1, 2, 3]
    assert selector_oracles.keep([2, 1], 9).tolist() == [0, 1]
    assert selector_oracles.keep([2, 1], 1).dtype == np.int32


def test_protected_rows_are_kept_outside_the_contest(selector_oracles: Any) -> None:
    protected = [True, False, False, False, True]
    assert selector_oracles.keep([-9, 5, 5, 7, -9], 3, protected).tolist() == [0, 3, 4]
    assert selector_oracles.keep([-9, 5, 5, 7, -9], 4, protected).tolist() == [0, 1, 3, 4]
    assert selector_oracles.keep([7.0] * 5, 3, protected).tolist() == [0, 1, 4]
    assert selector_oracles.keep([7.0] * 5, 2, protected).tolist() == [0, 4]


def test_what_the_contract_refuses(selector_oracles: Any) -> None:
    with pytest.raises(ValueError, match="cannot hold 2"):
        selector_oracles.keep([1, 2, 3], 1, [True, False, True])
    with pytest.raises(ValueError, match="cannot hold 0"):
        selector_oracles.keep([1, 2, 3], 0)
    for odd in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="finite"):
            selector_oracles.keep([1, odd, 3], 2)


def test_protected_ends(selector_oracles: Any) -> None:
    assert selector_oracles.protect(6, 1, 2).tolist() == [True, False, False, False, True, True]
    assert selector_oracles.protect(3).tolist() == [False] * 3
    assert selector_oracles.protect(2, 4, 4).tolist() == [True, True]


@pytest.mark.parametrize(
    ("length", "rows"),
    [
        (3, [0, 1, 2]),
        (4, [0, 1, 2, 3]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (8, [0, 1, 2, 3, 5, 6, 7]),
        (20, [0, 1, 2, 3, 17, 18, 19]),
    ],
)
def test_sink_and_recent_rows_of_budget_7(selector_oracles: Any, length: int, rows: list[int]) -> None:
    assert selector_oracles.sink_recent_rows(length, 7).tolist() == rows
    assert selector_oracles.streaming_llm_rows(length, 4, 3).tolist() == rows


def test_a_budget_below_the_sinks_is_refused(selector_oracles: Any) -> None:
    assert selector_oracles.sink_recent_rows(9, 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 sinks"):
        selector_oracles.sink_recent_rows(9, 3)


def test_the_streaming_cache_has_512_recent_rows_by_default(selector_oracles: Any) -> None:
    rows = selector_oracles.streaming_llm_rows(600)
    assert rows[:4].tolist() == [0, 1, 2, 3]
    assert rows[4] == 600 - 512
    assert len(selector_oracles.streaming_llm_rows(516)) == 516


def test_rotation_by_hand(selector_oracles: Any) -> None:
    # base 100, D = 4: the pairs turn by 1 and by 0.1 a position.
    c, s, c2, s2 = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
    half_split = selector_oracles.rotate([[1.0, 2.0, 3.0, 4.0]], [3], 100)
    assert half_split[0] == pytest.approx([c - 3 * s, 2 * c2 - 4 * s2, s + 3 * c, 2 * s2 + 4 * c2], abs=1e-12)
    adjacent = selector_oracles.rotate([[1.0, 2.0, 3.0, 4.0]], [3], 100, traditional=True)
    assert adjacent[0] == pytest.approx([c - 2 * s, s + 2 * c, 3 * c2 - 4 * s2, 3 * s2 + 4 * c2], abs=1e-12)
    partial = selector_oracles.rotate([[1.0, 2.0, 3.0, 4.0]], [3], 100, dims=2)
    assert partial[0] == pytest.approx([c - 2 * s, s + 2 * c, 3, 4], abs=1e-12)


@pytest.mark.parametrize("pairing", ["half-split", "adjacent"])
@pytest.mark.parametrize("dims", [16, 8])
def test_rotation_is_that_of_mlx(selector_oracles: Any, pairing: str, dims: int) -> None:
    traditional = pairing == "adjacent"
    plain = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    ours = selector_oracles.rotate(plain, np.arange(7, 12), 500.0, traditional=traditional, dims=dims)
    theirs = mx.fast.rope(
        mx.array(plain)[None], dims, traditional=traditional, base=500.0, scale=1.0, offset=7, stream=mx.cpu
    )
    assert np.abs(ours - np.array(theirs)[0]).max() < 1e-5
    back = selector_oracles.rotate(ours, np.arange(7, 12), 500.0, traditional=traditional, dims=dims, inverse=True)
    assert back == pytest.approx(plain, abs=1e-12)


def test_renumbered_keys_turn_by_their_place_in_the_cache(selector_oracles: Any) -> None:
    plain = np.random.default_rng(1).standard_normal((2, 9, 4))
    keys = selector_oracles.renumbered_keys(plain, [0, 1, 7, 8], 100)
    assert keys.shape == (2, 4, 4)
    assert keys[1, 2] == pytest.approx(selector_oracles.rotate(plain[1, 7:8], [2], 100)[0])
    old = selector_oracles.rotate(plain, np.arange(9), 100)
    # From the rotated cache: turn row 7 back by the change of its position.
    assert keys[1, 2] == pytest.approx(selector_oracles.rotate(old[1, 7:8], [2 - 7], 100)[0], abs=1e-12)
    assert keys[1, 2] != pytest.approx(old[1, 7], abs=1e-3)


def test_the_lowest_norm_is_kept(selector_oracles: Any) -> None:
    keys = np.ones((1, 5, 4))
    keys[0, 1] *= 0.1
    keys[0, 3] *= 10
    scores = selector_oracles.l2norm_scores(keys)[0]
    assert scores == pytest.approx([-2, -0.2, -2, -20, -2])
    assert selector_oracles.keep(scores, 1).tolist() == [1]
    assert selector_oracles.keep(scores, 4).tolist() == [0, 1, 2, 4]


def test_l2norm_rounds_its_count_up_and_leaves_short_prompts_alone(selector_oracles: Any) -> None:
    assert selector_oracles.l2norm_count(2049, 0.5) == 1025
    assert selector_oracles.l2norm_count(2048, 0.5) == 1024
    assert selector_oracles.l2norm_count(2047, 0.5) == 2047


def test_keydiff_by_hand(selector_oracles: Any) -> None:
    # Directions (1,0), (0,1), (0,1): anchor (1/3, 2/3). The first key's length plays no part.
    keys = np.array([[100.0, 0], [0, 1], [0, 2]])
    root = math.sqrt(5)
    assert selector_oracles.keydiff_scores(keys) == pytest.approx([-1 / root, -2 / root, -2 / root])


def test_keydiff_keeps_the_outlier_and_ignores_lengths(selector_oracles: Any) -> None:
    rng = np.random.default_rng(2)
    keys = np.tile([1.0, 2.0, 0.0], (8, 1))
    keys[5] = [0.0, 0.0, 3.0]
    assert selector_oracles.keep(selector_oracles.keydiff_scores(keys), 1).tolist() == [5]
    scaled = keys * rng.uniform(0.1, 10, (8, 1))
    assert selector_oracles.keydiff_scores(scaled) == pytest.approx(selector_oracles.keydiff_scores(keys))
    assert selector_oracles.keydiff_scores(np.array([[0.0, 0], [0, 1]])).tolist() == [0.0, -1.0]


def test_blockwise_keydiff_forgets_what_it_dropped(selector_oracles: Any) -> None:
    east, north, up = [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]
    keys = np.array([east, east, north, north, north, up])
    # All at once: anchor (2, 3, 1)/6, so up and the lower east. In blocks of 3: of 0, 1, 2 stay 2 and 0; then anchor
    # (1, 3, 1)/5. One by one 0 and 2 stay until up comes, when all three directions are level.
    assert selector_oracles.keep(selector_oracles.keydiff_scores(keys), 2).tolist() == [0, 5]
    assert selector_oracles.keydiff_blockwise_rows(keys, 2, block=3).tolist() == [0, 5]
    assert selector_oracles.keydiff_blockwise_rows(keys, 2, block=1, first=2).tolist() == [0, 2]
    assert selector_oracles.keydiff_blockwise_rows(keys, 6, block=2).tolist() == [0, 1, 2, 3, 4, 5]
    assert selector_oracles.keydiff_blockwise_rows(keys, 2, block=6).tolist() == [0, 5]


def test_blocks_start_at_the_paper_s_or_at_kvpress_size(selector_oracles: Any) -> None:
    keys = np.random.default_rng(3).standard_normal((40, 3))
    held = list(range(10))
    for start in range(10, 40, 8):
        held += range(start, min(start + 8, 40))
        held = [held[i] for i in selector_oracles.keep(selector_oracles.keydiff_scores(keys[held]), 10)]
    assert selector_oracles.keydiff_blockwise_rows(keys, 10, 8, first=10).tolist() == held
    assert selector_oracles.keydiff_blockwise_rows(keys, 10, 8).tolist() != held


def test_chunks_compete_by_their_means_over_all_heads(selector_oracles: Any) -> None:
    scores = np.array([[1.0, 1, 0, 0, 9, 0, 3], [1.0, 1, 4, 0, 0, 0, 2]])
    assert selector_oracles.chunkkv_chunk_scores(scores, 3).tolist() == [8 / 3, 3, 5]
    assert selector_oracles.chunkkv_rows(scores, 1, 3).tolist() == [6]
    assert selector_oracles.chunkkv_rows(scores, 2, 3).tolist() == [3, 4, 5, 6]
    assert selector_oracles.chunkkv_rows(scores[:1], 1, 3).tolist() == [3, 4, 5]
    assert selector_oracles.chunkkv_rows(np.zeros((2, 7)), 1, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("length", "chunks"), [(19, 1), (20, 1), (21, 2), (40, 2), (41, 3)])
def test_a_partial_chunk_counts(selector_oracles: Any, length: int, chunks: int) -> None:
    assert selector_oracles.chunkkv_count(length, 0.0) == chunks
    assert selector_oracles.chunkkv_count(length, 0.99) == 1
    scores = np.arange(length, dtype=float)[None]
    if length < 20:
        with pytest.raises(ValueError, match="no complete chunk"):
            selector_oracles.chunkkv_rows(scores, 1)
    else:
        start = (chunks - 1) * 20
        assert selector_oracles.chunkkv_rows(scores, 1).tolist() == list(range(start, length))


def test_chunks_kept_are_cut_to_whole_ones(selector_oracles: Any) -> None:
    assert selector_oracles.chunkkv_count(100, 0.5) == 2
    assert selector_oracles.chunkkv_count(100, 0.25) == 3
