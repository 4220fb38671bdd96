"""One thread for MLX: turns are fair, errors come back, and abandoned work is closed where it ran."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from kvferry.engine.worker import Stream, Worker

SECONDS = 10.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


class Job:
    """A generator that logs its steps and where its cleanup ran; ``gate`` holds every step but the first."""

    def __init__(self, name: str, log: list[str], steps: int = 100, *, gate: threading.Event | None = None) -> None:
        self.name, self.log, self.steps, self.gate = name, log, steps, gate
        self.cleaned_on: threading.Thread | None = None
        self.entered = threading.Event()

    def run(self) -> Generator[int, None, str]:
        try:
            for step in range(self.steps):
                self.log.append(self.name)
                if step and self.gate is not None:
                    self.entered.set()
                    assert self.gate.wait(SECONDS)
                yield step
        finally:
            self.cleaned_on = threading.current_thread()
        return f"{self.name} done"


async def consume(stream: Stream[int, str]) -> list[int]:
    try:
        return [item async for item in stream]
    finally:
        await stream.aclose()


async def worker_thread(worker: Worker) -> threading.Thread:
    return await worker.run(threading.current_thread)


async def test_a_stream_yields_every_item_and_then_has_its_result(worker: Worker) -> None:
    stream = worker.stream(Job("a", [], 5).run())
    assert stream.result is None
    assert await consume(stream) == [0, 1, 2, 3, 4]
    assert stream.result == "a done"


async def test_a_generator_without_a_step_still_has_a_result(worker: Worker) -> None:
    stream = worker.stream(Job("a", [], 0).run())
    assert await consume(stream) == []
    assert stream.result == "a done"


async def test_everything_runs_on_one_thread_that_is_not_the_event_loops(worker: Worker) -> None:
    def threads() -> Generator[threading.Thread, None, threading.Thread]:
        for _ in range(3):
            yield threading.current_thread()
        return threading.current_thread()

    stream = worker.stream(threads())
    seen = {thread async for thread in stream}
    assert seen | {stream.result} == {await worker_thread(worker)}
    assert threading.current_thread() not in seen
    await stream.aclose()


async def test_two_long_streams_take_turns(worker: Worker) -> None:
    log: list[str] = []
    await asyncio.gather(*(consume(worker.stream(Job(name, log, 200).run())) for name in "ab"))
    assert log.count("a") == log.count("b") == 200
    both = log[log.index("b") :]
    # While both have work left, neither gets more than a few steps ahead of the other.
    for end in range(0, len(both) - 40, 10):
        ahead = both[: end + 1].count("a") - both[: end + 1].count("b")
        assert abs(ahead) <= 5 + log.index("b")


async def test_a_short_request_does_not_wait_for_a_long_one(worker: Worker) -> None:
    log: list[str] = []
    gate = threading.Event()
    gate.set()
    job = Job("long", log, 100_000, gate=gate)
    long = asyncio.create_task(consume(worker.stream(job.run())))
    await asyncio.to_thread(job.entered.wait, SECONDS)
    before = len(log)
    assert await consume(worker.stream(Job("short", log, 10).run())) == list(range(10))
    assert not long.done()
    assert log.count("long") - before <= 10 * 10
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long


async def test_the_event_loop_is_free_while_a_step_computes(worker: Worker) -> None:
    gate = threading.Event()
    job = Job("a", [], 2, gate=gate)
    task = asyncio.create_task(consume(worker.stream(job.run())))
    await asyncio.to_thread(job.entered.wait, SECONDS)
    # Released from the loop itself: were the loop blocked, the step would never end.
    gate.set()
    assert await asyncio.wait_for(task, SECONDS) == [0, 1]


async def test_an_exception_comes_back_as_it_is(worker: Worker) -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise ZeroDivisionError("in the middle")

    stream = worker.stream(failing())
    items = aiter(stream)
    assert await anext(items) == 1
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        await anext(items)
    assert stream.result is None
    await stream.aclose()
    with pytest.raises(KeyError, match="alone"):
        await worker.run(lambda: {}["alone"])
    assert await consume(worker.stream(Job("next", [], 2).run())) == [0, 1]


async def test_closing_runs_the_cleanup_on_the_worker(worker: Worker) -> None:
    job = Job("a", [])
    stream = worker.stream(job.run())
    async for item in stream:
        if item == 3:
            break
    await stream.aclose()
    assert job.cleaned_on is await worker_thread(worker)
    assert stream.result is None
    assert job.log == ["a"] * 4


async def test_closing_twice_and_before_the_start_is_fine(worker: Worker) -> None:
    job = Job("a", [])
    stream = worker.stream(job.run())
    await stream.aclose()
    await stream.aclose()
    assert job.log == []
    assert await consume(stream) == []
    assert stream.result is None


async def test_cancelling_the_reader_closes_the_generator(worker: Worker) -> None:
    gate = threading.Event()
    job = Job("a", [], gate=gate)
    generator = job.run()
    task = asyncio.create_task(consume(worker.stream(generator)))
    await asyncio.to_thread(job.entered.wait, SECONDS)
    task.cancel()
    await asyncio.sleep(0)
    # The step in flight cannot be interrupted, so the cleanup waits for it and nothing runs meanwhile.
    assert job.cleaned_on is None
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert job.cleaned_on is await worker_thread(worker)
    assert job.log == ["a", "a"]


async def test_a_second_cancel_does_not_leave_the_generator_open(worker: Worker) -> None:
    gate = threading.Event()
    job = Job("a", [], gate=gate)
    # Held here, so that only closing it ends it, and not the garbage collector.
    generator = job.run()
    task = asyncio.create_task(consume(worker.stream(generator)))
    await asyncio.to_thread(job.entered.wait, SECONDS)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await worker_thread(worker) is job.cleaned_on
    assert generator.gi_frame is None


async def test_a_queued_step_of_a_cancelled_reader_never_runs(worker: Worker) -> None:
    gate = threading.Event()
    blocker, victim = Job("blocker", [], 2, gate=gate), Job("victim", [])
    blocking = asyncio.create_task(consume(worker.stream(blocker.run())))
    await asyncio.to_thread(blocker.entered.wait, SECONDS)
    waiting = asyncio.create_task(consume(worker.stream(victim.run())))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await blocking
    assert victim.log == []


async def test_many_abandoned_streams_leave_nothing_behind(worker: Worker) -> None:
    jobs = [Job(str(number), []) for number in range(200)]

    async def abandon(job: Job) -> None:
        stream = worker.stream(job.run())
        try:
            async for _ in stream:
                break
        finally:
            await stream.aclose()

    await asyncio.gather(*map(abandon, jobs))
    thread = await worker_thread(worker)
    assert all(job.cleaned_on is thread for job in jobs)
    assert all(len(job.log) == 1 for job in jobs)


async def test_close_waits_for_the_step_in_flight_and_drops_the_rest() -> None:
    worker = Worker()
    finished = threading.Event()

    def step() -> None:
        time.sleep(0.05)
        finished.set()

    running = asyncio.create_task(worker.run(step))
    queued = asyncio.create_task(worker.run(lambda: pytest.fail("ran after the end")))
    await asyncio.sleep(0.01)
    worker.close()
    assert finished.is_set()
    await running
    with contextlib.suppress(asyncio.CancelledError):
        await queued
    assert queued.cancelled()


async def test_closing_a_stream_after_the_worker_still_runs_its_cleanup() -> None:
    worker = Worker()
    job = Job("a", [])
    stream = worker.stream(job.run())
    async for _ in stream:
        break
    worker.close()
    await stream.aclose()
    await stream.aclose()
    assert job.cleaned_on is threading.current_thread()
    assert job.log == ["a"]
