"""What every method that keeps some rows must obey, whatever its rule: one matrix over the registry.

Oracle for the logits: the model's own layers on mlx-lm's full cache, the dropped rows masked out per layer and head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from kvferry.core import progress
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.cache import PrefixCache, frozen
from kvferry.engine.model import LoadedModel
from kvferry.engine.packing import unpack
from kvferry.engine.ragged import RaggedLayer
from kvferry.receiver import reconstruct
from kvferry.sender import artifacts, registry
from kvferry.sender.kv.selecting import SelectingMethod, Subject

SELECTORS = [method for method in registry.METHODS if isinstance(method, SelectingMethod)]
RENUMBERING = ("streamingllm",)
BUDGET = 64
TEXT = "The access code of the north warehouse is 4417. The ferry carries eleven crates of paper at dawn. " * 5
QUESTION = "Who keeps the keys of the south warehouse?"
TOLERANCE = 1e-5
# What a small test needs to be a test: warm-ups and chunks shorter than the document.
PARAMETERS: dict[str, dict[str, Any]] = {"qfilters-svd": {"warmup": 32}, "chunkkv": {"chunk": 8}, "B9": {"bits": 8}}

each = pytest.mark.parametrize("method", SELECTORS, ids=[method.info.id for method in SELECTORS])


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel], calibrated: Callable[[LoadedModel], None]) -> LoadedModel:
    found = tiny_model("llama", layers=3, heads=6, kv_heads=2, head_dim=32)
    calibrated(found)
    return found


@pytest.fixture
def made(workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]) -> Callable[..., PrefixCache]:
    """Return a factory: the cache that a method makes, and the reading that it was made from."""
    shop = workshop(model)

    def make(method: SelectingMethod, text: str = TEXT, **given: Any) -> PrefixCache:
        reading = shop.reading(text, question=QUESTION if method.info.aware else None)
        options = {**PARAMETERS.get(method.info.id, {}), "budget": BUDGET, **given}
        cache: PrefixCache = drain(method.make(reading, registry.check_parameters(method, options))).cache
        return cache

    return make


def ids_of(model: LoadedModel, text: str = TEXT) -> list[int]:
    from kvferry.engine.prompt import DEFAULT_SYSTEM

    return list(model.prompt.prefix(text, DEFAULT_SYSTEM))


def head_positions(cache: PrefixCache) -> list[list[np.ndarray[Any, Any]]]:
    """For every layer and KV head, where the kept rows stood."""
    found = []
    for layer in cache.layers:
        heads = layer.heads if isinstance(layer, RaggedLayer) else [layer] * layer.kv_heads
        rows = []
        for number, head in enumerate(heads):
            held = head.positions
            row = number if not isinstance(layer, RaggedLayer) else 0
            rows.append(np.arange(head.rows) if held is None else np.array(held)[row])
        found.append(rows)
    return found


def distance(logits: mx.array, expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(np.array(logits) - expected).max() / np.abs(expected).max())


def test_there_is_something_to_test() -> None:
    assert len(SELECTORS) > 10


@each
def test_rows_are_sorted_unique_and_within_the_budget(
    method: SelectingMethod, made: Callable[..., PrefixCache], model: LoadedModel
) -> None:
    cache = made(method)
    tokens = len(ids_of(model))
    assert tokens >= 200
    counts = cache.row_counts
    assert min(counts) >= 1
    # Budgets that are spread over layers by a published rule may end a few rows off; nothing else may go over.
    assert sum(counts) / len(counts) <= BUDGET * (1.1 if method.info.id.startswith("B6") else 1.0)
    # Whole chunks may leave some of it over; every other rule spends it to the row.
    if method.info.id not in ("B6", "B6-aware", "chunkkv"):
        assert sum(counts) == BUDGET * len(counts)
    assert len(set(counts)) == 1 or method.ragged or method.info.id.startswith("B6")
    for heads in head_positions(cache):
        for rows in heads:
            assert (np.diff(rows) > 0).all()
            assert rows[0] >= 0
            assert rows[-1] < tokens


@each
def test_logits_are_those_of_the_full_cache_with_the_rows_masked(
    method: SelectingMethod, made: Callable[..., PrefixCache], model: LoadedModel, masked_logits: Callable[..., Any]
) -> None:
    if method.info.id in RENUMBERING or method.info.id == "B9":
        pytest.skip("not a plain selection: see the tests of renumbering and of packing")
    cache = made(method)
    fresh = model.prompt.fresh(QUESTION)
    logits = model.forward(fresh, cache.branch(len(fresh)))
    assert distance(logits, masked_logits(model.model, ids_of(model), fresh, head_positions(cache))) <= TOLERANCE


@each
def test_positions_stay_true_through_a_long_answer(
    method: SelectingMethod, made: Callable[..., PrefixCache], model: LoadedModel
) -> None:
    """120 decode steps behind the kept rows, then the branch is frozen: what a second eviction would start from."""
    cache = made(method)
    branches = cache.branch(8)
    token = 5
    for _ in range(120):
        token = int(mx.argmax(model.forward([token], branches)[-1]).item())
    again = frozen(branches)
    assert again.offset == cache.offset + 120
    fresh = np.arange(cache.offset, again.offset)
    for before, after in zip(head_positions(cache), head_positions(again), strict=True):
        for rows, longer in zip(before, after, strict=True):
            assert np.array_equal(longer, np.concatenate([rows, fresh]))
    # And what was frozen answers as the branch does.
    expected = np.array(model.forward([7, 9], branches))
    assert distance(model.forward([7, 9], again.branch(2)), expected) <= TOLERANCE


@each
def test_a_second_eviction_drops_the_rows_that_it_names(
    method: SelectingMethod, made: Callable[..., PrefixCache], model: LoadedModel
) -> None:
    if method.info.id == "B9" or method.info.id in RENUMBERING:
        pytest.skip("packed rows are selected in the tests of packing; renumbered ones stand where they are read")
    cache = made(method)
    fresh = [11, 3, 8]
    branches = cache.branch(3)
    mx.eval(model.forward(fresh, branches))
    longer = frozen(branches)
    kept = [[np.sort(rows)[1::2] for rows in heads] for heads in head_positions(longer)]
    smaller = longer.select([[mx.array(rows.astype(np.int32)) for rows in heads] for heads in kept])
    assert smaller.offset == len(ids_of(model)) + 3
    found = head_positions(smaller)
    assert all(
        np.array_equal(a, b) for one, two in zip(found, kept, strict=True) for a, b in zip(one, two, strict=True)
    )
    for layer, before in zip(smaller.layers, longer.layers, strict=True):
        assert layer.nbytes < before.nbytes


@each
def test_the_dense_cache_and_the_choice_do_not_change(
    method: SelectingMethod, workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]
) -> None:
    reading = workshop(model).reading(TEXT, question=QUESTION if method.info.aware else None)
    given = registry.check_parameters(method, {**PARAMETERS.get(method.info.id, {}), "budget": BUDGET})
    dense = drain(reading.prefill())
    before = [np.array(array) for array in dense.arrays]
    first, second = (drain(method.make(reading, given)).cache for _ in range(2))
    assert all(np.array_equal(np.array(array), old) for array, old in zip(dense.arrays, before, strict=True))
    assert first.row_counts == second.row_counts
    assert all(
        np.array_equal(np.array(one), np.array(two)) for one, two in zip(first.arrays, second.arrays, strict=True)
    )


@each
@pytest.mark.parametrize("packing", [{}, {"bits": 8}, {"key_bits": 8, "value_bits": 4}])
def test_what_crosses_is_rebuilt_bit_for_bit(
    method: SelectingMethod, workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any], packing: Any
) -> None:
    shop = workshop(model, chunk_bytes=4096)
    reading = shop.reading(TEXT, question=QUESTION if method.info.aware else None)
    options = {**PARAMETERS.get(method.info.id, {}), "budget": BUDGET, **packing}
    given = registry.check_parameters(method, options)
    cache = drain(method.make(reading, given)).cache
    stored = drain(shop.maker.make(method, reading, given)).stored
    rebuilt = reconstruct.prefix_cache(stored.manifest, stored.sections)
    assert rebuilt.offset == cache.offset
    assert rebuilt.row_counts == cache.row_counts
    fresh = model.prompt.fresh(QUESTION)
    here, there = (np.array(model.forward(fresh, one.branch(len(fresh)))) for one in (cache, rebuilt))
    assert np.array_equal(here, there)


@each
def test_packed_rows_are_near_the_dense_ones(method: SelectingMethod, made: Callable[..., PrefixCache]) -> None:
    """Packing follows the selection: the same rows, to 8 bits."""
    if method.info.id == "B9":
        pytest.skip("always packed")
    plain, packed = made(method), made(method, bits=8)
    assert packed.row_counts == plain.row_counts
    for dense, small in zip(plain.layers, packed.layers, strict=True):
        pairs = (
            zip(dense.heads, small.heads, strict=True) if isinstance(dense, RaggedLayer) else [(dense, small)]  # type: ignore[attr-defined]
        )
        for one, two in pairs:
            for name in ("keys", "values"):
                expected, actual = np.array(getattr(one, name)), np.array(unpack(getattr(two, name).packed))
                spread = expected.max() - expected.min()
                assert np.abs(expected - actual).max() <= spread / 255


@each
@pytest.mark.parametrize("tokens", [1, 2, 5, BUDGET - 1, BUDGET, BUDGET + 1])
def test_short_prefixes_keep_at_least_a_row_or_are_refused(
    method: SelectingMethod, model: LoadedModel, drain: Callable[..., Any], tokens: int
) -> None:
    ids = ids_of(model)[:tokens]
    cache = drain(model.prefill(ids))
    given = registry.check_parameters(method, {**PARAMETERS.get(method.info.id, {}), "budget": BUDGET})
    question = QUESTION if method.info.aware else None
    subject = Subject(cache, model, ids, question, method.calibrated(model, given))
    try:
        kept = drain(method.rank(subject, given))(min(BUDGET, tokens))
    except InvalidRequestError:
        # Below what the method needs to see at all; a prompt that is nearly as long as the budget is no such case.
        if tokens < 10:
            return
        raise
    for heads in kept:
        for rows in heads:
            assert 1 <= len(rows) <= tokens
            assert len(rows) <= BUDGET or method.ragged or method.info.id.startswith("B6")
            assert (np.diff(rows) > 0).all()
            assert 0 <= rows.min() <= rows.max() < tokens


@each
def test_queries_are_not_ranked_by_where_the_model_attends_in_a_way_of_its_own(
    method: SelectingMethod,
    workshop: Callable[..., Any],
    model: LoadedModel,
    drain: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused by name before anything is read: what the model computes there is not what was proven."""
    other = replace(model, profile=replace(model.profile, attention="it has a mask of its own"))
    given = registry.check_parameters(method, {**PARAMETERS.get(method.info.id, {}), "budget": BUDGET})
    reading = workshop(other).reading(TEXT, question=QUESTION if method.info.aware else None)
    if method.info.id in ("B3", "B4", "streamingllm", "l2norm", "keydiff", "qfilters", "qfilters-svd"):
        assert set(drain(method.make(reading, given)).cache.row_counts) == {BUDGET}
        return
    monkeypatch.setattr(LoadedModel, "prefill", lambda *_: pytest.fail("the model ran"))
    named = "snapkv" if method.info.id == "B9" else method.info.name
    with pytest.raises(ModelError, match=f"^model: .* method {named} .*: it has a mask of its own"):
        drain(method.make(reading, given))


def test_chunks_scored_by_keys_need_no_queries(
    workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]
) -> None:
    other = replace(model, profile=replace(model.profile, attention="it has a mask of its own"))
    given = registry.check_parameters(registry.find("chunkkv"), {"scorer": "l2norm", "chunk": 1, "budget": BUDGET})
    made = drain(registry.find("chunkkv").make(workshop(other).reading(TEXT), given))
    assert set(made.cache.row_counts) == {BUDGET}


def test_other_work_between_steps_is_not_the_methods_time(
    workshop: Callable[..., Any], model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gives other answers a turn after every step; a clock that only moves then must not be read."""
    clock = [0.0]
    for module in (artifacts, progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    steps = workshop(model).steps("B5", TEXT, budget=BUDGET)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            account = end.value.account
            break
        clock[0] += 1000.0
    assert clock[0] > 1000.0
    assert account.method_ms == 0.0


@each
@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"budget": -0.1}, "budget"),
        ({"budget": "many"}, "budget"),
        ({"bits": 7}, "bits"),
        ({"group": 48}, "group"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_parameters_are_refused_by_name(method: SelectingMethod, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        registry.check_parameters(method, given)


@each
def test_a_budget_of_bytes_holds(
    method: SelectingMethod, workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]
) -> None:
    shop = workshop(model, chunk_bytes=4096)
    reading = shop.reading(TEXT, question=QUESTION if method.info.aware else None)
    limit = 60_000
    given = registry.check_parameters(method, {**PARAMETERS.get(method.info.id, {}), "budget": "60KB"})
    stored = drain(shop.maker.make(method, reading, given)).stored
    length = stored.manifest.payload.length
    # As much as fits: another row a head, or another chunk of them, would not.
    step = getattr(given, "chunk", 1)
    row_bytes = sum(layer.nbytes for layer in reconstruct.prefix_cache(stored.manifest, stored.sections).layers) / max(
        layer.rows for layer in stored.manifest.layout
    )
    assert limit - 2 * step * row_bytes <= length <= limit


@each
def test_every_method_says_what_it_is(method: SelectingMethod) -> None:
    assert method.info.form == "kv"
    assert method.info.source
    assert 10 < len(method.info.summary) < 120
    defaults = msgspec.convert({}, method.parameters)
    assert registry.check_parameters(method, {}) == defaults
