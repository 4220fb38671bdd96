"""A connected socket, in the clear or under TLS, on which every wait has an end."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time

# Below these sizes another call of the system costs more than a copy.
_JOINED_BYTES = 16 * 1024
_READ_AHEAD_BYTES = 512
# How late somebody who waits may notice that another thread has given less time.
_LOOK_SECONDS = 0.25


class Stream:
    """Bytes in and out. One thread may write while another reads.

    Attributes:
        received, sent: bytes so far, under TLS those inside it.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        """Take over a connected socket. A ``ssl.SSLSocket`` needs ``handshake`` before anything else."""
        endpoint.settimeout(0)
        # Not every kind of socket has it, and one that is broken already says so when it is used.
        with contextlib.suppress(OSError):
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._endpoint = endpoint
        # OpenSSL lets one thread at a time into a connection. No call below waits while it holds this.
        self._lock = threading.Lock()
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]
        self._latest = math.inf
        self.received = 0
        self.sent = 0

    @property
    def ahead(self) -> memoryview:
        """What was received and has not been read."""
        return self._ahead

    def handshake(self, deadline: float) -> None:
        """Do TLS's part; without TLS there is none.

        Raises:
            OSError: when it fails; TimeoutError when it is not done by ``deadline``, a time of the monotonic clock.
        """
        endpoint = self._endpoint
        if isinstance(endpoint, ssl.SSLSocket):
            while True:
                try:
                    endpoint.do_handshake()
                except ssl.SSLWantReadError:
                    self._wait(select.POLLIN, deadline)
                except ssl.SSLWantWriteError:
                    self._wait(select.POLLOUT, deadline)
                else:
                    return

    def read_into(self, view: memoryview, deadline: float) -> int:
        """Read some bytes and return their number, 0 at the end of the stream.

        Raises:
            OSError: when the connection is broken; TimeoutError when nothing comes until ``deadline``.
        """
        if not self._ahead and len(view) >= len(self._buffer):
            return self._receive(view, deadline)
        if not self._ahead:
            self._ahead = self._buffer[: self._receive(self._buffer, deadline)]
        count = min(len(view), len(self._ahead))
        view[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return count

    def write(self, head: bytes, data: bytes | memoryview, deadline: float) -> None:
        """Write all of ``head`` and ``data``.

        Raises:
            OSError: when the connection is broken; TimeoutError when the peer has not taken it all by ``deadline``.
        """
        parts = [head + data] if len(data) < _JOINED_BYTES else [head, data]
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[self._write_some(view, deadline) :]

    def hurry(self, deadline: float) -> None:
        """Let no wait go on after ``deadline``, those of other threads included."""
        self._latest = min(self._latest, deadline)

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """End one direction or both; a thread that waits in here wakes up."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own: it would drop its state under a thread that is reading.
            socket.socket.shutdown(self._endpoint, how)

    def close(self) -> None:
        """Release the socket. No other thread may be in here."""
        self._endpoint.close()

    def _receive(self, view: memoryview, deadline: float) -> int:
        while True:
            try:
                with self._lock:
                    count = self._endpoint.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
            else:
                self.received += count
                return count

    def _write_some(self, view: memoryview, deadline: float) -> int:
        while True:
            try:
                with self._lock:
                    count = self._endpoint.send(view)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, deadline)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            else:
                self.sent += count
                return count

    def _wait(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._endpoint, event)
        while (left := min(deadline, self._latest) - time.monotonic()) > 0:
            if poll.poll(math.ceil(min(left, _LOOK_SECONDS) * 1000)):
                return
        raise TimeoutError("timed out")
