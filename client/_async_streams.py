"""Reading an asyncio stream with a limit on silence, and the answer that such a stream carries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from kvferry.client._responses import AnswerReader
from kvferry.client._values import Answer, Piece
from kvferry.core import rpc
from kvferry.core.errors import DeadlineError

Message = TypeVar("Message")
Call: TypeAlias = grpc.aio.UnaryStreamCall[Any, Message] | grpc.aio.StreamStreamCall[Any, Message]


class _FirstStatus:
    """Remembers how the server ended a call.

    When a server ends a call while we are still writing, the failing write makes grpc.aio forget the status that had
    arrived and report INTERNAL in its place. Callbacks run before that.
    """

    def __init__(self, call: Call[Any]) -> None:
        self.status: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def _keep(self, call: Any) -> None:
        self.status = grpc.aio.AioRpcError(
            _value(call.code()),
            grpc.aio.Metadata(),
            _value(call.trailing_metadata()) or grpc.aio.Metadata(),
            details=_value(call.details()),
        )


def _value(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine has ready; those of a call that is done need not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise asyncio.InvalidStateError


async def read(
    start: Callable[[], Call[Message]], peer: str, method: str, idle_timeout: float
) -> AsyncGenerator[Message, None]:
    """Start a call and yield its messages. Closing the generator cancels the call.

    Args:
        start: starts the call.
        peer: host:port, for errors.
        method: the call's name, for errors.
        idle_timeout: most seconds to wait for one message.

    Raises:
        CancelledError: when the client is closed meanwhile.
        DeadlineError: when nothing comes for too long.
        KvferryError: when the call fails.
    """
    with rpc.translating(peer, method):
        call = start()
    first = _FirstStatus(call)
    try:
        while True:
            try:
                message = await _next(call, peer, method, idle_timeout)
            except grpc.aio.AioRpcError as error:
                status = first.status or error
                if status.code() is grpc.StatusCode.OK:
                    return
                raise rpc.from_rpc(status, peer, method) from error
            if message is grpc.aio.EOF:
                return
            yield rpc.parsed(message, peer, method)
    finally:
        call.cancel()


async def _next(call: Call[Any], peer: str, method: str, idle_timeout: float) -> Any:
    try:
        with rpc.cancellable(peer, method):
            async with asyncio.timeout(idle_timeout):
                return await call.read()
    except TimeoutError as error:
        raise DeadlineError(
            f"{peer}: nothing came from {method} for {idle_timeout:g} s", peer=peer, method=method
        ) from error


class AsyncAnswerStream:
    """An answer on its way: iterate over its pieces, then read ``answer``.

    The question is asked when the iteration begins. Use it as a context manager, or call ``close``, to stop the
    receiver's work when you leave early.
    """

    def __init__(self, pieces: AsyncGenerator[Piece, None], reader: AnswerReader) -> None:
        self._pieces = pieces
        self._reader = reader

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the iteration has ended.

        Raises:
            TransferError: when the answer is not complete.
        """
        return self._reader.answer

    async def finish(self) -> Answer:
        """Read what is left and return the whole answer.

        Raises:
            KvferryError: when the call fails or the answer is not complete.
        """
        async for _ in self._pieces:
            pass
        return self.answer

    async def close(self) -> None:
        """Give up what is left. May be called twice."""
        await self._pieces.aclose()
