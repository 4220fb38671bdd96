"""Blocking context managers in coroutines: entered and left in threads, so that no lock or disk stops the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import TypeVar

Item = TypeVar("Item")


@contextlib.asynccontextmanager
async def off_loop(manager: AbstractContextManager[Item]) -> AsyncIterator[Item]:
    """Run the block inside ``manager``, which may be entered and left by different threads.

    It is left exactly once if it was entered, also when the caller is cancelled meanwhile. It does not see the block's
    exceptions.
    """
    loop = asyncio.get_running_loop()

    def leave() -> None:
        manager.__exit__(None, None, None)

    def leave_late(entered: asyncio.Future[Item]) -> None:
        if entered.exception() is None:
            loop.run_in_executor(None, leave)

    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        item = await asyncio.shield(entering)
    except asyncio.CancelledError:
        # The thread does not stop for that.
        entering.add_done_callback(leave_late)
        raise
    try:
        yield item
    finally:
        await asyncio.shield(asyncio.to_thread(leave))
