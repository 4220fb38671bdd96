"""What goes first, what never goes, and what the clocks have to do with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import TooLargeError
from kvferry.core.retention import Retention

A, B, C = b"a", b"b", b"c"


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def filled(clock: Clock, budget: int = 100, ttl: float = 0.0) -> Retention:
    """A, B and C of 30 bytes each, one second apart."""
    kept = Retention(budget, ttl, clock)
    for artifact_id in (A, B, C):
        clock.now += 1
        kept.add(artifact_id, 30)
    return kept


# Least recently used first


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(0, []), (10, []), (11, [A]), (40, [A]), (41, [A, B]), (70, [A, B]), (71, [A, B, C]), (100, [A, B, C])],
)
def test_the_oldest_go_and_no_more_than_must(clock: Clock, needed: int, expected: list[bytes]) -> None:
    kept = filled(clock)
    assert kept.victims(needed) == expected
    # Choosing changes nothing.
    assert kept.total == 90


def test_use_decides_and_not_arrival(clock: Clock) -> None:
    kept = filled(clock)
    clock.now += 1
    kept.touch(A)
    assert kept.victims(70) == [B, C]
    clock.now += 1
    kept.touch(B)
    assert kept.victims(100) == [C, A, B]


def test_an_artifact_that_is_counted_again_has_its_new_size(clock: Clock) -> None:
    kept = filled(clock)
    kept.add(A, 50)
    assert kept.total == 110
    kept.remove(B)
    assert kept.total == 80
    kept.remove(B)
    kept.touch(B)
    assert kept.total == 80


def test_ages_from_before_the_start_count(clock: Clock) -> None:
    kept = filled(clock)
    kept.add(C, 30, idle_seconds=500)
    assert kept.victims(11) == [C]
    # A file from the future is as good as one from now.
    kept.add(C, 30, idle_seconds=-500)
    clock.now += 1
    kept.touch(A)
    assert kept.victims(100) == [B, C, A]


def test_no_budget_keeps_everything(clock: Clock) -> None:
    assert filled(clock, budget=0).victims(2**60) == []


# What does not fit


def test_what_can_never_fit_evicts_nothing(clock: Clock) -> None:
    kept = filled(clock)
    with pytest.raises(TooLargeError, match="101 bytes do not fit: 0 are in use and the budget is 100") as caught:
        kept.victims(101)
    assert caught.value.fields == {"field": "max_store_bytes", "value": 101, "used": 0, "limit": 100}
    assert kept.total == 90


def test_what_is_pinned_is_in_the_way(clock: Clock) -> None:
    kept = filled(clock)
    with kept.pinned(A):
        assert kept.victims(70) == [B, C]
        with pytest.raises(TooLargeError, match="71 bytes do not fit: 30 are in use"):
            kept.victims(71)
        with kept.pinned(A), kept.pinned(C):
            assert kept.victims(40) == [B]
        # One of two pins is gone, the other holds.
        assert kept.victims(40) == [B]
        assert kept.victims(70) == [B, C]
    assert kept.victims(71) == [A, B, C]


def test_a_pin_ends_with_an_exception_too(clock: Clock) -> None:
    kept = filled(clock)
    with pytest.raises(ZeroDivisionError), kept.pinned(A):
        _ = 1 // 0
    assert kept.victims(11) == [A]


def test_a_pin_may_outlive_its_artifact_and_come_before_it(clock: Clock) -> None:
    kept = Retention(100, 0.0, clock)
    with kept.pinned(A):
        kept.add(A, 60)
        kept.remove(A)
        kept.add(A, 60)
        with pytest.raises(TooLargeError):
            kept.victims(60)
    assert kept.victims(60) == [A]


# Time to live


def test_what_is_unused_for_longer_expires_oldest_first(clock: Clock) -> None:
    kept = filled(clock, ttl=10)
    clock.now = 1011
    assert kept.expired() == []
    clock.now = 1011.5
    assert kept.expired() == [A]
    kept.touch(A)
    assert kept.expired() == []
    clock.now = 1014
    assert kept.expired() == [B, C]
    with kept.pinned(B):
        assert kept.expired() == [C]
    clock.now = 1021.6
    assert kept.expired() == [B, C, A]


def test_without_a_time_to_live_nothing_expires(clock: Clock) -> None:
    kept = filled(clock)
    clock.now += 1e9
    assert kept.expired() == []


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_wall_clock_that_jumps_expires_nothing(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    kept = Retention(100, 60.0)
    kept.add(A, 30)
    wall: Callable[[], float] = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    kept.add(B, 30)
    assert kept.expired() == []
    assert kept.victims(60) == [A]


# Any history


@settings(derandomize=True, database=None, deadline=None)
@given(
    budget=st.integers(1, 60),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.booleans()), max_size=30),
    pins=st.sets(st.integers(0, 5)),
)
def test_after_making_room_it_fits_and_every_victim_was_needed(
    budget: int, steps: list[tuple[int, int, bool]], pins: set[int]
) -> None:
    clock = Clock()
    kept = Retention(budget, 0.0, clock)
    order: dict[bytes, int] = {}
    for name, size, used in steps:
        clock.now += 1
        artifact_id = bytes([name])
        try:
            victims = [] if artifact_id in order else kept.victims(size)
        except TooLargeError:
            assert size > budget
            continue
        for victim in victims:
            kept.remove(victim)
            del order[victim]
        if artifact_id not in order:
            kept.add(artifact_id, size)
            order[artifact_id] = size
            assert kept.total <= budget
        elif used:
            kept.touch(artifact_id)
            order[artifact_id] = order.pop(artifact_id)
    held = sum(order[name] for name in order if name[0] in pins)
    with contextlib.ExitStack() as stack:
        for name in pins:
            stack.enter_context(kept.pinned(bytes([name])))
        if held < budget:
            victims = kept.victims(budget - held)
            free = [name for name in order if name[0] not in pins]
            assert victims == free[: len(victims)]
            assert kept.total - sum(order[name] for name in victims) <= held
        with pytest.raises(TooLargeError):
            kept.victims(budget - held + 1)
