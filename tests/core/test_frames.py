"""Frames of the plain TCP worker: their bytes, what is refused, errors that travel, and connections that misbehave."""

from __future__ import annotations

import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import errors, frames
from kvferry.core.errors import DeadlineError, KvferryError, PeerError, TooLargeError, TransferError
from kvferry.core.frames import Connection

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "wire.md"
ID = b"\x11" * 32
HELLO = frames.Hello("kvf_secret")
PUT = frames.Put(ID, 7, memoryview(b"data"))
GOLDEN = {
    HELLO: "0f 00 00 00 94 00 aa 6b 76 66 5f 73 65 63 72 65 74 01 a0",
    PUT: f"2b 00 00 00 94 03 c4 20 {' '.join(['11'] * 32)} 07 c4 04 64 61 74 61",
}

texts = st.text(max_size=20)
blobs = st.binary(max_size=40)
indices = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**63)
fields = st.dictionaries(texts, st.none() | texts | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False))
any_frame = st.one_of(
    st.builds(frames.Hello, texts, st.integers(0, 2**31), texts),
    st.builds(frames.Offer, blobs),
    st.builds(
        frames.Offered,
        blobs,
        st.lists(st.tuples(texts, texts, texts, texts), max_size=3).map(tuple),
        st.lists(st.tuples(indices, indices), max_size=3).map(tuple),
        st.booleans(),
    ),
    st.builds(frames.Put, blobs, indices, blobs.map(memoryview)),
    st.builds(frames.Taken, indices),
    st.builds(frames.Commit, blobs, texts),
    st.builds(frames.Committed, blobs, blobs, counts, counts),
    st.builds(frames.Failed, texts, texts, fields),
)


def pack(*body: Any) -> bytes:
    """Write a frame with another MessagePack library."""
    data: bytes = msgpack.packb(body)
    return struct.pack("<I", len(data)) + data


class TestBytes:
    @pytest.mark.parametrize("frame", GOLDEN, ids=["hello", "put"])
    def test_a_frame_is_written_as_the_document_shows_it(self, frame: frames.Frame) -> None:
        assert frames.encode(frame).hex(" ") == GOLDEN[frame]
        assert GOLDEN[frame] in " ".join(DOCUMENT.read_text("utf-8").split())

    @pytest.mark.parametrize(
        ("frame", "body"),
        [
            (HELLO, [0, "kvf_secret", 1, ""]),
            (frames.Offer(b"m"), [1, b"m"]),
            (
                frames.Offered(ID, (("NO_MAPPER", "f", "a", "r"),), ((0, 3), (5, 9)), committed=False),
                [2, ID, [["NO_MAPPER", "f", "a", "r"]], [[0, 3], [5, 9]], False],
            ),
            (PUT, [3, ID, 7, b"data"]),
            (frames.Taken(2**32 - 1), [4, 2**32 - 1]),
            (frames.Commit(ID, "{}"), [5, ID, "{}"]),
            (frames.Committed(ID, b"\x22" * 32, 5, 6), [6, ID, b"\x22" * 32, 5, 6]),
            (
                frames.Failed("BUSY", "later", {"retry_after_ms": 500, "x": None}),
                [7, "BUSY", "later", {"retry_after_ms": 500, "x": None}],
            ),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, frames.Frame) else "",
    )
    def test_every_kind_has_its_number_and_its_fields_in_order(self, frame: frames.Frame, body: list[Any]) -> None:
        assert frames.encode(frame) == pack(*body)
        assert frames.decode(pack(*body)[4:]) == frame

    @pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 1 << 20])
    def test_a_chunk_of_any_size_is_written_as_another_library_writes_it(self, size: int) -> None:
        data = bytes(range(256)) * (size // 256 + 1)
        put = frames.Put(ID, 300, memoryview(data)[:size])
        assert frames.encode(put) == pack(3, ID, 300, data[:size])

    @given(any_frame)
    def test_what_is_written_is_read_again(self, frame: frames.Frame) -> None:
        encoded = frames.encode(frame)
        assert struct.unpack("<I", encoded[:4]) == (len(encoded) - 4,)
        assert frames.decode(encoded[4:]) == frame

    def test_a_frame_over_the_limit_is_not_written(self) -> None:
        with pytest.raises(TooLargeError, match=f"the limit is {frames.MAX_FRAME_BYTES}"):
            frames.encode(frames.Offer(bytes(frames.MAX_FRAME_BYTES)))
        whole = frames.MAX_FRAME_BYTES - len(frames.encode(frames.Put(ID, 7, memoryview(bytes(1 << 20))))) + 4
        assert len(frames.encode(frames.Put(ID, 7, memoryview(bytes((1 << 20) + whole))))) == 4 + frames.MAX_FRAME_BYTES
        with pytest.raises(TooLargeError):
            frames.encode(frames.Put(ID, 7, memoryview(bytes((1 << 20) + whole + 1))))


class TestHostileBodies:
    @given(st.binary(max_size=200))
    def test_arbitrary_bytes_are_one_frame_or_an_error_of_ours(self, body: bytes) -> None:
        try:
            frame = frames.decode(body)
        except TransferError as error:
            assert error.message.startswith("frame: ")  # noqa: PT017  (most draws are errors, not all)
        else:
            assert msgpack.unpackb(body, strict_map_key=False)[0] == type(frame).__struct_config__.tag

    @given(any_frame)
    def test_no_part_of_a_frame_is_a_frame(self, frame: frames.Frame) -> None:
        body = frames.encode(frame)[4:]
        for end in range(len(body)):
            with pytest.raises(TransferError):
                frames.decode(body[:end])
        with pytest.raises(TransferError):
            frames.decode(body + b"\xc0")

    @pytest.mark.parametrize(
        "body",
        [
            [],
            [0],
            [0, b"token", 1, ""],
            [0, 5, 1, ""],
            [0, "token", "1", ""],
            [0, "token", 1, "", "more"],
            [1, "text"],
            [1, None],
            [2, ID, [["only", "three", "texts"]], [], False],
            [2, ID, [], [[0]], False],
            [2, ID, [], [[0, -1]], False],
            [2, ID, [], [[0, 2**32]], False],
            [2, ID, [], [], 0],
            [3, ID, -1, b"data"],
            [3, ID, 2**32, b"data"],
            [3, ID, 1.0, b"data"],
            [3, ID, 1, "data"],
            [3, ID, 1],
            [4, "0"],
            [4, True],
            [5, ID, {}],
            [6, ID, ID, -1, 0],
            [7, "BUSY", "later", {"a": [1]}],
            [7, "BUSY", "later", {1: 1}],
            [7, "BUSY", "later", []],
            [8],
            [-1],
            ["0", "token"],
            {"0": 0},
            "hello",
            None,
        ],
        ids=str,
    )
    def test_fields_of_wrong_types_and_unknown_kinds_are_refused(self, body: Any) -> None:
        with pytest.raises(TransferError, match="^frame: "):
            frames.decode(msgpack.packb(body))

    @pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa0", b"\xdd\x00\x00\x00\x01"])
    def test_depth_is_refused_without_falling_over_it(self, opening: bytes) -> None:
        with pytest.raises(TransferError):
            frames.decode(b"\x94\x07\xa0\xa0\x81\xa1x" + opening * 100_000)


class TestErrors:
    @pytest.mark.parametrize("code", sorted(errors.error_classes()))
    def test_every_class_arrives_as_itself(self, code: str) -> None:
        sent = errors.error_classes()[code]("chunk 3: something", chunk=3, limit=2.5, name="x", nothing=None)
        frame = frames.decode(frames.encode(frames.failure(sent))[4:])
        assert isinstance(frame, frames.Failed)
        got = frames.rebuild(frame)
        assert (type(got), got.message, got.fields) == (type(sent), sent.message, sent.fields)

    def test_an_unknown_code_is_a_fault_of_the_peer(self) -> None:
        got = frames.rebuild(frames.Failed("FROM_THE_FUTURE", "what", {}))
        assert (type(got), got.message) == (PeerError, "what")

    def test_names_of_the_constructor_are_no_fields(self) -> None:
        got = frames.rebuild(frames.Failed("BUSY", "later", {"self": 1, "message": "other", "chunk": 3}))
        assert (got.message, got.fields) == ("later", {"chunk": 3})

    def test_what_no_frame_can_hold_is_cut_and_written(self) -> None:
        sent = KvferryError("m" * 10**6, big=2**70, negative=-(2**70), half="\ud800", long="x" * 10**6, mebi=2**64 - 1)
        encoded = frames.encode(frames.failure(sent))
        assert len(encoded) < 5000
        got = frames.rebuild(frames.decode(encoded[4:]))  # type: ignore[arg-type]
        assert got.message[:100] == "m" * 100
        assert got.fields["big"] == str(2**70)
        assert got.fields["mebi"] == 2**64 - 1


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    """Yield a bare socket and a connection at its other end, over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        connection = Connection(listener.accept()[0], 5.0)
    with here:
        yield here, connection
    connection.close()


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class TestConnections:
    def test_frames_come_out_one_by_one_and_then_the_end(self, pair: Any) -> None:
        here, connection = pair
        here.sendall(frames.encode(HELLO) + frames.encode(PUT) + frames.encode(frames.Taken(1)))
        here.shutdown(socket.SHUT_WR)
        assert [connection.receive() for _ in range(3)] == [HELLO, PUT, frames.Taken(1)]
        assert connection.receive() is None

    def test_single_bytes_make_a_frame_too(self, pair: Any) -> None:
        here, connection = pair
        big = frames.encode(frames.Put(ID, 7, memoryview(bytes(700))))

        def trickle() -> None:
            for byte in big:
                here.sendall(bytes([byte]))

        thread = in_background(trickle)
        assert connection.receive() == frames.Put(ID, 7, memoryview(bytes(700)))
        thread.join()

    def test_an_end_anywhere_inside_a_frame_is_an_error(self) -> None:
        encoded = frames.encode(frames.Put(ID, 7, memoryview(bytes(600))))
        for cut in (1, 3, 4, 5, 40, 100, 511, 512, 513, len(encoded) - 1):
            here, there = socket.socketpair()
            with here, there:
                here.sendall(encoded[:cut])
                here.shutdown(socket.SHUT_WR)
                with pytest.raises(TransferError, match=r"ended inside a frame, \d+ of \d+ bytes"):
                    Connection(there).receive()

    @pytest.mark.parametrize(
        ("length", "limit"), [(2**32 - 1, None), (frames.MAX_FRAME_BYTES + 1, None), (4097, 4096), (2**20, 100)]
    )
    def test_a_length_over_the_limit_takes_no_memory(self, pair: Any, length: int, limit: int | None) -> None:
        here, connection = pair
        here.sendall(struct.pack("<I", length) + bytes(100))
        tracemalloc.start()
        try:
            with pytest.raises(TooLargeError, match=f"frame: {length} bytes, the limit is") as caught:
                connection.receive(**{"limit": limit} if limit else {})
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()
        assert caught.value.fields == {"value": length, "limit": limit or frames.MAX_FRAME_BYTES}

    def test_silence_has_an_end(self, pair: Any) -> None:
        here, connection = pair
        for already in (b"", b"\x05", b"\x05\x00\x00\x00abc"):
            here.sendall(already)
            start = time.monotonic()
            with pytest.raises(DeadlineError, match=r"no whole frame in 0.05 s"):
                connection.receive(seconds=0.05)
            assert 0.04 < time.monotonic() - start < 2

    def test_a_frame_that_trickles_has_an_end_too(self, pair: Any) -> None:
        here, connection = pair
        stop = threading.Event()

        def trickle() -> None:
            here.sendall(struct.pack("<I", 1000))
            while not stop.wait(0.02):
                here.sendall(b"\x00")

        thread = in_background(trickle)
        start = time.monotonic()
        with pytest.raises(DeadlineError):
            connection.receive(seconds=0.2)
        assert 0.15 < time.monotonic() - start < 2
        stop.set()
        thread.join()

    def test_a_peer_that_takes_nothing_is_given_up(self, pair: Any) -> None:
        _, connection = pair
        connection.seconds = 0.1
        with pytest.raises(DeadlineError, match="takes nothing for 0.1 s"):  # noqa: PT012  (buffers take the first ones)
            for _ in range(100):
                connection.send(frames.Put(ID, 0, memoryview(bytes(1 << 20))))

    def test_a_broken_connection_is_an_error_in_both_directions(self, pair: Any) -> None:
        here, connection = pair
        here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        here.close()
        with pytest.raises(TransferError, match="the connection broke"):
            connection.receive()
        with pytest.raises(TransferError, match="the connection broke"):
            connection.send(HELLO)

    def test_a_shutdown_wakes_whoever_waits(self, pair: Any) -> None:
        _, connection = pair
        got: list[Any] = []
        thread = in_background(lambda: got.append(connection.receive()))
        time.sleep(0.05)
        connection.shutdown()
        thread.join(2)
        assert got == [None]

    def test_whoever_waits_can_be_hurried(self, pair: Any) -> None:
        _, connection = pair
        got: list[Any] = []

        def wait() -> None:
            try:
                connection.receive(seconds=60)
            except DeadlineError as error:
                got.append(error)

        thread = in_background(wait)
        time.sleep(0.05)
        connection.finish(0.1)
        thread.join(2)
        assert len(got) == 1

    def test_bytes_are_counted_by_the_frame(self, pair: Any) -> None:
        here, connection = pair
        one, two = frames.encode(HELLO), frames.encode(PUT)
        here.sendall(one + two + b"\x09\x00\x00\x00abc")
        here.shutdown(socket.SHUT_WR)
        connection.receive()
        assert connection.received == len(one)
        connection.receive()
        assert connection.received == len(one) + len(two)
        with pytest.raises(TransferError):
            connection.receive()
        assert connection.received == len(one) + len(two) + 7
        connection.send(PUT)
        assert connection.sent == len(two)

    def test_it_knows_whether_another_frame_has_come(self, pair: Any) -> None:
        here, connection = pair
        taken = frames.encode(frames.Taken(1))
        here.sendall(taken * 2 + taken[:5])
        connection.receive()
        assert connection.has_frame
        connection.receive()
        assert not connection.has_frame
        here.sendall(taken[5:])
        assert connection.receive() == frames.Taken(1)
        assert not connection.has_frame

    def test_the_data_of_a_chunk_stays_for_as_many_frames_as_there_are_buffers(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            connection = Connection(there, buffers=3)
            for index in range(4):
                here.sendall(frames.encode(frames.Put(ID, index, memoryview(bytes([index]) * 600))))
            kept = [connection.receive() for _ in range(3)]
            assert [bytes(put.data[:2]) for put in kept] == [b"\x00\x00", b"\x01\x01", b"\x02\x02"]
            connection.receive()
            assert bytes(kept[0].data[:2]) == b"\x03\x03"
            assert bytes(kept[1].data[:2]) == b"\x01\x01"

    def test_last_words_are_read_although_the_peer_goes_on_sending(self, pair: Any) -> None:
        here, connection = pair

        def flood() -> None:
            here.sendall(bytes(8 << 20))
            here.shutdown(socket.SHUT_WR)

        thread = in_background(flood)
        connection.send(frames.Taken(5))
        connection.finish(5.0)
        connection.drain(64 << 20)
        connection.close()
        thread.join(5)
        assert here.recv(100) == frames.encode(frames.Taken(5))
        assert here.recv(100) == b""

    @pytest.mark.parametrize(("seconds", "limit"), [(0.1, 1 << 40), (30.0, 1 << 20)])
    def test_draining_has_an_end(self, pair: Any, seconds: float, limit: int) -> None:
        here, connection = pair
        here.settimeout(2)

        def flood() -> None:
            try:
                while True:
                    here.sendall(bytes(1 << 16))
            except OSError:
                return

        thread = in_background(flood)
        start = time.monotonic()
        connection.finish(seconds)
        connection.drain(limit)
        assert time.monotonic() - start < 2
        connection.close()
        thread.join(5)
