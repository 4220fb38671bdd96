"""Frames of the plain TCP worker: a length, then one MessagePack array whose first element names its kind.

    u32 little-endian length | [kind, fields…]

The same manifest, chunks and state machine as over gRPC travel in them. An end of stream inside a frame, or before the
answer that is due, is an error.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from kvferry.core import errors, limits
from kvferry.core.errors import FieldValue, KvferryError, TooLargeError, TransferError

MAX_FRAME_BYTES = limits.MAX_MESSAGE_BYTES
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0, forbid_unknown_fields=True):
    """Opens a connection: who calls."""

    token: str


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Asks for a verdict on a manifest."""

    manifest: bytes


class Offered(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The verdict: reasons as (code, field, artifact's value, receiver's value), and missing chunk runs."""

    artifact_id: bytes
    reasons: tuple[tuple[str, str, str, str], ...]
    missing: tuple[tuple[int, int], ...]
    committed: bool


class Put(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """One chunk."""

    artifact_id: bytes
    index: int
    data: bytes


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """A chunk is verified and written."""

    index: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Asks for publication."""

    artifact_id: bytes
    account_json: str


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """The receipt."""

    artifact_id: bytes
    payload_digest: bytes
    received_bytes: int
    control_bytes: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """An error of ours; the connection ends after it."""

    code: str
    message: str
    fields: dict[str, str | int | float | None]


Frame = Hello | Offer | Offered | Put | Taken | Commit | Committed | Failed


def encode(frame: Frame) -> bytes:
    """Return a frame with its length.

    Raises:
        TooLargeError: when it is over the limit.
    """
    body = msgspec.msgpack.encode(frame)
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray | memoryview) -> Frame:
    """Parse a frame's body.

    Raises:
        TransferError: when it is not exactly one known frame.
    """
    try:
        return msgspec.msgpack.decode(body, type=Frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TransferError(f"frame: {error}") from error


def failure(error: KvferryError) -> Failed:
    """Return the frame of an error."""
    return Failed(error.code, error.message, dict(error.fields))


def rebuild(frame: Failed) -> KvferryError:
    """Return the error of a frame."""
    cls = errors.error_classes().get(frame.code, errors.PeerError)
    fields: dict[str, FieldValue] = {name: value for name, value in frame.fields.items() if name != "message"}
    return cls(frame.message, **fields)


class Connection:
    """Frames over a connected socket. One thread may send while another receives."""

    def __init__(self, endpoint: socket.socket) -> None:
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = endpoint
        self._length = bytearray(_LENGTH.size)
        self._body = bytearray()

    def send(self, frame: Frame) -> int:
        """Send a frame and return its size.

        Raises:
            TransferError: when the peer is gone or takes nothing within the socket's time limit.
        """
        data = encode(frame)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise TransferError(f"connection: {error.strerror or error}") from error
        return len(data)

    def receive(self) -> tuple[Frame, int] | None:
        """Return the next frame and its size, or None when the peer ended the stream between frames.

        Raises:
            TransferError: when the stream ends inside a frame, is silent for too long, or holds no known frame.
            TooLargeError: when a frame declares more than the limit; nothing is allocated for it.
        """
        if not self._fill(memoryview(self._length), at_edge=True):
            return None
        (length,) = _LENGTH.unpack(self._length)
        _check_length(length)
        if length > len(self._body):
            self._body = bytearray(length)
        view = memoryview(self._body)[:length]
        self._fill(view, at_edge=False)
        return decode(view), _LENGTH.size + length

    def expect(self) -> tuple[Frame, int]:
        """Return the next frame; an end of stream is an error."""
        received = self.receive()
        if received is None:
            raise TransferError("connection: ended before the answer that was due")
        if isinstance(received[0], Failed):
            raise rebuild(received[0])
        return received

    def shutdown(self) -> None:
        """End both directions, so that a thread that waits here wakes up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _fill(self, view: memoryview, *, at_edge: bool) -> bool:
        filled = 0
        while filled < len(view):
            try:
                count = self._socket.recv_into(view[filled:])
            except OSError as error:
                raise TransferError(f"connection: {error.strerror or error}") from error
            if count == 0:
                if at_edge and filled == 0:
                    return False
                raise TransferError(f"connection: ended inside a frame, {filled} of {len(view)} bytes")
            filled += count
        return True


def _check_length(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise TooLargeError(
            f"frame: {length} bytes, the limit is {MAX_FRAME_BYTES}", value=length, limit=MAX_FRAME_BYTES
        )
