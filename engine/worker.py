"""The one thread that runs MLX, shared fairly by everything a daemon does at once.

Work comes as generators. Each step (a prefill chunk, a token) is queued on its own, so a long prefill and several
answers take turns, and asyncio stays free for health checks. Abandoned work is closed after the step in flight.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Submit = Callable[[Callable[[], Any]], "asyncio.Future[Any]"]


class Stream(Generic[Item, Result]):
    """A generator that runs on the worker. Iterate it, then read ``result``; always ``aclose`` it."""

    def __init__(self, submit: Submit, generator: Generator[Item, None, Result]) -> None:
        self._submit = submit
        self._generator = generator
        self.result: Result | None = None

    async def __aiter__(self) -> AsyncIterator[Item]:
        while True:
            done, item = await self._submit(self._step)
            if done:
                return
            yield item

    async def aclose(self) -> None:
        """Stop the work; its own cleanup runs on the worker, or here when that has ended. Safe to repeat."""
        try:
            closing = self._submit(self._generator.close)
        except RuntimeError:
            # The thread takes no more work, and it has left the generator.
            self._generator.close()
        else:
            await asyncio.shield(closing)

    def _step(self) -> tuple[bool, Item | None]:
        try:
            return False, next(self._generator)
        except StopIteration as stop:
            self.result = stop.value
            return True, None


class Worker:
    """A single thread for MLX. What runs there sees the context variables of the call that asked for it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlx")
        self._outstanding: set[Future[Any]] = set()

    @property
    def queue_depth(self) -> int:
        """How many steps wait for the thread. May be read from any thread."""
        return sum(not (future.running() or future.done()) for future in tuple(self._outstanding))

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run one function between other work's steps."""
        result: Result = await self._submit(function)
        return result

    def stream(self, generator: Generator[Item, None, Result]) -> Stream[Item, Result]:
        """Run a generator step by step."""
        return Stream(self._submit, generator)

    def close(self) -> None:
        """Stop after the step in flight; queued steps are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        future = self._executor.submit(contextvars.copy_context().run, function)
        self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)
        return asyncio.wrap_future(future)
