"""Chunks as protobuf messages without protobuf: the same bytes, and the same reading of any bytes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import put_messages
from kvferry.proto.v1 import receiver_service_pb2 as pb

ID = bytes(range(32))
indices = st.sampled_from((0, 1, 127, 128, 2**14, 2**31, 2**32 - 1)) | st.integers(0, 2**32 - 1)
messages = st.builds(
    lambda artifact_id, index, data: pb.PutRequest(artifact_id=artifact_id, index=index, data=data),
    st.just(ID) | st.binary(max_size=40),
    indices,
    st.binary(max_size=300),
)


@given(messages)
def test_what_is_written_is_what_protobuf_writes(message: pb.PutRequest) -> None:
    assert put_messages.encode(message.artifact_id, message.index, message.data) == message.SerializeToString()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 20, 2 << 20])
def test_sizes_around_the_edges_of_a_length(size: int) -> None:
    expected = pb.PutRequest(artifact_id=ID, index=5, data=bytes(size)).SerializeToString()
    assert put_messages.encode(ID, 5, bytes(size)) == expected
    read = put_messages.decode(expected)
    assert (read.artifact_id, read.index, len(read.data)) == (ID, 5, size)
    assert read.control_bytes == len(expected) - size


def test_the_data_is_a_view_and_no_copy() -> None:
    message = put_messages.encode(ID, 5, bytes(1 << 20))
    read = put_messages.decode(message)
    assert isinstance(read.data, memoryview)
    assert read.data.obj is message


def same(raw: bytes) -> None:
    try:
        expected = pb.PutRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            put_messages.decode(raw)
        return
    read = put_messages.decode(raw)
    assert (read.artifact_id, read.index, bytes(read.data)) == (expected.artifact_id, expected.index, expected.data)
    assert read.control_bytes == len(raw) - len(expected.data)


@given(st.binary(max_size=80))
def test_any_bytes_are_read_as_protobuf_reads_them(raw: bytes) -> None:
    same(raw)


@given(messages, st.integers(0, 400), st.integers(0, 4), st.binary(max_size=6))
def test_edited_messages_are_read_as_protobuf_reads_them(
    message: pb.PutRequest, place: int, removed: int, added: bytes
) -> None:
    raw = message.SerializeToString()
    place %= len(raw) + 1
    same(raw[:place] + added + raw[place + removed :])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a\x20" + ID + b"\x1a\x01x\x10\x05",  # the index last
        b"\x1a\x01x\x0a\x20" + ID,  # the data first
        b"\x0a\x20" + ID + b"\x1a\x01x\x1a\x02yz",  # the data twice: the last one counts
        b"\x0a\x20" + ID + b"\x10\x05\x10\x06\x1a\x01x",  # the index twice
        b"\x0a\x20" + ID + b"\x10\x85\x00\x1a\x81\x00x",  # numbers longer than they need be
        b"\x0a\x20" + ID + b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x1a\x01x",  # an index of 64 bits
        b"\x0a\x20" + ID + b"\x10\xff\xff\xff\xff\x1f\x1a\x01x",  # an index of 33 bits
        b"\x0a\x20" + ID + b"\x22\x01q\x1a\x01x",  # a field of a later version
        b"\x0a\x20" + ID,
        b"",
    ],
)
def test_other_shapes_of_the_same_message_are_read_too(raw: bytes) -> None:
    same(raw)
