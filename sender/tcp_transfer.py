"""Carrying an artifact over the plain TCP worker: the same steps as over gRPC, in frames.

Frames are sent and awaited in threads of the connection's own: asyncio's are few, and a receiver that says nothing
would hold one of them for as long as it is waited for. Whoever gives up shuts the socket down, which ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from kvferry.core import channel, frames, handshakes, reachability, request_ids, tls
from kvferry.core.addresses import Address
from kvferry.core.compat import Reason, ReasonCode, Verdict
from kvferry.core.errors import DeadlineError, KvferryError, PeerError, TransferError, UnavailableError
from kvferry.core.tls import PeerSecurity
from kvferry.sender.carrier import Chunks, Counting, Offered, Receipt

_Result = TypeVar("_Result")
_FrameType = TypeVar("_FrameType", bound=frames.Frame)
_Arrived = list[int] | KvferryError | None
# Acknowledgements are small and many; each one that is waited for alone wakes three threads.
_REST_SECONDS = 0.005


@contextlib.asynccontextmanager
async def connected(
    receiver: Address, security: PeerSecurity, seconds: float, metrics: Counting
) -> AsyncIterator[TcpCarrier]:
    """Connect for the block.

    Args:
        receiver: where to.
        security: how.
        seconds: how long connecting, and then each frame, may take.
        metrics: of the sender.

    Raises:
        ConfigError: when a file of ``security`` cannot be used, or the token would cross a network in the clear.
        UnavailableError: when the receiver cannot be reached, or there is no TLS between us.
    """
    channel.check_token(receiver, security)
    context = tls.client_context(security)
    with _thread() as own:
        try:
            async with asyncio.timeout(seconds):
                endpoint = await _dial(receiver, own)
            if context is not None:
                name = receiver.host.partition("%")[0]
                endpoint = context.wrap_socket(endpoint, server_hostname=name, do_handshake_on_connect=False)
        except (OSError, UnicodeError) as error:
            raise _unreachable(receiver, error) from error
        connection = frames.Connection(endpoint, seconds, peer=str(receiver))
        try:
            yield TcpCarrier(connection, own, receiver, metrics, security.token or "")
        finally:
            connection.close()


@contextlib.contextmanager
def _thread() -> Iterator[Executor]:
    """Have a thread for the block; a system that is still looking a name up then is not waited for."""
    own = ThreadPoolExecutor(1, thread_name_prefix="kvferry-tcp")
    try:
        yield own
    finally:
        own.shutdown(wait=False)


async def _dial(receiver: Address, own: Executor) -> socket.socket:
    """Return a socket that is connected to the first address of the receiver's that answers."""
    loop = asyncio.get_running_loop()
    look_up = functools.partial(socket.getaddrinfo, receiver.host, receiver.port, type=socket.SOCK_STREAM)
    failed: OSError | None = None
    for family, kind, protocol, _, place in await loop.run_in_executor(own, look_up):
        with contextlib.ExitStack() as undo:
            endpoint = undo.enter_context(socket.socket(family, kind, protocol))
            endpoint.setblocking(False)  # noqa: FBT003
            try:
                await loop.sock_connect(endpoint, place)
            except OSError as error:
                failed = error
                continue
            undo.pop_all()
            return endpoint
    raise failed or OSError("no address")


def _unreachable(receiver: Address, error: Exception) -> UnavailableError:
    number = error.errno if isinstance(error, OSError) else None
    # asyncio puts words of its own in the place of the system's.
    text = os.strerror(number) if number and number in errno.errorcode else str(error) or "timed out"
    advice = reachability.explain_errno(number, receiver.host) if isinstance(error, OSError) else ""
    return UnavailableError(
        f"{receiver}: cannot be reached ({text})" + (f"; {advice}" if advice else ""), peer=str(receiver)
    )


class TcpCarrier:
    """A connection to a plain TCP worker; see ``Carrier``."""

    def __init__(
        self, connection: frames.Connection, own: Executor, receiver: Address, metrics: Counting, token: str
    ) -> None:
        self._connection = connection
        self._own = own
        self._receiver = receiver
        self._metrics = metrics
        self._hello = frames.Hello(token, request_id=request_ids.current())
        self._heard = False
        self._sent = 0
        self._received = 0

    async def offer(self, manifest: bytes) -> Offered:
        """Say who calls, and offer."""
        answer = await self._blocking(lambda: self._open(manifest))
        reasons = tuple(Reason(_code(code), *rest) for code, *rest in answer.reasons)
        return Offered(answer.artifact_id, not reasons, Verdict(reasons), list(answer.missing), answer.committed)

    async def put(self, chunks: Chunks, wanted: list[int]) -> AsyncGenerator[int, None]:
        """Send chunks in one thread, and read acknowledgements in another."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[_Arrived] = asyncio.Queue()

        def post(item: _Arrived) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        all_sent = threading.Event()
        threads = [
            threading.Thread(target=self._send_chunks, args=(chunks, wanted, post, all_sent), name="kvferry-tcp-send"),
            threading.Thread(target=self._read_answers, args=(len(wanted), post, all_sent), name="kvferry-tcp-read"),
        ]
        for thread in threads:
            thread.start()
        due, is_done = len(wanted), False
        try:
            while due and (item := await arrived.get()) is not None:
                if isinstance(item, KvferryError):
                    raise item
                for index in item:
                    yield index
                due -= len(item)
            is_done = not due
        finally:
            if not is_done:
                self._connection.shutdown()
            for thread in threads:
                await loop.run_in_executor(self._own, thread.join)

    async def commit(self, artifact_id: bytes, account_json: str, seconds: float) -> Receipt:
        """Ask for publication."""
        request = frames.Commit(artifact_id, account_json)
        answer = await self._blocking(lambda: self._ask(request, frames.Committed, seconds))
        return Receipt(answer.payload_digest, answer.received_bytes, answer.control_bytes)

    async def _blocking(self, work: Callable[[], _Result]) -> _Result:
        """Run in the connection's thread, which ends when this is cancelled."""
        running = asyncio.get_running_loop().run_in_executor(self._own, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._connection.shutdown()
            await asyncio.wait([running])
            if not running.cancelled():
                # asyncio would complain that nobody looked at its error.
                running.exception()
            raise

    def _open(self, manifest: bytes) -> frames.Offered:
        self._metrics.sent("manifest", len(manifest))
        try:
            self._connection.handshake()
            self._connection.send(self._hello)
            return self._ask(frames.Offer(manifest), frames.Offered, body=len(manifest))
        except TransferError as error:
            if self._heard:
                raise
            text = f"{error.message}; {handshakes.explain_socket(error.message)}"
            raise UnavailableError(text, peer=str(self._receiver)) from error

    def _ask(
        self, request: frames.Frame, kind: type[_FrameType], seconds: float | None = None, body: int = 0
    ) -> _FrameType:
        # A receiver that hung up may have said why before.
        with contextlib.suppress(TransferError):
            self._connection.send(request)
        self._count_sent(body)
        try:
            return self._expect(kind, seconds)
        finally:
            self._count_received()

    def _expect(self, kind: type[_FrameType], seconds: float | None = None) -> _FrameType:
        frame = self._connection.receive(seconds=seconds)
        if frame is None:
            raise TransferError(f"{self._receiver}: the connection ended before the answer that was due")
        self._heard = True
        if isinstance(frame, frames.Failed):
            raise frames.rebuild(frame)
        if not isinstance(frame, kind):
            raise PeerError(
                f"{self._receiver}: {type(frame).__name__} came where {kind.__name__} was due", peer=str(self._receiver)
            )
        return frame

    def _send_chunks(
        self, chunks: Chunks, wanted: list[int], post: Callable[[_Arrived], None], all_sent: threading.Event
    ) -> None:
        body = 0
        try:
            for index, data in chunks.read(wanted):
                body += len(data)
                self._connection.send(frames.Put(chunks.artifact_id, index, memoryview(data)))
        except DeadlineError as error:
            post(error)
        except TransferError:
            # The other thread finds out why, from the receiver's last frame or the lack of it.
            return
        finally:
            self._count_sent(body)
            all_sent.set()
        if chunks.unreadable is not None:
            post(None)

    def _read_answers(self, due: int, post: Callable[[_Arrived], None], all_sent: threading.Event) -> None:
        try:
            while due:
                taken = [self._expect(frames.Taken).index]
                while len(taken) < due and self._connection.has_frame:
                    taken.append(self._expect(frames.Taken).index)
                due -= len(taken)
                self._count_received()
                post(taken)
                all_sent.wait(_REST_SECONDS)
        except KvferryError as error:
            post(error)

    def _count_received(self) -> None:
        self._metrics.received("control", self._connection.received - self._received)
        self._received = self._connection.received

    def _count_sent(self, body: int) -> None:
        """Count what went since the last time, less ``body`` bytes that are counted elsewhere, or were to go."""
        self._metrics.sent("control", max(self._connection.sent - self._sent - body, 0))
        self._sent = self._connection.sent


def _code(name: str) -> ReasonCode:
    return ReasonCode(name) if name in ReasonCode.__members__ else ReasonCode.UNKNOWN_METHOD
