"""PutRequest messages, the one kind that carries payload, without protobuf's copies of it.

What is written and read here is protobuf's encoding, byte for byte: a peer that uses the generated classes notices
nothing. Reading knows the one shape that every serialiser writes, fields in order and the data last; anything else goes
to the generated class.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.digests import DIGEST_BYTES
from kvferry.proto.v1 import receiver_service_pb2 as pb

_ID_HEAD = bytes([1 << 3 | 2, DIGEST_BYTES])
_INDEX_TAG = 2 << 3
_DATA_TAG = 3 << 3 | 2
_ID_END = len(_ID_HEAD) + DIGEST_BYTES
_MAX_VARINT_BYTES = 5


@dataclass(frozen=True)
class PutMessage:
    """One chunk. ``control_bytes`` is the size of the message less the data."""

    artifact_id: bytes
    index: int
    data: bytes | memoryview
    control_bytes: int


def encode(artifact_id: bytes, index: int, data: bytes) -> bytes:
    """Return the message of a chunk."""
    head = pb.PutRequest(artifact_id=artifact_id, index=index).SerializeToString()
    return b"".join((head, bytes([_DATA_TAG]), _varint(len(data)), data)) if data else head


def decode(message: bytes) -> PutMessage:
    """Parse a message. ``data`` of the result is a view of it.

    Raises:
        google.protobuf.message.DecodeError: when it is none.
    """
    quick = _decode_quickly(message)
    if quick is not None:
        return quick
    request = pb.PutRequest.FromString(message)
    data = request.data
    return PutMessage(request.artifact_id, request.index, data, len(message) - len(data))


def _decode_quickly(message: bytes) -> PutMessage | None:
    if message[: len(_ID_HEAD)] != _ID_HEAD or len(message) <= _ID_END:
        return None
    at, index = _ID_END, 0
    if message[at] == _INDEX_TAG:
        index, at = _read_varint(message, at + 1)
    if index >= 2**32 or message[at : at + 1] != bytes([_DATA_TAG]):
        return None
    length, at = _read_varint(message, at + 1)
    if length != len(message) - at:
        return None
    return PutMessage(message[len(_ID_HEAD) : _ID_END], index, memoryview(message)[at:], at)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value >= 1 << 7:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most five bytes and where it ends; a number that is none is too large for any use."""
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        if at + place >= len(message):
            break
        byte = message[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 1 << 7:
            return value, at + place + 1
    return 1 << 64, at
