"""The one thread that runs MLX, shared fairly by everything a daemon does at once.

Work comes as generators. Each step (a prefill chunk, a token) is queued on its own, so a long prefill and several
answers take turns, and asyncio stays free for health checks. Abandoned work is closed after the step in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stream(Generic[Item, Result]):
    """A generator that runs on the worker. Iterate it, then read ``result``; always ``aclose`` it."""

    def __init__(self, executor: ThreadPoolExecutor, generator: Generator[Item, None, Result]) -> None:
        self._executor = executor
        self._generator = generator
        self.result: Result | None = None

    async def __aiter__(self) -> AsyncIterator[Item]:
        loop = asyncio.get_running_loop()
        while True:
            done, item = await loop.run_in_executor(self._executor, self._step)
            if done:
                return
            yield item  # type: ignore[misc]  # an item is there whenever the generator is not done

    async def aclose(self) -> None:
        """Stop the work; its own cleanup runs on the worker. Safe to repeat."""
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(self._executor, self._generator.close))

    def _step(self) -> tuple[bool, Item | None]:
        try:
            return False, next(self._generator)
        except StopIteration as stop:
            self.result = stop.value
            return True, None


class Worker:
    """A single thread for MLX."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlx")

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run one function between other work's steps."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def stream(self, generator: Generator[Item, None, Result]) -> Stream[Item, Result]:
        """Run a generator step by step."""
        return Stream(self._executor, generator)

    def close(self) -> None:
        """Stop after the step in flight; queued steps are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)
