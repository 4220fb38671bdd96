"""How far a piece of work is, and work that is done in steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

Step = TypeVar("Step")
Shown = TypeVar("Shown")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Progress:
    """How far a stage of a send is. ``stage`` is one of the protocol's names; units are tokens or bytes."""

    stage: str
    done: int
    total: int


def relay(steps: Generator[Step, None, Result], show: Callable[[Step], Shown]) -> Generator[Shown, None, Result]:
    """Do work step by step and yield what ``show`` makes of each, so that other work can take turns."""
    with contextlib.closing(steps):
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            yield show(step)


def passing_on(steps: Generator[object, None, Result], progress: Progress) -> Generator[Progress, None, Result]:
    """Do work whose steps nobody counts: ``progress`` is yielded for each."""
    return relay(steps, lambda _: progress)


class Stopwatch:
    """Adds up how long work takes that is done in steps. Between them the thread does other work.

    Attributes:
        seconds: so far, the step that ended or failed last among them.
    """

    def __init__(self) -> None:
        """Begin at nothing."""
        self.seconds = 0.0

    @property
    def ms(self) -> float:
        """The same in milliseconds."""
        return self.seconds * 1000

    def timing(self, steps: Generator[Step, None, Result]) -> Generator[Step, None, Result]:
        """Do work and yield its steps."""
        with contextlib.closing(steps):
            while True:
                start = time.perf_counter()
                try:
                    step = next(steps)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                finally:
                    self.seconds += time.perf_counter() - start
                yield step


def finish(steps: Generator[Step, None, Result], see: Callable[[Step], object] | None = None) -> Result:
    """Do work to its end and return what it returns; ``see`` is shown every step."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if see is not None:
            see(step)
