"""Blocking context managers in coroutines: the loop stays free, and whatever was entered is left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from kvferry.core.threads import off_loop


class Door:
    """A context manager that is entered and left only when it may be."""

    def __init__(self) -> None:
        self.may_enter, self.may_leave = threading.Event(), threading.Event()
        self.may_enter.set()
        self.may_leave.set()
        self.seen: list[str] = []
        self.threads: set[int] = set()

    @contextlib.contextmanager
    def opened(self) -> Iterator[str]:
        self._pass("in", self.may_enter)
        yield "item"
        self._pass("out", self.may_leave)

    def _pass(self, name: str, event: threading.Event) -> None:
        assert event.wait(10)
        self.threads.add(threading.get_ident())
        self.seen.append(name)


async def until(door: Door, *seen: str) -> None:
    async with asyncio.timeout(10):
        while tuple(door.seen) != seen:  # noqa: ASYNC110  (set by threads)
            await asyncio.sleep(0.001)


async def test_the_block_runs_inside_and_the_loop_outside() -> None:
    door = Door()
    door.may_enter.clear()

    async def enter() -> list[str]:
        async with off_loop(door.opened()) as item:
            assert item == "item"
            return list(door.seen)

    task = asyncio.create_task(enter())
    # The loop has time while the door is shut.
    await asyncio.sleep(0.02)
    assert not task.done()
    door.may_enter.set()
    assert await task == ["in"]
    assert door.seen == ["in", "out"]
    assert threading.get_ident() not in door.threads


async def test_an_error_of_the_block_leaves_it() -> None:
    door = Door()
    with pytest.raises(LookupError):
        async with off_loop(door.opened()):
            raise LookupError
    assert door.seen == ["in", "out"]


async def test_what_cannot_be_entered_is_not_left() -> None:
    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        raise OSError("is locked")
        yield

    with pytest.raises(OSError, match="is locked"):
        async with off_loop(refusing()):
            raise AssertionError


async def test_whoever_is_cancelled_while_it_is_entered_leaves_it_later() -> None:
    door = Door()
    door.may_enter.clear()

    async def enter() -> None:
        async with off_loop(door.opened()):
            raise AssertionError

    task = asyncio.create_task(enter())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert door.seen == []
    door.may_enter.set()
    await until(door, "in", "out")


async def test_whoever_is_cancelled_while_it_is_left_has_left_it() -> None:
    door = Door()
    door.may_leave.clear()

    async def enter() -> None:
        async with off_loop(door.opened()):
            pass

    task = asyncio.create_task(enter())
    await until(door, "in")
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    door.may_leave.set()
    await until(door, "in", "out")
