"""Uses that come to nothing: looked up and not read, given up, failed. None of them keeps an artifact from eviction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import IntegrityError, NotFoundError, TooLargeError
from kvferry.core.store import ArtifactStore
from kvferry.core.threads import off_loop


@pytest.fixture
def examples(kv_example: Callable[..., Any]) -> list[Any]:
    return [kv_example(tokens=tokens) for tokens in (40, 41, 42, 60)]


@pytest.fixture
def full(tmp_path: Path, examples: list[Any]) -> Iterator[ArtifactStore]:
    """A store with three artifacts and room for none of the fourth's size beside them."""
    sizes = [len(example.encoded) + len(example.payload) for example in examples]
    with contextlib.closing(ArtifactStore(tmp_path / "store", budget=max(sum(sizes[:3]), sizes[3]))) as opened:
        for example in examples[:3]:
            example.received_by(opened)
        yield opened


async def given_up(store: ArtifactStore, artifact_id: bytes) -> None:
    async def use() -> None:
        async with off_loop(store.pinned(artifact_id)):
            await asyncio.sleep(10)

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_thousand_uses_that_come_to_nothing_pin_nothing(full: ArtifactStore, examples: list[Any]) -> None:
    kept, last = examples[:3], examples[3]
    for number in range(1000):
        example = kept[number % 3]
        full.get(example.id)
        with contextlib.suppress(IntegrityError), full.pinned(example.id):
            raise IntegrityError("what a question may end with")
        with pytest.raises(NotFoundError), full.pinned(last.id):
            full.get(last.id)
        if number % 10 == 0:
            await given_up(full, example.id)
    # Pins that were given up end in threads.
    async with asyncio.timeout(10):
        while full._retention._pins:  # noqa: ASYNC110  (threads set no event)
            await asyncio.sleep(0.001)
    last.received_by(full)
    assert last.id in full.ids()
    assert len(full.ids()) < 4


def test_a_use_that_goes_on_does_pin(full: ArtifactStore, examples: list[Any]) -> None:
    with contextlib.ExitStack() as stack:
        for example in examples[:3]:
            stack.enter_context(full.pinned(example.id))
        with pytest.raises(TooLargeError, match="do not fit"):
            full.begin(examples[3].encoded)
        assert len(full.ids()) == 3
    examples[3].received_by(full)
