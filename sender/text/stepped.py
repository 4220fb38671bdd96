"""Work that tells a callback how far it is, turned into a generator that stops between its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


class _ClosedError(Exception):
    """Raised inside the work when nobody wants its result any more."""


def stepped(work: Callable[[Callable[[Step], None]], Result]) -> Generator[Step, None, Result]:
    """Yield what work reports; it goes on when the next step is asked for, and ends at its report when this is closed.

    The work runs on a thread of its own, never at the same time as the caller's.

    Args:
        work: is given the function to report with, and may call it from its own thread only.

    Returns:
        What the work returns; what it raises is raised here.
    """
    reports: SimpleQueue[tuple[Step, ...]] = SimpleQueue()
    wanted, closed = threading.Semaphore(0), threading.Event()
    result: Future[Result] = Future()

    def report(step: Step) -> None:
        reports.put((step,))
        wanted.acquire()
        if closed.is_set():
            raise _ClosedError

    def run() -> None:
        try:
            result.set_result(work(report))
        except BaseException as error:  # noqa: BLE001  (it is raised again where the result is wanted)
            result.set_exception(error)
        finally:
            reports.put(())

    thread = threading.Thread(target=run, name="kvferry-stepped", daemon=True)
    thread.start()
    try:
        while step := reports.get():
            yield step[0]
            wanted.release()
        return result.result()
    finally:
        closed.set()
        wanted.release()
        thread.join()
