"""Frames of the plain TCP worker: bytes of any kind on a connection, cut anywhere."""

from __future__ import annotations

import socket
from typing import Any

import msgpack
from hypothesis import strategies as st

from kvferry.core import errors, frames
from kvferry.core.errors import KvferryError, TooLargeError, TransferError

MIB = 2**20
# The frame itself, and what is built of it: at most so many objects of a hundred bytes.
PER_BYTE, FIXED = 60, 16 * MIB

true_ones = st.sampled_from(
    (
        frames.Hello("kvf_secret"),
        frames.Offer(b"manifest"),
        frames.Offered(b"i" * 32, (("NO_MAPPER", "mapper", "a", "b"),), ((0, 3), (5, 9)), committed=False),
        frames.Put(b"i" * 32, 7, b"data"),
        frames.Taken(7),
        frames.Commit(b"i" * 32, "{}"),
        frames.Committed(b"i" * 32, b"d" * 32, 5, 6),
        frames.Failed("BUSY", "try again", {"retry_after_ms": 500, "field": None}),
    )
)
scalar = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
scalar |= st.binary(max_size=9) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9))
anything = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
)
tagged = st.builds(lambda tag, rest: [tag, *rest], st.integers(-1, 9), st.lists(anything, max_size=5))


def edited(frame: frames.Frame, place: float, removed: int, added: bytes) -> bytes:
    data = frames.encode(frame)[4:]
    at = int(place * (len(data) + 1))
    return data[:at] + added + data[at + removed :]


edits = st.builds(edited, true_ones, st.floats(0, 1, exclude_max=True), st.integers(0, 5), st.binary(max_size=5))
bodies = st.one_of(
    st.binary(max_size=200), edits, (anything | tagged).map(lambda value: msgpack.packb(value, strict_types=False))
)


def decodes(budget: Any, body: bytes) -> None:
    with budget.at_most(FIXED + PER_BYTE * len(body)):
        try:
            frame = frames.decode(body)
        except TransferError:
            return
    assert frames.decode(frames.encode(frame)[4:]) == frame or b"\xcb\x7f\xf8" in frames.encode(frame)


def test_bodies(fuzz: Any) -> None:
    fuzz(decodes, body=bodies)


def test_megabytes_of_one_thing(fuzz: Any) -> None:
    # Built here: hypothesis remembers whatever it has drawn.
    def explodes(budget: Any, opening: bytes, count: int, unit: bytes) -> None:
        room = (frames.MAX_FRAME_BYTES - 100) // len(unit)
        decodes(budget, opening + count.to_bytes(4, "big") + unit * room)

    openings = (
        b"\x95\x02\xc4\x00\xdd",  # Offered: reasons
        b"\x95\x02\xc4\x00\x90\xdd",  # Offered: missing
        b"\x94\x07\xa0\xa0\xdf",  # Failed: fields
        b"\xdd",
        b"\x92\x00\xdb",
        b"\x92\x01\xc6",
    )
    units = (b"\x94\xa0\xa0\xa0\xa0", b"\x92\x00\x00", b"\xa0\x00", b"\x90", b"\x00", b"\xa1x\xa0")
    rooms = [(frames.MAX_FRAME_BYTES - 100) // len(unit) for unit in units]
    fuzz(
        explodes,
        heavy=True,
        opening=st.sampled_from(openings),
        count=st.sampled_from(rooms) | st.integers(0, 2**32 - 1),
        unit=st.sampled_from(units),
    )


def receives(budget: Any, parts: list[bytes], declared: int | None) -> None:
    """Put bytes on a connection and end it: whole frames come out, then an error of ours, or nothing."""
    data = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    if declared is not None:
        data += declared.to_bytes(4, "little") + b"rest"
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
        connection = frames.Connection(there)
        with budget.at_most(2 * frames.MAX_FRAME_BYTES):
            try:
                while connection.receive() is not None:
                    pass
            except (TransferError, TooLargeError):
                return
    # The stream ended between frames: so all of them were whole.
    assert declared is None


def test_connections(fuzz: Any) -> None:
    fuzz(
        receives,
        parts=st.lists(bodies, max_size=4),
        declared=st.none() | st.sampled_from((5, 4 * MIB, 4 * MIB + 1, 2**31, 2**32 - 1)) | st.integers(5, 2**32 - 1),
    )


def test_errors_of_a_stranger(fuzz: Any) -> None:
    """Whatever a failed frame holds, an error of ours comes of it."""

    def rebuilds(budget: Any, code: str, message: str, fields: dict[str, Any]) -> None:
        error = frames.rebuild(frames.Failed(code, message, fields))
        assert isinstance(error, KvferryError)
        assert error.message == KvferryError(message).message

    fuzz(
        rebuilds,
        code=st.sampled_from(sorted(errors.error_classes())) | st.text(max_size=9),
        message=st.text(max_size=20),
        fields=st.dictionaries(
            st.sampled_from(("self", "message", "field", "code", "args", "")) | st.text(max_size=9),
            st.none() | st.integers() | st.text(max_size=9) | st.floats(),
            max_size=6,
        ),
    )
