"""Caches kept at hand: what fits stays, the least recently used goes first, and the sum is that of the arrays."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.residency import Residency

# One layer, one head, K and V of one fp32 column each: 8 bytes a row.
ROW = 8


def cache(rows: int) -> PrefixCache:
    column = mx.zeros((1, 1, rows, 1))
    return PrefixCache((DenseLayer(column, column),), rows)


CACHES = {rows: cache(rows) for rows in range(1, 9)}


def held(residency: Residency, keys: str) -> str:
    """Return the keys that are held, without marking any as used."""
    return "".join(key for key in keys if key.encode() in residency._held)


def test_what_was_put_is_found() -> None:
    residency = Residency(100 * ROW)
    residency.put(b"a", CACHES[3])
    assert residency.get(b"a") is CACHES[3]
    assert residency.get(b"b") is None
    assert residency.nbytes == 3 * ROW


def test_the_budget_is_reached_exactly_and_never_passed() -> None:
    residency = Residency(5 * ROW)
    residency.put(b"a", CACHES[2])
    residency.put(b"b", CACHES[3])
    assert held(residency, "ab") == "ab"
    assert residency.nbytes == 5 * ROW
    residency.put(b"c", CACHES[1])
    assert held(residency, "abc") == "bc"
    assert residency.nbytes == 4 * ROW


def test_the_least_recently_used_goes_first() -> None:
    residency = Residency(3 * ROW)
    for key in (b"a", b"b", b"c"):
        residency.put(key, CACHES[1])
    residency.get(b"a")
    residency.put(b"d", CACHES[1])
    assert held(residency, "abcd") == "acd"
    residency.put(b"e", CACHES[2])
    assert held(residency, "abcde") == "de"


def test_a_look_at_what_is_not_there_changes_nothing() -> None:
    residency = Residency(2 * ROW)
    residency.put(b"a", CACHES[1])
    for number in range(1000):
        residency.get(str(number).encode())
    assert residency.nbytes == ROW
    residency.put(b"b", CACHES[2])
    assert held(residency, "ab") == "b"


def test_as_much_goes_as_is_needed_and_no_more() -> None:
    residency = Residency(6 * ROW)
    for key, rows in ((b"a", 1), (b"b", 2), (b"c", 3)):
        residency.put(key, CACHES[rows])
    residency.put(b"d", CACHES[3])
    assert held(residency, "abcd") == "cd"


def test_what_is_larger_than_the_budget_is_not_kept_and_pushes_nothing_out() -> None:
    residency = Residency(4 * ROW)
    residency.put(b"a", CACHES[2])
    residency.put(b"b", CACHES[5])
    assert held(residency, "ab") == "a"
    assert residency.nbytes == 2 * ROW


def test_a_new_cache_under_a_known_key_replaces_the_old_one() -> None:
    residency = Residency(4 * ROW)
    residency.put(b"a", CACHES[3])
    residency.put(b"a", CACHES[4])
    assert residency.get(b"a") is CACHES[4]
    assert residency.nbytes == 4 * ROW
    # What cannot be kept must not leave its predecessor to be taken for it.
    residency.put(b"a", CACHES[5])
    assert residency.get(b"a") is None
    assert residency.nbytes == 0


def test_a_budget_of_nothing_keeps_nothing() -> None:
    residency = Residency(0)
    residency.put(b"a", CACHES[1])
    assert residency.get(b"a") is None
    assert residency.nbytes == 0


def test_what_is_dropped_is_gone() -> None:
    residency = Residency(4 * ROW)
    residency.put(b"a", CACHES[1])
    residency.drop(b"a")
    residency.drop(b"a")
    assert residency.get(b"a") is None
    assert residency.nbytes == 0


def test_positions_count() -> None:
    positions = mx.zeros((1, 4), dtype=mx.int32)
    column = mx.zeros((1, 1, 4, 1))
    residency = Residency(1000)
    residency.put(b"a", PrefixCache((DenseLayer(column, column, positions),), 9))
    assert residency.nbytes == 4 * ROW + 4 * 4


@settings(max_examples=60)
@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.sampled_from("abcde"), st.integers(1, 8))),
)
def test_it_behaves_as_a_list_in_order_of_use(budget: int, actions: list[tuple[str, str, int]]) -> None:
    residency = Residency(budget * ROW)
    model: OrderedDict[str, int] = OrderedDict()
    for action, key, rows in actions:
        if action == "put":
            residency.put(key.encode(), CACHES[rows])
            model.pop(key, None)
            if rows <= budget:
                while sum(model.values()) + rows > budget:
                    model.popitem(last=False)
                model[key] = rows
        elif action == "get":
            got = residency.get(key.encode())
            assert got is (CACHES[model[key]] if key in model else None)
            if key in model:
                model.move_to_end(key)
        else:
            residency.drop(key.encode())
            model.pop(key, None)
        assert residency.nbytes == sum(model.values()) * ROW <= budget * ROW
        assert held(residency, "abcde") == "".join(sorted(model))


@pytest.mark.parametrize("budget", [7, 8, 9])
def test_an_item_of_the_budgets_size_is_kept(budget: int) -> None:
    residency = Residency(budget)
    residency.put(b"a", CACHES[1])
    assert (residency.get(b"a") is not None) is (budget >= ROW)
