"""Texts at hand: within the budget, the last used ones, and never under another stamp."""

from __future__ import annotations

import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvferry.sender.text_cache import TextCache

SMALL = sys.getsizeof("a" * 100)


def steps(seed: int, count: int) -> list[list[int]]:
    """Return random steps: which text, whether it is put, and its length."""
    found: list[list[int]] = np.random.default_rng(seed).integers([9, 2, 300], size=(count, 3)).tolist()
    return found


def test_a_text_is_there_under_its_stamp_alone() -> None:
    cache = TextCache(10 * SMALL)
    cache.put(b"k", (1, 2), "a" * 100)
    assert cache.get(b"k", (1, 2)) == "a" * 100
    assert cache.get(b"k", (1, 3)) is None
    assert cache.get(b"l", (1, 2)) is None
    cache.put(b"k", (1, 3), "b" * 100)
    assert (cache.get(b"k", (1, 2)), cache.get(b"k", (1, 3))) == (None, "b" * 100)
    assert cache.nbytes == SMALL


def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    cache = TextCache(3 * SMALL)
    for name in "xyz":
        cache.put(name.encode(), 0, name * 100)
    cache.get(b"x", 0)
    cache.put(b"w", 0, "w" * 100)
    assert [name for name in "wxyz" if cache.get(name.encode(), 0)] == ["w", "x", "z"]


def test_memory_counts_and_not_characters() -> None:
    # Four bytes a character in memory, whatever the file takes.
    wide = "🚢" * 100
    cache = TextCache(2 * SMALL)
    cache.put(b"narrow", 0, "a" * 100)
    cache.put(b"wide", 0, wide)
    assert cache.get(b"wide", 0) is None
    assert cache.get(b"narrow", 0) is not None
    # What grew out of the budget is not kept in its old form either.
    cache.put(b"narrow", 1, wide)
    assert (cache.get(b"narrow", 0), cache.nbytes) == (None, 0)


def test_a_long_story_agrees_with_a_list_in_order_of_use() -> None:
    cache, model = TextCache(5 * SMALL), OrderedDict[bytes, str]()
    for number, puts, length in steps(3, 2000):
        key = bytes([number])
        if puts:
            text = chr(97 + length % 26) * length
            cache.put(key, 0, text)
            model.pop(key, None)
            if sys.getsizeof(text) <= 5 * SMALL:
                model[key] = text
            while sum(map(sys.getsizeof, model.values())) > 5 * SMALL:
                model.popitem(last=False)
        else:
            assert cache.get(key, 0) == model.get(key)
            if key in model:
                model.move_to_end(key)
        assert cache.nbytes == sum(map(sys.getsizeof, model.values())) <= 5 * SMALL


def test_threads_leave_the_account_in_order() -> None:
    cache = TextCache(5 * SMALL)

    def work(seed: int) -> None:
        for number, puts, length in steps(seed, 500):
            if puts:
                cache.put(bytes([number]), 0, "a" * length)
            else:
                cache.get(bytes([number]), 0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(before)
    held = [text for number in range(9) if (text := cache.get(bytes([number]), 0)) is not None]
    assert cache.nbytes == sum(map(sys.getsizeof, held)) <= 5 * SMALL
