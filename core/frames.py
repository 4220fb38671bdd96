"""Frames of the plain TCP worker: a length, then one MessagePack array whose first element names its kind.

    u32 little-endian length | [kind, fields…]

The same manifest, chunks and state machine as over gRPC travel in them. An end of stream inside a frame, or before the
answer that is due, is an error. docs/wire.md has the layout.
"""

from __future__ import annotations

import collections
import socket
import struct
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.core import errors, limits
from kvferry.core.errors import DeadlineError, FieldValue, KvferryError, TooLargeError, TransferError
from kvferry.core.streams import Stream

VERSION = 1
MAX_FRAME_BYTES = limits.MAX_MESSAGE_BYTES
MAX_HELLO_BYTES = 4096
DEFAULT_SECONDS = 60.0
_LENGTH = struct.Struct("<I")
# What an error says is for people; long values are for the log of whoever raised it.
_MAX_MESSAGE = 3000
_MAX_FIELD = 600

Index = Annotated[int, Meta(ge=0, lt=2**32)]
Count = Annotated[int, Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0, forbid_unknown_fields=True):
    """Opens a connection: who calls, in which version of this protocol, and the id of the call that it belongs to."""

    token: str
    version: int = VERSION
    request_id: str = ""


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """Asks for a verdict on a manifest."""

    manifest: bytes


class Offered(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    """The verdict: reasons as (code, field, artifact's value, receiver's value), and missing chunk runs."""

    artifact_id: bytes
    reasons: tuple[tuple[str, str, str, str], ...]
    missing: tuple[tuple[Index, Index], ...]
    committed: bool


class Put(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    """One chunk. ``data`` of a received frame is a view of a buffer that is used again, see ``Connection``."""

    artifact_id: bytes
    index: Index
    data: memoryview


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    """A chunk is verified and written."""

    index: Index


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=5, forbid_unknown_fields=True):
    """Asks for publication."""

    artifact_id: bytes
    account_json: str


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=6, forbid_unknown_fields=True):
    """The receipt."""

    artifact_id: bytes
    payload_digest: bytes
    received_bytes: Count
    control_bytes: Count


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=7, forbid_unknown_fields=True):
    """An error of ours; the connection ends after it."""

    code: str
    message: str
    fields: dict[str, str | int | float | None]


Frame = Hello | Offer | Offered | Put | Taken | Commit | Committed | Failed
# Made once: looking the types up takes longer than reading a frame.
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Return a frame with its length.

    Raises:
        TooLargeError: when it is over the limit.
    """
    head, data = _parts(frame)
    return head + data


def decode(body: bytes | bytearray | memoryview) -> Frame:
    """Parse a frame's body.

    Raises:
        TransferError: when it is not exactly one known frame.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError(f"frame: {error}") from error


def failure(error: KvferryError) -> Failed:
    """Return the frame of an error; what is too long, or no frame can hold, is cut."""
    fields = {name: _portable(value, _MAX_FIELD) for name, value in error.fields.items()}
    return Failed(error.code, str(_portable(error.message, _MAX_MESSAGE)), fields)


def rebuild(frame: Failed) -> KvferryError:
    """Return the error of a frame."""
    cls = errors.error_classes().get(frame.code, errors.PeerError)
    # These two are names of the constructor's own.
    fields: dict[str, FieldValue] = {k: v for k, v in frame.fields.items() if k not in ("self", "message")}
    return cls(frame.message, **fields)


class Connection:
    """Frames over a connected socket. One thread may send while another receives.

    Attributes:
        seconds: how long a frame may take to come, from the moment it is waited for, and to go.
    """

    def __init__(
        self,
        endpoint: socket.socket,
        seconds: float = DEFAULT_SECONDS,
        *,
        peer: str = "connection",
        buffers: int = 1,
    ) -> None:
        """Take over a socket.

        Args:
            endpoint: connected; a ``ssl.SSLSocket`` without its handshake.
            seconds: see the class.
            peer: what errors call the other end.
            buffers: a chunk's data stays as it is until so many frames have come after it.
        """
        self._stream = Stream(endpoint)
        self._peer = peer
        self._length = bytearray(_LENGTH.size)
        self._bodies = collections.deque(bytearray() for _ in range(buffers))
        self.seconds = seconds

    @property
    def received(self) -> int:
        """Bytes of all frames so far, those of one that was cut off included."""
        return self._stream.received - len(self._stream.ahead)

    @property
    def has_frame(self) -> bool:
        """Whether a whole frame has come already, so that ``receive`` will not wait. False for a large one."""
        ahead = self._stream.ahead
        return len(ahead) >= _LENGTH.size and len(ahead) >= _LENGTH.size + _LENGTH.unpack_from(ahead)[0]

    @property
    def sent(self) -> int:
        """Bytes that went so far."""
        return self._stream.sent

    def handshake(self) -> None:
        """Do TLS's part, where the socket has one.

        Raises:
            TransferError: when it fails or takes too long.
        """
        try:
            self._stream.handshake(time.monotonic() + self.seconds)
        except OSError as error:
            raise TransferError(f"{self._peer}: TLS handshake failed ({error})") from error

    def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            TransferError: when the connection is broken.
            DeadlineError: when the peer does not take it in time.
        """
        head, data = _parts(frame)
        try:
            self._stream.write(head, data, time.monotonic() + self.seconds)
        except TimeoutError as error:
            raise DeadlineError(f"{self._peer}: takes nothing for {self.seconds:g} s") from error
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, limit: int = MAX_FRAME_BYTES, seconds: float | None = None) -> Frame | None:
        """Return the next frame, or None when the peer ended the stream between frames.

        Args:
            limit: largest frame that may come now.
            seconds: how long it may take, where that is not ``self.seconds``.

        Raises:
            TransferError: when the connection breaks or ends inside a frame, or holds no known one.
            DeadlineError: when no whole frame comes in time.
            TooLargeError: when a frame declares more than the limit; nothing is allocated for it.
        """
        seconds = self.seconds if seconds is None else seconds
        try:
            return self._receive(limit, time.monotonic() + seconds)
        except TimeoutError as error:
            raise DeadlineError(f"{self._peer}: no whole frame in {seconds:g} s") from error
        except OSError as error:
            raise self._broken(error) from error

    def finish(self, seconds: float) -> None:
        """Say that nothing more will be sent, and receive for so long at most, also in another thread."""
        self._stream.shutdown(socket.SHUT_WR)
        self._stream.hurry(time.monotonic() + seconds)

    def drain(self, limit: int) -> None:
        """Take what the peer still sends, so many bytes at most: hung up on, it might not read what was sent to it."""
        until = self.received + limit
        scratch = memoryview(bytearray(64 * 1024))
        try:
            while self._stream.read_into(scratch, time.monotonic() + self.seconds) and self.received < until:
                pass
        except OSError:
            return

    def shutdown(self) -> None:
        """End both directions, so that a thread that waits here wakes up."""
        self._stream.shutdown()

    def close(self) -> None:
        """Release the socket. No other thread may be in here."""
        self._stream.close()

    def _receive(self, limit: int, deadline: float) -> Frame | None:
        if not self._fill(memoryview(self._length), deadline, at_edge=True):
            return None
        (length,) = _LENGTH.unpack(self._length)
        _check_length(length, limit)
        # Memory that was just used is quicker to fill than new memory.
        self._bodies.rotate()
        if length > len(self._bodies[0]):
            self._bodies[0] = bytearray(length)
        view = memoryview(self._bodies[0])[:length]
        self._fill(view, deadline, at_edge=False)
        return decode(view)

    def _fill(self, view: memoryview, deadline: float, *, at_edge: bool) -> bool:
        filled = 0
        while filled < len(view):
            count = self._stream.read_into(view[filled:], deadline)
            if count == 0:
                if at_edge and filled == 0:
                    return False
                raise TransferError(f"{self._peer}: ended inside a frame, {filled} of {len(view)} bytes")
            filled += count
            # A peer that trickles never makes a read wait until the deadline.
            if filled < len(view) and time.monotonic() > deadline:
                raise TimeoutError
        return True

    def _broken(self, error: OSError) -> TransferError:
        return TransferError(f"{self._peer}: the connection broke ({error.strerror or error})")


def _parts(frame: Frame) -> tuple[bytes, memoryview]:
    """Return a frame with its length in two parts; a chunk's data, the last field, is not copied."""
    if not isinstance(frame, Put):
        head, data = msgspec.msgpack.encode(frame), memoryview(b"")
    else:
        data = memoryview(frame.data)
        empty = msgspec.msgpack.encode(Put(frame.artifact_id, frame.index, memoryview(b"")))
        head = empty[: -len(_bin_header(0))] + _bin_header(len(data))
    _check_length(len(head) + len(data), MAX_FRAME_BYTES)
    return _LENGTH.pack(len(head) + len(data)) + head, data


def _bin_header(length: int) -> bytes:
    """Return what MessagePack writes before this many bytes."""
    for code, size in ((b"\xc4", 1), (b"\xc5", 2)):
        if length < 1 << 8 * size:
            return code + length.to_bytes(size, "big")
    return b"\xc6" + length.to_bytes(4, "big")


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise TooLargeError(f"frame: {length} bytes, the limit is {limit}", value=length, limit=limit)


def _portable(value: FieldValue, limit: int) -> FieldValue:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if not isinstance(value, str):
        return value
    text = value.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"
