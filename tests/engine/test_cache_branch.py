"""Branches: the stored prefix never changes, questions do not see each other, what cannot be done is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import finish
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseBranch, DenseLayer
from kvferry.engine.generate import Answer, Sampling
from kvferry.engine.model import LoadedModel

DOCUMENT = "The access code of the north warehouse is 4417. " * 3
QUESTIONS = ("What is the access code?", "Who keeps the keys, and when?")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", heads=9, kv_heads=3, seed=5)


@pytest.fixture(scope="module")
def prefix(model: LoadedModel) -> PrefixCache:
    return finish(model.prefill(model.prompt.prefix(DOCUMENT)))


@pytest.fixture(scope="module")
def selected(prefix: PrefixCache) -> PrefixCache:
    rng = np.random.default_rng(1)
    heads = prefix.layers[0].keys.shape[1]
    rows = [np.stack([np.sort(rng.permutation(prefix.offset)[:20]) for _ in range(heads)]) for _ in prefix.layers]
    return prefix.select([mx.array(item.astype(np.int32)) for item in rows])


def contents(prefix: PrefixCache) -> list[bytes]:
    arrays = [array for layer in prefix.layers for array in (layer.keys, layer.values)]
    return [np.array(array).tobytes() for array in arrays]


def fresh_rows(layer: DenseLayer, count: int) -> tuple[mx.array, mx.array]:
    _, heads, _, width = layer.keys.shape
    start = float(count)
    rows = mx.arange(start, start + heads * count * width).reshape(1, heads, count, width)
    return rows, -rows


@pytest.mark.parametrize("which", ["prefix", "selected"])
def test_questions_do_not_see_each_other(model: LoadedModel, which: str, request: pytest.FixtureRequest) -> None:
    stored: PrefixCache = request.getfixturevalue(which)
    before = contents(stored)
    first, second = (model.prompt.fresh(question) for question in QUESTIONS)
    sampling = Sampling(max_tokens=20)
    answers = [finish(model.answer(ids, stored, stored.offset, sampling)) for ids in (first, second, first)]
    assert answers[0] == answers[2]
    assert answers[0].token_ids != answers[1].token_ids
    assert contents(stored) == before


@pytest.mark.parametrize("which", ["prefix", "selected"])
def test_interleaved_answers_are_those_of_each_alone(
    model: LoadedModel, which: str, request: pytest.FixtureRequest
) -> None:
    stored: PrefixCache = request.getfixturevalue(which)
    before = contents(stored)
    runs = [(model.prompt.fresh(text), Sampling(max_tokens=16, temperature=0.7, seed=9)) for text in QUESTIONS]
    alone: list[Answer] = [finish(model.answer(ids, stored, stored.offset, sampling)) for ids, sampling in runs]
    together: dict[int, Answer] = {}
    live = dict(enumerate(model.answer(ids, stored, stored.offset, sampling) for ids, sampling in runs))
    while live:
        for number, generator in list(live.items()):
            try:
                next(generator)
            except StopIteration as end:
                together[number] = end.value
                del live[number]
    assert [together[number] for number in range(2)] == alone
    assert alone[0].token_ids != alone[1].token_ids
    assert contents(stored) == before


def test_fresh_rows_follow_the_prefix_rows(selected: PrefixCache) -> None:
    layer = selected.layers[0]
    branch = selected.branch(8)[0]
    first, second = fresh_rows(layer, 3), fresh_rows(layer, 2)
    branch.update_and_fetch(*first)
    keys, values = branch.update_and_fetch(*second)
    assert np.array_equal(np.array(keys), np.concatenate([layer.keys, first[0], second[0]], axis=2))
    assert np.array_equal(np.array(values), np.concatenate([layer.values, first[1], second[1]], axis=2))
    assert branch.rows == 20 + 5
    assert branch.offset == branch.size() == selected.offset + 5


def test_a_branch_has_the_prefix_before_any_fresh_row(selected: PrefixCache) -> None:
    branch = selected.branch(8)[0]
    keys, values = branch.keys_and_values()
    assert np.array_equal(np.array(keys), np.array(selected.layers[0].keys))
    assert np.array_equal(np.array(values), np.array(selected.layers[0].values))
    assert not branch.empty()
    assert (branch.rows, branch.offset, branch.nbytes) == (20, selected.offset, 0)


@pytest.mark.parametrize("room", [0, 1, 2, 7])
def test_growth_past_the_announced_room(prefix: PrefixCache, room: int) -> None:
    layer = prefix.layers[0]
    branch = prefix.branch(room)[0]
    expected = np.array(layer.keys)
    for count in (2, 1, 1, 5, 1):
        keys, values = fresh_rows(layer, count)
        got, negated = branch.update_and_fetch(keys, values)
        expected = np.concatenate([expected, keys], axis=2)
        assert np.array_equal(np.array(got), expected)
        assert np.array_equal(np.array(negated)[:, :, prefix.offset :], -expected[:, :, prefix.offset :])
    assert branch.rows == prefix.offset + 10


def test_announced_room_is_never_outgrown(prefix: PrefixCache) -> None:
    branch = prefix.branch(6)[0]
    held = []
    for count in (3, 1, 1, 1):
        branch.update_and_fetch(*fresh_rows(prefix.layers[0], count))
        held.append(branch.nbytes)
    assert len(set(held)) == 1


def test_trimmed_rows_are_gone(prefix: PrefixCache, model: LoadedModel) -> None:
    wrong, right = [3, 1, 4, 1, 5], [9, 2, 6]
    branch, untouched = prefix.branch(16), prefix.branch(16)
    model.forward(wrong[:2], branch)
    model.forward(wrong[2:], branch)
    assert {layer.trim(5) for layer in branch} == {5}
    assert {layer.offset for layer in branch} == {prefix.offset}
    logits = np.array(model.forward(right, branch))
    assert np.array_equal(logits, np.array(model.forward(right, untouched)))


@pytest.mark.parametrize("count", [4, 100, -1])
def test_trimming_never_reaches_the_prefix(selected: PrefixCache, count: int) -> None:
    branch = selected.branch(8)[0]
    branch.update_and_fetch(*fresh_rows(selected.layers[0], 3))
    assert branch.is_trimmable()
    with pytest.raises(InvalidRequestError, match=f"trim: {count} rows, but the branch has 3 fresh ones"):
        branch.trim(count)
    assert (branch.rows, branch.offset) == (23, selected.offset + 3)
    assert branch.trim(0) == 0


def test_masks(selected: PrefixCache) -> None:
    branch = selected.branch(8)[0]
    branch.update_and_fetch(*fresh_rows(selected.layers[0], 2))
    assert branch.make_mask(1) is None
    assert branch.make_mask(3) == "causal"
    mask = np.array(branch.make_mask(3, return_array=True))
    assert mask.dtype == bool
    assert np.array_equal(mask, np.tril(np.ones((3, 20 + 2 + 3), dtype=bool), k=22))


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_window_is_refused(prefix: PrefixCache, tokens: int) -> None:
    with pytest.raises(ModelError, match="window of 128 cannot run on a carried cache"):
        prefix.branch(8)[0].make_mask(tokens, window_size=128)


def test_mlx_lm_takes_branches_for_plain_caches(prefix: PrefixCache) -> None:
    branch = prefix.branch(8)[0]
    # With these names mlx-lm would read K and V as quantised triples, or merge branches into a batch.
    assert not any(hasattr(branch, name) for name in ("bits", "group_size", "merge"))
    mx.eval(branch.state)


def test_a_copied_branch_goes_its_own_way(prefix: PrefixCache, model: LoadedModel) -> None:
    branch = prefix.branch(8)
    model.forward([3, 1], branch)
    twin = copy.deepcopy(branch)
    model.forward([4, 4, 4], twin)
    plain = prefix.branch(8)
    model.forward([3, 1], plain)
    assert np.array_equal(np.array(model.forward([5], branch)), np.array(model.forward([5], plain)))


def test_bytes_are_those_of_the_arrays(prefix: PrefixCache, selected: PrefixCache) -> None:
    # 2 layers, K and V, 3 KV heads, head dimension 16, fp32; a position is an int32 for every KV head.
    assert prefix.nbytes == 2 * 2 * 3 * prefix.offset * 16 * 4
    assert selected.nbytes == 2 * (2 * 3 * 20 * 16 * 4 + 3 * 20 * 4)
    assert selected.layers[0].nbytes * 2 == selected.nbytes
    branch = selected.branch(8)[0]
    branch.update_and_fetch(*fresh_rows(selected.layers[0], 1))
    assert branch.nbytes == 2 * 3 * (20 + 8) * 16 * 4


def test_branching_holds_no_copy_until_it_is_used(prefix: PrefixCache) -> None:
    branches = [prefix.branch(512) for _ in range(10)]
    assert sum(layer.nbytes for branch in branches for layer in branch) == 0
    assert all(isinstance(layer, DenseBranch) for branch in branches for layer in branch)
