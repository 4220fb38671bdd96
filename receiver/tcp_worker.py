"""The plain TCP worker: the same intake behind length-prefixed frames. It is what gRPC is compared with.

Each connection has a thread that reads frames, and one that verifies, writes and acknowledges chunks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from kvferry.core import frames, ports
from kvferry.core.addresses import Address
from kvferry.core.admission import Admission
from kvferry.core.errors import BusyError, KvferryError, TransferError
from kvferry.core.logs import logger
from kvferry.core.metrics import ReceiverMetrics
from kvferry.receiver.intake import Intake
from kvferry.receiver.tcp_session import BUFFERS, METHOD, Session

MAX_CONNECTIONS = 256
GREETING_SECONDS = 10.0
_BACKLOG = 128
_RETRY_AFTER_MS = 1000
# What keeps a connection from being accepted is the system's want of files or memory; it passes.
_PAUSE_SECONDS = 0.1


class TcpWorker:
    """Takes artifacts in on a TCP port until closed."""

    def __init__(
        self,
        address: Address,
        intake: Intake,
        metrics: ReceiverMetrics,
        admission: Admission,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Bind the address and start accepting.

        Args:
            address: port 0 takes a free one.
            intake: where artifacts go.
            metrics: of the receiver.
            admission: who may come in; the gRPC server's own, so that limits hold for both together.
            context: TLS, or None.

        Raises:
            ConfigError: when the address cannot be bound.
        """
        self._intake = intake
        self._metrics = metrics
        self._admission = admission
        self._context = context
        self._log = logger("tcp")
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._open: set[frames.Connection] = set()
        self._listener = _listen(address)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._closing = False
        # An accept that waits cannot be woken on every system; a poll can.
        self._waker, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="kvferry-tcp", daemon=True)
        self._thread.start()

    def close(self, grace_seconds: float = 0.0) -> None:
        """Take nobody in any more, and end the connections that are still there after the grace period.

        May be called again.
        """
        self._closing = True
        self._waker.close()
        self._thread.join()
        self._listener.close()
        self._wake.close()
        deadline = time.monotonic() + grace_seconds
        for thread in self._running():
            thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            for connection in self._open:
                connection.shutdown()
        for thread in self._running():
            thread.join()

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._threads)

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            poll.poll()
            if self._closing:
                return
            try:
                endpoint, peer = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                self._refused(f"cannot be accepted: {error.strerror}", "")
                time.sleep(_PAUSE_SECONDS)
                continue
            self._take(endpoint, f"{peer[0]}:{peer[1]}")

    def _take(self, endpoint: socket.socket, peer: str) -> None:
        thread = threading.Thread(target=self._run, args=(endpoint, peer), name="kvferry-tcp-connection", daemon=True)
        with self._lock:
            full = "" if len(self._threads) < MAX_CONNECTIONS else f"{MAX_CONNECTIONS} connections are open"
            if not full:
                self._threads.add(thread)
        if not full:
            try:
                thread.start()
            except RuntimeError:
                full = "the system has no more threads"
                with self._lock:
                    self._threads.discard(thread)
        if full:
            self._turn_away(endpoint, peer, full)

    def _turn_away(self, endpoint: socket.socket, peer: str, reason: str) -> None:
        busy = BusyError(f"tcp: {reason}; try again in {_RETRY_AFTER_MS} ms", retry_after_ms=_RETRY_AFTER_MS)
        self._refused(busy.message, peer)
        with endpoint, contextlib.suppress(KvferryError):
            if self._context is None:
                frames.Connection(endpoint, seconds=0.0).send(frames.failure(busy))

    def _run(self, endpoint: socket.socket, peer: str) -> None:
        try:
            with endpoint, self._tracked(self._connection(endpoint)) as connection:
                connection.handshake()
                self._serve(connection, peer)
        except KvferryError as error:
            self._refused(error.message, peer)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _connection(self, endpoint: socket.socket) -> frames.Connection:
        if self._context is not None:
            try:
                # The handshake may take its time, and must end when the worker does.
                endpoint = self._context.wrap_socket(endpoint, server_side=True, do_handshake_on_connect=False)
            except OSError as error:
                raise TransferError(f"tcp: gone before the TLS handshake ({error})") from error
        return frames.Connection(endpoint, GREETING_SECONDS, buffers=BUFFERS)

    @contextlib.contextmanager
    def _tracked(self, connection: frames.Connection) -> Iterator[frames.Connection]:
        with self._lock:
            self._open.add(connection)
            if self._closing:
                connection.shutdown()
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _serve(self, connection: frames.Connection, peer: str) -> None:
        session = Session(connection, self._intake, self._metrics, self._admission)
        status = "OK"
        with self._metrics.serving(METHOD):
            try:
                session.run()
            except KvferryError as error:
                status = error.status
                if session.admitted:
                    self._log.warning("connection failed", peer=peer, code=error.code, reason=error.message)
                else:
                    self._refused(error.message, peer)
        self._metrics.served(METHOD, status)

    def _refused(self, reason: str, peer: str) -> None:
        self._admission.refusals.refused(reason, method=METHOD, peer=peer)


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        place = socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)[0][4]
        dual = address.host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    except (OSError, UnicodeError) as error:
        raise ports.cannot_be_bound("tcp", address, error) from error
    listener.setblocking(False)  # noqa: FBT003
    return listener
