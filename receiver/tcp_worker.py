"""The plain TCP worker: the same intake behind length-prefixed frames, for comparison with gRPC.

A thread a connection; chunks are verified and written by a second one while the next chunk is read from the socket.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Self

from kvferry.core import frames
from kvferry.core.addresses import Address
from kvferry.core.errors import BusyError, ConfigError, InvalidRequestError, KvferryError
from kvferry.core.logs import logger
from kvferry.core.tokens import Token
from kvferry.core.wire import check_digest
from kvferry.receiver.intake import Intake, Judgement

MAX_CONNECTIONS = 32
IDLE_SECONDS = 60.0
_CHUNKS_IN_HAND = 4
_BACKLOG = 64


class TcpWorker:
    """Serves Offer, Put and Commit on a TCP port until closed."""

    def __init__(
        self,
        address: Address,
        intake: Intake,
        authenticate: Callable[[str], Token] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Bind the address and start accepting.

        Args:
            address: port 0 takes a free one.
            intake: what artifacts go to.
            authenticate: from a presented token to who it is; raises AuthenticationError. None lets everybody in.
            context: TLS, or None.

        Raises:
            ConfigError: when the address cannot be bound.
        """
        self._intake = intake
        self._authenticate = authenticate
        self._context = context
        self._log = logger("tcp")
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        try:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            self._listener = socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"tcp: {address} cannot be bound: {error.strerror}", field="tcp") from error
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="kvferry-tcp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting and end every connection."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for endpoint in self._open:
                with contextlib.suppress(OSError):
                    endpoint.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                endpoint, peer = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(endpoint, str(peer[0])), daemon=True).start()

    def _serve(self, endpoint: socket.socket, peer: str) -> None:
        with endpoint, self._tracked(endpoint):
            endpoint.settimeout(IDLE_SECONDS)
            try:
                wrapped = self._context.wrap_socket(endpoint, server_side=True) if self._context else endpoint
            except OSError as error:
                self._log.warning("handshake failed", peer=peer, reason=str(error))
                return
            connection = frames.Connection(wrapped)
            try:
                if not self._slots.acquire(blocking=False):
                    raise BusyError(f"tcp: {MAX_CONNECTIONS} connections are open", retry_after_ms=1000)
                try:
                    _Session(connection, self._intake, self._authenticate).run()
                finally:
                    self._slots.release()
            except KvferryError as error:
                self._log.warning("connection failed", peer=peer, code=error.code, reason=error.message)
                with contextlib.suppress(KvferryError):
                    connection.send(frames.failure(error))

    @contextlib.contextmanager
    def _tracked(self, endpoint: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(endpoint)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(endpoint)


class _Session:
    """One connection: frames in, frames out, in order."""

    def __init__(
        self, connection: frames.Connection, intake: Intake, authenticate: Callable[[str], Token] | None
    ) -> None:
        self._connection = connection
        self._intake = intake
        self._authenticate = authenticate
        self._caller: Token | None = None

    def run(self) -> None:
        """Serve until the peer ends the stream between frames."""
        received = self._connection.receive()
        if received is None:
            return
        frame, size = received
        if not isinstance(frame, frames.Hello):
            raise InvalidRequestError("hello: the first frame must be it", field="hello")
        if self._authenticate is not None:
            self._caller = self._authenticate(frame.token)
        with _Writer(self._connection, self._intake) as writer:
            while (received := self._connection.receive()) is not None:
                frame, size = received
                if isinstance(frame, frames.Put):
                    writer.put(frame, size)
                    continue
                writer.drain()
                if isinstance(frame, frames.Offer):
                    self._offer(frame, size)
                elif isinstance(frame, frames.Commit):
                    self._commit(frame, size)
                else:
                    raise InvalidRequestError(f"frame: {type(frame).__name__} is not a request", field="frame")

    def _offer(self, frame: frames.Offer, size: int) -> None:
        judgement = self._intake.offer(frame.manifest, self._caller)
        answer = _offered(judgement)
        if judgement.verdict.accepted and not judgement.committed:
            control = size - len(frame.manifest) + len(frames.encode(answer))
            self._intake.charge_offer(judgement.artifact_id, len(frame.manifest), control)
        self._connection.send(answer)

    def _commit(self, frame: frames.Commit, size: int) -> None:
        stored = self._intake.commit(check_digest(frame.artifact_id, "artifact_id"), frame.account_json, size)
        traffic = stored.record.traffic
        self._connection.send(
            frames.Committed(
                stored.artifact_id,
                stored.manifest.payload.digest,
                traffic.received_bytes if traffic else 0,
                traffic.control_bytes if traffic else 0,
            )
        )


def _offered(judgement: Judgement) -> frames.Offered:
    reasons = tuple(
        (reason.code.value, reason.field, reason.artifact, reason.receiver) for reason in judgement.verdict.reasons
    )
    return frames.Offered(judgement.artifact_id, reasons, judgement.missing, judgement.committed)


class _Writer:
    """Verifies, writes and acknowledges chunks in a thread of its own, a few at a time."""

    def __init__(self, connection: frames.Connection, intake: Intake) -> None:
        self._connection = connection
        self._intake = intake
        self._queue: queue.Queue[tuple[frames.Put, int] | None] = queue.Queue(_CHUNKS_IN_HAND)
        self._error: KvferryError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-tcp-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()

    def put(self, frame: frames.Put, size: int) -> None:
        """Queue a chunk; waits while too many are in hand."""
        self._raise_error()
        self._queue.put((frame, size))

    def drain(self) -> None:
        """Wait until every chunk is written."""
        self._queue.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                if self._error is None:
                    self._take(*item)
            except KvferryError as error:
                self._error = error
                # Wakes the reading thread, which then reports the error.
                self._report(error)
            finally:
                self._queue.task_done()

    def _report(self, error: KvferryError) -> None:
        with contextlib.suppress(KvferryError):
            self._connection.send(frames.failure(error))
        self._connection.shutdown()

    def _take(self, frame: frames.Put, size: int) -> None:
        artifact_id = check_digest(frame.artifact_id, "artifact_id")
        answer = frames.Taken(frame.index)
        control = size - len(frame.data) + len(frames.encode(answer))
        self._intake.put(artifact_id, frame.index, frame.data, control)
        self._connection.send(answer)
