"""Work that reports its steps, as a generator: order, results, errors, and an end in between."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvferry.core.progress import finish
from kvferry.sender.text.stepped import stepped


@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_report_is_a_step_and_the_result_is_returned(count: int) -> None:
    def work(report: Callable[[int], None]) -> str:
        for step in range(count):
            report(step)
        return "done"

    seen: list[int] = []
    assert finish(stepped(work), seen.append) == "done"
    assert seen == list(range(count))


def test_the_work_waits_until_the_next_step_is_asked_for() -> None:
    log: list[str] = []

    def work(report: Callable[[int], None]) -> None:
        for step in range(3):
            log.append(f"work {step}")
            report(step)

    finish(stepped(work), lambda step: log.append(f"seen {step}"))
    assert log == ["work 0", "seen 0", "work 1", "seen 1", "work 2", "seen 2"]


def test_nothing_runs_before_the_first_step_is_asked_for() -> None:
    started: list[bool] = []

    def work(report: Callable[[int], None]) -> None:
        started.append(True)

    steps = stepped(work)
    steps.close()
    assert started == []


def test_closing_ends_the_work_at_its_report_and_runs_its_clean_up() -> None:
    log: list[object] = []

    def work(report: Callable[[int], None]) -> None:
        try:
            for step in range(5):
                log.append(step)
                report(step)
        finally:
            log.append("clean")

    before = threading.active_count()
    steps = stepped(work)
    assert [next(steps), next(steps)] == [0, 1]
    steps.close()
    assert log == [0, 1, "clean"]
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_the_work_raises_is_raised_here(error: BaseException) -> None:
    def work(report: Callable[[int], None]) -> None:
        report(1)
        raise error

    steps = stepped(work)
    assert next(steps) == 1
    with pytest.raises(type(error)) as caught:
        next(steps)
    assert caught.value is error
