"""Work that is done in steps: what it yields, how it ends, and how long it took itself."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace

import pytest

from kvferry.core import progress
from kvferry.core.progress import Progress, Stopwatch, finish, passing_on, relay


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=made))
    return made


class Work:
    """Three steps of two seconds, and two more to the end."""

    def __init__(self, clock: Clock, *, fails: bool = False) -> None:
        self._clock = clock
        self._fails = fails
        self.closed = False

    def steps(self) -> Generator[int, None, str]:
        try:
            for step in range(3):
                self._clock.now += 2
                yield step
            self._clock.now += 2
            if self._fails:
                raise LookupError
            return "made"
        finally:
            self.closed = True


def test_a_relay_yields_what_it_is_told_to_and_returns_what_was_made(clock: Clock) -> None:
    seen: list[str] = []
    assert finish(relay(Work(clock).steps(), lambda step: f"step {step}"), seen.append) == "made"
    assert seen == ["step 0", "step 1", "step 2"]


def test_work_that_nobody_counts_shows_the_same_progress(clock: Clock) -> None:
    seen: list[Progress] = []
    assert finish(passing_on(Work(clock).steps(), Progress("method", 1, 4)), seen.append) == "made"
    assert seen == [Progress("method", 1, 4)] * 3


def test_a_stopwatch_counts_the_work_and_not_what_happens_in_between(clock: Clock) -> None:
    watch, seen = Stopwatch(), []

    def elsewhere(step: int) -> None:
        seen.append(step)
        clock.now += 1000

    assert finish(watch.timing(Work(clock).steps()), elsewhere) == "made"
    assert (seen, watch.seconds, watch.ms) == ([0, 1, 2], 8.0, 8000.0)
    finish(watch.timing(Work(clock).steps()))
    assert watch.seconds == 16.0


def test_a_step_that_fails_took_its_time_too(clock: Clock) -> None:
    watch = Stopwatch()
    with pytest.raises(LookupError):
        finish(watch.timing(Work(clock, fails=True).steps()))
    assert watch.seconds == 8.0


@pytest.mark.parametrize("how", ["relay", "passing_on", "timing"])
def test_work_that_is_given_up_is_closed(clock: Clock, how: str) -> None:
    work = Work(clock)
    given: dict[str, Generator[object, None, str]] = {
        "relay": relay(work.steps(), str),
        "passing_on": passing_on(work.steps(), Progress("method", 0, 1)),
        "timing": Stopwatch().timing(work.steps()),
    }
    next(given[how])
    assert not work.closed
    given[how].close()
    assert work.closed
