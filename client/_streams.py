"""Reading a blocking stream with a limit on silence, and the answer that such a stream carries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from kvferry.client._responses import AnswerReader
from kvferry.client._values import Answer, Piece
from kvferry.core import rpc
from kvferry.core.errors import DeadlineError, KvferryError

Message = TypeVar("Message")
Message_co = TypeVar("Message_co", covariant=True)


class Call(Protocol[Message_co]):
    """What is needed of a gRPC call that streams messages in."""

    def __iter__(self) -> Iterator[Message_co]:
        """Iterate over the messages."""

    def cancel(self) -> Any:
        """End the call."""


class Cancellation:
    """Ends a call from any thread, also one that has not begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Call[Any] | None = None
        self._requested = False

    def attach(self, call: Call[Any]) -> None:
        """Name the call."""
        with self._lock:
            self._call = call
            requested = self._requested
        if requested:
            call.cancel()

    def cancel(self) -> None:
        """End the call."""
        with self._lock:
            self._requested = True
            call = self._call
        if call is not None:
            call.cancel()


class _SilenceWatch:
    """Cancels a call when waiting for one message takes too long; gRPC limits only a call's whole time.

    The time that the caller spends between two messages does not count.
    """

    def __init__(self, call: Call[Any], seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._waiting_since: float | None = None
        self._stopped = threading.Event()
        self.expired = False
        threading.Thread(target=self._run, name="kvferry-silence-watch", daemon=True).start()

    def next(self, messages: Iterator[Message]) -> Message | None:
        """Return the next message, or None at the end of the stream."""
        self._waiting_since = time.monotonic()
        try:
            return next(messages, None)
        finally:
            self._waiting_since = None

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()

    def _run(self) -> None:
        pause = self._seconds
        while not self._stopped.wait(pause):
            since = self._waiting_since
            pause = self._seconds if since is None else since + self._seconds - time.monotonic()
            if pause <= 0:
                self.expired = True
                self._call.cancel()
                return


def read(
    start: Callable[[], Call[Message]],
    peer: str,
    method: str,
    idle_timeout: float,
    cancellation: Cancellation | None = None,
) -> Generator[Message, None, None]:
    """Start a call and yield its messages. Closing the generator cancels the call.

    Args:
        start: starts the call.
        peer: host:port, for errors.
        method: the call's name, for errors.
        idle_timeout: most seconds to wait for one message.
        cancellation: what may end the call from elsewhere.

    Raises:
        CancelledError: when the client is closed meanwhile.
        DeadlineError: when nothing comes for too long.
        KvferryError: when the call fails.
    """
    with rpc.translating(peer, method):
        call = start()
    if cancellation is not None:
        cancellation.attach(call)
    watch = _SilenceWatch(call, idle_timeout)
    messages = iter(call)
    try:
        while True:
            try:
                with rpc.translating(peer, method):
                    message = watch.next(messages)
            except KvferryError as error:
                if watch.expired:
                    raise DeadlineError(
                        f"{peer}: nothing came from {method} for {idle_timeout:g} s", peer=peer, method=method
                    ) from error
                raise
            if message is None:
                return
            yield message
    finally:
        watch.stop()
        call.cancel()


class AnswerStream:
    """An answer on its way: iterate over its pieces, then read ``answer``.

    The question is asked when the iteration begins. Use it as a context manager, or call ``close``, to stop the
    receiver's work when you leave early. Only ``cancel`` may be called by another thread.
    """

    def __init__(self, pieces: Generator[Piece, None, None], reader: AnswerReader, cancellation: Cancellation) -> None:
        self._pieces = pieces
        self._reader = reader
        self._cancellation = cancellation

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The whole answer, once the iteration has ended.

        Raises:
            TransferError: when the answer is not complete.
        """
        return self._reader.answer

    def finish(self) -> Answer:
        """Read what is left and return the whole answer.

        Raises:
            KvferryError: when the call fails or the answer is not complete.
        """
        for _ in self._pieces:
            pass
        return self.answer

    def close(self) -> None:
        """Give up what is left. May be called twice."""
        self._pieces.close()

    def cancel(self) -> None:
        """Stop the answer; whoever iterates gets CancelledError."""
        self._cancellation.cancel()


def finish_all(streams: Sequence[AnswerStream], concurrency: int) -> list[Answer]:
    """Return the answers of all streams, at most ``concurrency`` of them on their way at a time.

    Raises:
        KvferryError: the first failure; the other answers are given up.
    """
    with ThreadPoolExecutor(concurrency, thread_name_prefix="kvferry-ask") as pool:
        futures = [pool.submit(stream.finish) for stream in streams]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            for stream in streams:
                stream.cancel()
