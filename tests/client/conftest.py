"""Fake daemons, and both clients behind one blocking face so that every protocol test runs against either."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Self

import pytest
from loading import load

from kvferry.client import AsyncAnswerStream, AsyncClient, Client


def load_fakes() -> ModuleType:
    """Import fake_daemons.py, which lies on no path."""
    return load("client/fake_daemons.py")


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """Return the module of the fake daemons."""
    return load_fakes()


@pytest.fixture
def daemons(fakes: ModuleType) -> Iterator[Any]:
    """Return a running fake sender and receiver."""
    running = fakes.FakeDaemons()
    yield running
    running.stop()


class BlockingStream:
    """An AsyncAnswerStream, driven step by step."""

    def __init__(self, stream: AsyncAnswerStream, loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def answer(self) -> Any:
        return self._stream.answer

    def finish(self) -> Any:
        return self._loop.run_until_complete(self._stream.finish())

    def close(self) -> None:
        self._loop.run_until_complete(self._stream.close())


class BlockingClient:
    """An AsyncClient on a loop of its own."""

    def __init__(self, **arguments: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(**arguments)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.loop.run_until_complete(getattr(self.client, name)(*args, **kwargs))

        return call

    def stream(self, *args: Any, **kwargs: Any) -> BlockingStream:
        return BlockingStream(self.client.stream(*args, **kwargs), self.loop)

    def shut(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@pytest.fixture(params=["blocking", "asyncio"])
def open_client(request: pytest.FixtureRequest, daemons: Any) -> Iterator[Any]:
    """Return a factory of clients of either kind, connected to the fake daemons."""
    opened: list[Any] = []

    def build(**arguments: Any) -> Any:
        settings = {"sender": daemons.address, "receiver": daemons.address} | arguments
        opened.append(Client(**settings) if request.param == "blocking" else BlockingClient(**settings))
        return opened[-1]

    yield build
    for client in opened:
        client.close() if isinstance(client, Client) else client.shut()


@pytest.fixture
def kv(open_client: Any) -> Any:
    """Return a client of either kind."""
    return open_client()
