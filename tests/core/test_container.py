from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import container, limits
from kvferry.core.container import Content, raw_section
from kvferry.core.errors import ContainerError, IntegrityError, ManifestError, TooLargeError
from kvferry.core.manifest import Decoded, Manifest, Payload, Section

replace = msgspec.structs.replace
steady = settings(derandomize=True, database=None, deadline=None, max_examples=60)

GOLDEN = (
    b"\xd0\x00\x00\x00\x00\x00\x00\x00"
    b'{"prompt.system":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},'
    b'"layers.0.positions":{"dtype":"I32","shape":[1,2],"data_offsets":[5,13]},'
    b'"document.text":{"dtype":"U8","shape":[0],"data_offsets":[13,13]}}    '
    b"brief\x00\x00\x00\x00\xff\xff\xff\xff"
)


def golden_contents() -> tuple[Content, ...]:
    return (
        raw_section("prompt.system", "U8", (5,), b"brief"),
        raw_section("layers.0.positions", "I32", (1, 2), np.array([[0, -1]], "<i4").tobytes()),
        raw_section("document.text", "U8", (0,), b""),
    )


# Layout


def test_the_bytes_of_a_known_payload_never_change() -> None:
    assert b"".join(container.pieces(golden_contents())) == GOLDEN


@pytest.mark.parametrize("extra", range(9))
def test_the_header_is_padded_with_spaces_to_eight_bytes(extra: int) -> None:
    sections = [raw_section("n" * (1 + extra), "U8", (3,), b"abc").section]
    head = container.header(sections)
    (length,) = struct.unpack("<Q", head[:8])
    text = head[8:]
    assert length == len(text)
    assert len(head) % 8 == 0
    assert len(text) - len(text.rstrip(b" ")) < 8
    assert json.loads(text) == {"n" * (1 + extra): {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}


def test_offsets_cut_the_payload_into_its_sections(kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    ranges = container.section_offsets(example.manifest.sections)
    assert list(ranges) == [content.section.name for content in example.contents]
    for content in example.contents:
        start, end = ranges[content.section.name]
        assert example.payload[start:end] == bytes(content.data)
    assert max(end for _, end in ranges.values()) == len(example.payload)


def test_sections_stand_in_layer_order_positions_then_keys_then_values(kv_example: Callable[..., Any]) -> None:
    assert [content.section.name for content in kv_example().contents] == [
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
    assert set(found) == {content.section.name for content in example.contents}
    for content in example.contents:
        tensor = found[content.section.name]
        assert tensor["dtype"] == content.section.dtype
        assert tuple(tensor["shape"]) == content.section.shape
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
def test_digests_are_those_of_the_joined_bytes(data: list[bytes], chunk_size: int) -> None:
    contents = [raw_section(f"s{index}", "U8", (len(item),), item) for index, item in enumerate(data)]
    written: list[bytes] = []
    payload = container.write_payload(contents, lambda piece: written.append(bytes(piece)), chunk_size)
    joined = b"".join(written)
    assert joined.endswith(b"".join(data))
    chunks = [joined[at : at + chunk_size] for at in range(0, len(joined), chunk_size)]
    assert payload == Payload(
        len(joined), blake3(joined).digest(), chunk_size, b"".join(blake3(chunk).digest() for chunk in chunks)
    )
    assert container.chunk_count(payload) == len(chunks)
    ranges = [container.chunk_range(payload, index) for index in range(len(chunks))]
    assert [joined[start:end] for start, end in ranges] == chunks


def test_chunks_that_divide_the_payload_leave_no_empty_one() -> None:
    for chunk_size in (len(GOLDEN), len(GOLDEN) - 1, len(GOLDEN) + 1):
        payload = container.write_payload(golden_contents(), lambda _: None, chunk_size)
        count = 2 if chunk_size < len(GOLDEN) else 1
        assert container.chunk_count(payload) == count
        assert len(payload.chunks) == 32 * count


def test_contents_are_read_once_and_views_are_taken(kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    views = (Content(content.section, memoryview(bytes(content.data))) for content in example.contents)
    assert container.write_payload(views, lambda _: None, 1024) == example.manifest.payload


# Chunks


@pytest.fixture(scope="module")
def cut() -> tuple[Payload, list[bytes]]:
    """A payload in chunks of 16 bytes, the last one short."""
    payload = container.write_payload(golden_contents(), lambda _: None, 16)
    return payload, [GOLDEN[at : at + 16] for at in range(0, len(GOLDEN), 16)]


def test_every_true_chunk_is_accepted(cut: tuple[Payload, list[bytes]]) -> None:
    payload, chunks = cut
    assert len(chunks[-1]) == 5
    for index, chunk in enumerate(chunks):
        container.check_chunk(payload, index, chunk)
        container.check_chunk(payload, index, memoryview(chunk))


def test_every_wrong_index_is_refused(cut: tuple[Payload, list[bytes]]) -> None:
    payload, chunks = cut
    for index in (-1, -len(chunks), len(chunks), len(chunks) + 1, 2**63):
        for data in (chunks[-1], b""):
            with pytest.raises(ContainerError, match=f"^chunk {index}: the payload has 15 chunks") as caught:
                container.check_chunk(payload, index, data)
            assert not isinstance(caught.value, IntegrityError)


def test_every_wrong_length_is_refused(cut: tuple[Payload, list[bytes]]) -> None:
    payload, chunks = cut
    for index, chunk in enumerate(chunks):
        for length in {*range(40)} - {len(chunk)}:
            with pytest.raises(ContainerError, match=f"^chunk {index}: {length} bytes, expected {len(chunk)}"):
                container.check_chunk(payload, index, (chunk * 40)[:length])


def test_every_flipped_bit_is_refused(cut: tuple[Payload, list[bytes]]) -> None:
    payload, chunks = cut
    for index, chunk in enumerate(chunks):
        for bit in range(8 * len(chunk)):
            flipped = bytearray(chunk)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(IntegrityError) as caught:
                container.check_chunk(payload, index, bytes(flipped))
            assert caught.value.fields["chunk"] == index
            assert caught.value.fields["actual"] == blake3(flipped).hexdigest()
            assert caught.value.fields["expected"] == blake3(chunk).hexdigest()


def test_a_chunk_in_the_place_of_another_is_refused(cut: tuple[Payload, list[bytes]]) -> None:
    payload, chunks = cut
    for index in range(len(chunks) - 1):
        for other, chunk in enumerate(chunks[:-1]):
            if other != index:
                with pytest.raises(IntegrityError):
                    container.check_chunk(payload, index, chunk)


# Plans: manifests that cannot describe a payload


def planned(manifest: Manifest, sections: tuple[Section, ...]) -> Manifest:
    """The manifest with these sections, in one chunk whose size agrees with them."""
    total = len(container.header(sections)) + sum(section.length for section in sections)
    return replace(manifest, sections=sections, payload=Payload(total, bytes(32), total, bytes(32)))


def swapped(sections: tuple[Section, ...], one: int, other: int) -> tuple[Section, ...]:
    found = list(sections)
    found[one], found[other] = found[other], found[one]
    return tuple(found)


def test_true_plans_are_accepted(
    kv_example: Callable[..., Any], text_example: Callable[..., Any], zstd_example: Callable[..., Any]
) -> None:
    for example in (
        *(kv_example(dtype=dtype) for dtype in ("F32", "F16", "BF16")),
        kv_example(rows=40),
        text_example(),
        text_example(text=b"", system=b""),
        zstd_example(),
        zstd_example(text=b""),
    ):
        container.check_plan(example.manifest)
        container.check_plan(planned(example.manifest, example.manifest.sections))


@pytest.mark.parametrize("difference", [-1, 1, -8, 8, 2**40])
def test_a_payload_with_a_hole_or_an_overlap_is_refused(kv_example: Callable[..., Any], difference: int) -> None:
    one = kv_example().manifest
    wrong = replace(one, payload=replace(one.payload, length=one.payload.length + difference))
    with pytest.raises(ManifestError, match=r"^payload\.length: ") as caught:
        container.check_plan(wrong)
    assert caught.value.fields["expected"] == one.payload.length


def test_a_chunk_list_of_another_length_is_refused(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    chunks = one.payload.chunks
    for wrong in (b"", chunks[:-1], chunks[:-32], chunks + b"\x00", chunks + bytes(32)):
        with pytest.raises(ManifestError, match=r"^payload\.chunks: "):
            container.check_plan(replace(one, payload=replace(one.payload, chunks=wrong)))


def test_every_length_that_does_not_follow_from_the_shape_is_refused(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    for index, section in enumerate(one.sections):
        for length in (0, section.length - 1, section.length + 1, 2 * section.length, 2**53):
            sections = (*one.sections[:index], replace(section, length=length), *one.sections[index + 1 :])
            with pytest.raises(ManifestError, match=rf"^sections\.{section.name}\.length: {length}, "):
                container.check_plan(planned(one, sections))


@pytest.mark.parametrize("shape", [(2**53,) * 8, (2**32, 2**32), (2**53,), (0, 2**53)])
def test_shapes_that_overflow_are_refused_without_memory(
    kv_example: Callable[..., Any], text_example: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    for one in (kv_example().manifest, text_example().manifest):
        sections = (replace(one.sections[0], shape=shape), *one.sections[1:])
        with pytest.raises(ManifestError):
            container.check_plan(replace(one, sections=sections))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda s: swapped(s, 1, 2), id="keys and values change places"),
        pytest.param(
            lambda s: (s[0], replace(s[1], name=s[2].name), replace(s[2], name=s[1].name), *s[3:]),
            id="keys are called values",
        ),
        pytest.param(lambda s: (s[0], *s[3:], *s[1:3]), id="layers change places"),
        pytest.param(lambda s: s[:3] + s[4:], id="no positions"),
        pytest.param(lambda s: s[1:], id="no ids"),
        pytest.param(lambda s: s[:1] + s[3:], id="no first layer"),
        pytest.param(lambda s: s[:3], id="no last layer"),
        pytest.param(lambda s: s[:-1], id="no last section"),
        pytest.param(lambda _: (), id="nothing"),
        pytest.param(lambda s: (*s, replace(s[0], name="more")), id="one section more"),
        pytest.param(lambda s: (*s, replace(s[4], name="layers.2.keys")), id="half a layer more"),
        pytest.param(lambda s: (s[0], replace(s[3], name="layers.0.positions"), *s[1:]), id="needless positions"),
        pytest.param(lambda s: swapped(s, 3, 4), id="positions after keys"),
        pytest.param(lambda s: (*s[:3], replace(s[3], dtype="U32"), *s[4:]), id="unsigned positions"),
        pytest.param(lambda s: (replace(s[0], dtype="I32"), *s[1:]), id="signed ids"),
        pytest.param(lambda s: (s[0], replace(s[1], dtype="I32"), *s[2:]), id="another dtype of the same size"),
        pytest.param(lambda s: (s[0], replace(s[1], shape=(40, 2, 8)), *s[2:]), id="transposed"),
        pytest.param(lambda s: (s[0], replace(s[1], shape=(1, 2, 40, 8)), *s[2:]), id="a batch axis"),
        pytest.param(lambda s: (replace(s[0], shape=(1, 40)), *s[1:]), id="ids with two axes"),
        pytest.param(lambda s: (s[0], replace(s[1], shape=(2, 39, 8), length=2 * 39 * 8 * 4), *s[2:]), id="a row less"),
        pytest.param(
            lambda s: (s[0], replace(s[1], encoding="zstd", decoded=Decoded(2**50, bytes(32))), *s[2:]),
            id="compressed keys",
        ),
        pytest.param(
            lambda s: (
                s[0],
                replace(s[1], dtype="U8", shape=(9,), length=9, encoding="zstd", decoded=Decoded(5120, bytes(32))),
                *s[2:],
            ),
            id="compressed keys as bytes",
        ),
    ],
)
def test_sections_that_are_not_those_of_the_layout_are_refused(
    kv_example: Callable[..., Any], wrong: Callable[[tuple[Section, ...]], tuple[Section, ...]]
) -> None:
    one = kv_example().manifest
    with pytest.raises(ManifestError, match=r"^sections"):
        container.check_plan(planned(one, wrong(one.sections)))


def test_the_first_difference_is_named_with_both_values(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    with pytest.raises(ManifestError) as caught:
        container.check_plan(planned(one, swapped(one.sections, 1, 2)))
    assert caught.value.fields["field"] == "sections[1]"
    assert "layers.0.values" in str(caught.value.fields["value"])
    assert "layers.0.keys" in str(caught.value.fields["expected"])


def test_duplicate_names_are_refused(kv_example: Callable[..., Any], text_example: Callable[..., Any]) -> None:
    for one in (kv_example().manifest, text_example().manifest):
        with pytest.raises(ManifestError, match="appears twice"):
            container.check_plan(planned(one, (*one.sections, one.sections[0])))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda _: (), id="nothing"),
        pytest.param(lambda s: s[1:], id="no system prompt"),
        pytest.param(lambda s: s[::-1], id="the other way round"),
        pytest.param(lambda s: (*s, replace(s[1], name="prefix.ids")), id="one section more"),
        pytest.param(lambda s: (s[0], replace(s[1], name="__metadata__")), id="the name of the metadata"),
        pytest.param(lambda s: (s[0], replace(s[1], dtype="U32", shape=(s[1].length // 4,))), id="not bytes"),
        pytest.param(lambda s: (s[0], replace(s[1], encoding="zstd")), id="compressed, decoding to nothing"),
        pytest.param(lambda s: (s[0], replace(s[1], decoded=Decoded(1, bytes(32)))), id="raw, decoding to something"),
        pytest.param(
            lambda s: (
                s[0],
                replace(s[1], shape=(2, s[1].length // 2), encoding="zstd", decoded=Decoded(1, bytes(32))),
            ),
            id="a frame with two axes",
        ),
    ],
)
def test_sections_that_are_no_text_are_refused(
    text_example: Callable[..., Any], wrong: Callable[[tuple[Section, ...]], tuple[Section, ...]]
) -> None:
    one = text_example(text=b"four" * 100).manifest
    with pytest.raises(ManifestError, match=r"^sections"):
        container.check_plan(planned(one, wrong(one.sections)))


def test_text_over_the_limit_is_refused_raw_and_compressed(
    text_example: Callable[..., Any], zstd_example: Callable[..., Any]
) -> None:
    limit = limits.MAX_DOCUMENT_BYTES
    raw, packed = text_example().manifest, zstd_example().manifest
    for size in (limit, limit + 1, 2**53):
        text = replace(raw.sections[1], shape=(size,), length=size)
        frame = replace(packed.sections[1], decoded=Decoded(size, bytes(32)))
        for one in (
            planned(raw, (raw.sections[0], text)),
            planned(packed, (packed.sections[0], frame)),
        ):
            if size == limit:
                container.check_plan(one)
                continue
            with pytest.raises(TooLargeError) as caught:
                container.check_plan(one)
            assert caught.value.fields == {"value": size, "limit": limit}
