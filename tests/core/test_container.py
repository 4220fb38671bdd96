"""The payload's bytes: where the header and every section lie, and the digests that are made while they are written."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import container
from kvferry.core.container import Content, raw_section
from kvferry.core.errors import ContainerError
from kvferry.core.manifest import Decoded, Payload, Section

steady = settings(derandomize=True, database=None, deadline=None, max_examples=60)

GOLDEN = (
    b"\xd0\x00\x00\x00\x00\x00\x00\x00"
    b'{"prompt.system":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},'
    b'"layers.0.positions":{"dtype":"I32","shape":[1,2],"data_offsets":[5,13]},'
    b'"document.text":{"dtype":"U8","shape":[0],"data_offsets":[13,13]}}    '
    b"brief\x00\x00\x00\x00\xff\xff\xff\xff"
)
GOLDEN_CHUNKS = (GOLDEN[:100], GOLDEN[100:200], GOLDEN[200:216], GOLDEN[216:221], GOLDEN[221:229])


def golden_contents() -> tuple[Content, ...]:
    return (
        raw_section("prompt.system", "U8", (5,), b"brief"),
        raw_section("layers.0.positions", "I32", (1, 2), np.array([[0, -1]], "<i4").tobytes()),
        raw_section("document.text", "U8", (0,), b""),
    )


def written(contents: Iterable[Content], chunk_size: int) -> tuple[bytes, tuple[Section, ...], Payload]:
    """The payload that is written, and what the manifest says of it."""
    file = io.BytesIO()
    sections, payload = container.write_payload(contents, file.write, chunk_size)
    return file.getvalue(), sections, payload


# Layout


def test_the_bytes_of_a_known_payload_never_change() -> None:
    assert written(golden_contents(), 100)[0] == GOLDEN


def test_the_digests_of_a_known_payload_never_change() -> None:
    """By the definition: every chunk's digest, then the digests of these, section by section and of all."""
    assert b"".join(GOLDEN_CHUNKS) == GOLDEN
    chunks = [blake3(chunk).digest() for chunk in GOLDEN_CHUNKS]
    sections = (
        Section("prompt.system", "U8", (5,), "raw", 5, blake3(chunks[3]).digest(), None),
        Section("layers.0.positions", "I32", (1, 2), "raw", 8, blake3(chunks[4]).digest(), None),
        Section("document.text", "U8", (0,), "raw", 0, blake3(b"").digest(), None),
    )
    joined = b"".join(chunks)
    assert written(golden_contents(), 100)[1:] == (sections, Payload(229, blake3(joined).digest(), 100, joined))
    assert blake3(joined).hexdigest() == "d8ee7f380a7a9bfb22086242cb5a23d98e9be524311fae8729c4f57d795ed788"


@pytest.mark.parametrize("extra", range(9))
def test_the_header_is_padded_with_spaces_to_eight_bytes(extra: int) -> None:
    head = container.header([raw_section("n" * (1 + extra), "U8", (3,), b"abc")])
    (length,) = struct.unpack("<Q", head[:8])
    text = head[8:]
    assert length == len(text)
    assert len(head) % 8 == 0
    assert len(text) - len(text.rstrip(b" ")) < 8
    assert json.loads(text) == {"n" * (1 + extra): {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}


def test_the_header_of_the_description_is_that_of_the_content(kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    assert container.header(example.manifest.sections) == container.header(example.contents)


def test_the_header_says_where_the_payload_holds_each_section(kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    (length,) = struct.unpack("<Q", example.payload[:8])
    entries = json.loads(example.payload[8 : 8 + length])
    assert list(entries) == [content.name for content in example.contents]
    for content in example.contents:
        start, end = entries[content.name]["data_offsets"]
        assert example.payload[8 + length + start : 8 + length + end] == content.data
    assert 8 + length + end == len(example.payload)


def test_sections_stand_in_layer_order_positions_then_keys_then_values(kv_example: Callable[..., Any]) -> None:
    assert [content.name for content in kv_example().contents] == [
        "prefix.ids",
        "layers.0.keys",
        "layers.0.values",
        "layers.1.positions",
        "layers.1.keys",
        "layers.1.values",
    ]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_safetensors_library_reads_equal_tensors(kv_example: Callable[..., Any], dtype: str) -> None:
    example = kv_example(dtype=dtype)
    found = dict(safetensors.deserialize(example.payload))
    assert set(found) == {content.name for content in example.contents}
    for content in example.contents:
        tensor = found[content.name]
        assert tensor["dtype"] == content.dtype
        assert tuple(tensor["shape"]) == content.shape
        assert bytes(tensor["data"]) == bytes(content.data)


def test_the_stored_file_opens_with_its_numpy_reader(tmp_path: Path) -> None:
    arrays = {
        "f32": np.linspace(-1, 1, 6, dtype="<f4").reshape(2, 3),
        "f16": np.linspace(-1, 1, 4, dtype="<f2"),
        "i32": np.array([[-5, 5]], "<i4"),
        "u32": np.array([0, 2**32 - 1], "<u4"),
        "u8": np.arange(7, dtype="u1"),
        "empty": np.zeros(0, "u1"),
    }
    names: dict[str, Any] = {"f4": "F32", "f2": "F16", "i4": "I32", "u4": "U32", "u1": "U8"}
    contents = [
        raw_section(name, names[array.dtype.str[1:]], array.shape, array.tobytes()) for name, array in arrays.items()
    ]
    path = tmp_path / "payload.safetensors"
    with path.open("wb") as file:
        container.write_payload(contents, file.write, 1024)
    with safetensors.safe_open(path, framework="np") as opened:
        assert sorted(opened.keys()) == sorted(arrays)
        assert opened.metadata() is None
    for name, array in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)


def test_a_compressed_section_is_bytes_to_any_reader(zstd_example: Callable[..., Any]) -> None:
    example = zstd_example()
    tensor = dict(safetensors.deserialize(example.payload))["document.text"]
    assert tensor["dtype"] == "U8"
    assert bytes(tensor["data"]) == bytes(example.contents[1].data)


@pytest.mark.parametrize(("dtype", "shape", "size"), [("F32", (2, 3), 23), ("F16", (3,), 12), ("U8", (0,), 1)])
def test_a_section_whose_bytes_do_not_fit_its_shape_is_refused(dtype: Any, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ContainerError, match=f"got {size}"):
        raw_section("x", dtype, shape, bytes(size))


def test_ids_travel_as_little_endian_uint32() -> None:
    data = container.ids_to_bytes([0, 1, 258, 2**32 - 1])
    assert data == b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x01\x00\x00\xff\xff\xff\xff"
    assert container.ids_from_bytes(memoryview(data)) == [0, 1, 258, 2**32 - 1]


# Writing


@steady
@given(
    data=st.lists(st.binary(max_size=60), max_size=4),
    chunk_size=st.one_of(st.integers(1, 40), st.sampled_from([64, 333, 1000])),
)
def test_digests_are_those_of_the_bytes_cut_at_every_edge(data: list[bytes], chunk_size: int) -> None:
    contents = [raw_section(f"s{index}", "U8", (len(item),), item) for index, item in enumerate(data)]
    joined, sections, payload = written(contents, chunk_size)
    body = b"".join(data)
    assert joined.endswith(body)
    digests = []
    for part in (joined[: len(joined) - len(body)], *data):
        rest, found = part, b""
        while rest:
            found += blake3(rest[:chunk_size]).digest()
            rest = rest[chunk_size:]
        digests.append(found)
    assert [section.digest for section in sections] == [blake3(found).digest() for found in digests[1:]]
    assert [(section.name, section.length) for section in sections] == [(one.name, one.length) for one in contents]
    chunks = b"".join(digests)
    assert payload == Payload(len(joined), blake3(chunks).digest(), chunk_size, chunks)


@pytest.mark.parametrize(("chunk_size", "count"), [(215, 2), (216, 1), (217, 1), (229, 1), (72, 3), (73, 3), (71, 4)])
def test_chunks_that_divide_the_header_leave_no_empty_one(chunk_size: int, count: int) -> None:
    payload = written(golden_contents(), chunk_size)[2]
    # One more for each of the two sections that hold something, none for the empty one.
    assert len(payload.chunks) == 32 * (count + 2)


def test_views_are_taken(kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    views = (Content(one.name, one.dtype, one.shape, memoryview(one.data)) for one in example.contents)
    assert written(views, 1024) == (example.payload, example.manifest.sections, example.manifest.payload)


def test_every_byte_is_written_and_hashed_once(kv_example: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    example = kv_example()
    hashed: list[int] = []

    def counted(data: bytes | memoryview) -> bytes:
        hashed.append(len(data))
        return blake3(data).digest()

    monkeypatch.setattr(container, "digest", counted)
    joined, _, payload = written(example.contents, 1024)
    assert joined == example.payload
    # The bytes, their chunks' digests once for the section and once for the whole, those of the header for the whole.
    assert sum(hashed) == len(joined) + 2 * len(payload.chunks) - 32


def test_a_compressed_section_names_what_it_decodes_to() -> None:
    text = b"four" * 100
    content = container.zstd_section("document.text", text, 3)
    (section,) = written([content], 1024)[1]
    assert (section.encoding, section.dtype, section.shape) == ("zstd", "U8", (len(content.data),))
    assert section.length == len(content.data) < len(text)
    assert section.digest == blake3(blake3(content.data).digest()).digest()
    assert section.decoded == Decoded(400, blake3(text).digest())
