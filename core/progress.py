"""How far a piece of work is, and work that is done in steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Progress:
    """How far a stage of a send is. ``stage`` is one of the protocol's names; units are tokens or bytes."""

    stage: str
    done: int
    total: int


def passing_on(steps: Generator[object, None, Result], progress: Progress) -> Generator[Progress, None, Result]:
    """Do work whose steps nobody counts: ``progress`` is yielded for each, so that other work can take turns."""
    with contextlib.closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            yield progress


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
