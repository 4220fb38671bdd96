"""The worker beside its turns: context variables of the caller, and how many steps wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextvars import ContextVar

from kvferry.engine.worker import Worker

CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


def steps(count: int, seen: list[str]) -> Generator[str, None, str]:
    try:
        for _ in range(count):
            yield CALLER.get()
        return CALLER.get()
    finally:
        seen.append(CALLER.get())


async def test_work_sees_the_variables_of_the_call_that_asked_for_it() -> None:
    worker = Worker()
    closed: list[str] = []

    async def call(name: str) -> None:
        CALLER.set(name)
        assert await worker.run(CALLER.get) == name
        stream = worker.stream(steps(3, closed))
        assert [item async for item in stream] == [name] * 3
        assert stream.result == name
        unfinished = worker.stream(steps(3, closed))
        async for item in unfinished:
            assert item == name
            break
        await unfinished.aclose()

    await asyncio.gather(*(asyncio.create_task(call(name)) for name in ("one", "two", "three")))
    assert sorted(closed) == sorted(["one", "two", "three"] * 2)
    assert await worker.run(CALLER.get) == "nobody"
    worker.close()


async def test_the_queue_depth_counts_what_waits_and_forgets_what_was_cancelled() -> None:
    worker, entered, release = Worker(), threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        release.wait(10)

    running = asyncio.create_task(worker.run(block))
    await asyncio.to_thread(entered.wait, 10)
    waiting = [asyncio.create_task(worker.run(lambda: None)) for _ in range(3)]
    await asyncio.sleep(0)
    assert worker.queue_depth == 3
    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    assert worker.queue_depth == 2
    release.set()
    await asyncio.gather(running, waiting[0], waiting[2])
    assert worker.queue_depth == 0
    worker.close()
