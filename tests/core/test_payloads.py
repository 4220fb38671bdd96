"""Reading sections back: equal bytes, or an error that names them. Never anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import container
from kvferry.core.container import Content, raw_section, zstd_section
from kvferry.core.errors import ContainerError, IntegrityError, StoreError
from kvferry.core.manifest import LayerLayout, Manifest
from kvferry.core.payloads import FilePayload, Payload, Sections
from kvferry.core.plan import make_plan

replace = msgspec.structs.replace
steady = settings(derandomize=True, database=None, deadline=None, max_examples=40)
InMemory = Callable[..., Payload]
TEXT = b"What is written on the crates of paper? " * 2


def write(manifest: Manifest, contents: tuple[Content, ...], chunk_size: int) -> tuple[Manifest, bytes]:
    """Write the payload, and put what is said of it into the manifest."""
    joined: list[bytes] = []
    sections, payload = container.write_payload(contents, lambda piece: joined.append(bytes(piece)), chunk_size)
    return replace(manifest, sections=sections, payload=payload), b"".join(joined)


# Round trips


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where property tests write, one file after the other."""
    return tmp_path_factory.mktemp("payloads")


def check(manifest: Manifest, data: bytes, expected: dict[str, bytes], folder: Path) -> None:
    plan = make_plan(manifest)
    path = folder / "payload.safetensors"
    path.write_bytes(data)
    payload = FilePayload(path, plan)
    sections = Sections(manifest, plan, payload)
    assert {name: bytes(sections.read(name)) for name in expected} == expected
    assert b"".join(payload.read_chunk(index) for index in range(plan.count)) == data


@steady
@given(
    system=st.binary(max_size=300),
    text=st.binary(max_size=300),
    level=st.sampled_from([None, 1, 19]),
    chunk_size=st.one_of(st.integers(1, 40), st.integers(41, 400)),
)
def test_texts_come_back(
    text_example: Callable[..., Any], folder: Path, system: bytes, text: bytes, level: int | None, chunk_size: int
) -> None:
    contents = (
        raw_section("prompt.system", "U8", (len(system),), system),
        raw_section("document.text", "U8", (len(text),), text)
        if level is None
        else zstd_section("document.text", text, level),
    )
    manifest, data = write(text_example().manifest, contents, chunk_size)
    check(manifest, data, {"prompt.system": system, "document.text": text}, folder)


layers = st.builds(
    LayerLayout,
    cache_class=st.just("KVCache"),
    kv_heads=st.integers(1, 3),
    key_dim=st.integers(1, 5),
    value_dim=st.integers(1, 5),
    dtype=st.sampled_from(["F16", "BF16", "F32"]),
    rows=st.integers(1, 9),
    head_rows=st.none(),
    offset=st.just(9),
    positions=st.sampled_from(["contiguous", "explicit"]),
    packed_keys=st.just(0),
    packed_values=st.just(0),
)


@steady
@given(layout=st.lists(layers, max_size=4), noise=st.randoms(use_true_random=False), chunk_size=st.integers(1, 300))
def test_tensors_come_back(
    kv_example: Callable[..., Any], folder: Path, layout: list[LayerLayout], noise: Any, chunk_size: int
) -> None:
    shapes: list[tuple[str, Any, tuple[int, ...]]] = [("prefix.ids", "U32", (9,))]
    for index, layer in enumerate(layout):
        shape = (layer.kv_heads, layer.rows)
        if layer.positions == "explicit":
            shapes.append((f"layers.{index}.positions", "I32", shape))
        shapes.append((f"layers.{index}.keys", layer.dtype, (*shape, layer.key_dim)))
        shapes.append((f"layers.{index}.values", layer.dtype, (*shape, layer.value_dim)))
    width = {"U32": 4, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}
    contents = []
    for name, dtype, shape in shapes:
        size = width[dtype]
        for length in shape:
            size *= length
        contents.append(raw_section(name, dtype, shape, noise.randbytes(size)))
    example = kv_example().manifest
    given = replace(example, layout=tuple(layout), prefix=replace(example.prefix, tokens=9))
    manifest, data = write(given, tuple(contents), chunk_size)
    check(manifest, data, {one.name: bytes(one.data) for one in contents}, folder)


def test_names_that_are_there_and_names_that_are_not(text_example: Callable[..., Any], in_memory: InMemory) -> None:
    example = text_example()
    sections = Sections(example.manifest, make_plan(example.manifest), in_memory(example.chunks()))
    assert "prompt.system" in sections
    assert "document.text" in sections
    for name in ("prefix.ids", "", "document", "layers.0.keys"):
        assert name not in sections
        with pytest.raises(ContainerError, match=f"^section {name}: ") as caught:
            sections.read(name)
        assert caught.value.fields["field"] == name


class Watched:
    """Notes which chunks are asked for."""

    def __init__(self, payload: Payload) -> None:
        self.asked: list[int] = []
        self._payload = payload

    def read_chunk(self, index: int) -> bytes:
        self.asked.append(index)
        return self._payload.read_chunk(index)


def test_a_section_takes_its_own_chunks_and_no_others(kv_example: Callable[..., Any], in_memory: InMemory) -> None:
    example = kv_example()
    payload = Watched(in_memory(example.chunks()))
    sections = Sections(example.manifest, make_plan(example.manifest), payload)
    for name, chunks in (("layers.0.values", [5, 6, 7]), ("prefix.ids", [1]), ("layers.1.keys", [9, 10])):
        payload.asked.clear()
        sections.read(name)
        assert payload.asked == chunks


# Damage


@pytest.fixture(params=["raw", "frame", "tensors"])
def small(
    request: pytest.FixtureRequest,
    text_example: Callable[..., Any],
    zstd_example: Callable[..., Any],
    kv_example: Callable[..., Any],
) -> Any:
    return {
        "raw": lambda: text_example(text=TEXT[:45], system=b"brief", chunk_size=16),
        "frame": lambda: zstd_example(text=TEXT, chunk_size=20),
        "tensors": lambda: kv_example(tokens=2, rows=1, chunk_size=64),
    }[request.param]()


def contents_of(example: Any) -> dict[str, bytes]:
    """What every section reads as, frames decompressed."""
    return {
        one.name: bytes(one.data) if one.decoded is None else TEXT[: one.decoded.length] for one in example.contents
    }


def test_a_flipped_bit_anywhere_is_never_returned(small: Any, in_memory: InMemory) -> None:
    expected = contents_of(small)
    plan = make_plan(small.manifest)
    chunks = small.chunks()
    # Where every byte belongs, counted from the bytes themselves.
    owners = [index for index, chunk in enumerate(chunks) for _ in chunk]
    edge = len(small.payload) - sum(one.length for one in small.contents)
    names = [""] * edge + [one.name for one in small.contents for _ in range(one.length)]
    for at in range(len(small.payload)):
        for bit in range(8):
            damaged = list(chunks)
            flipped = bytearray(chunks[owners[at]])
            flipped[at - small.offset(owners[at])] ^= 1 << bit
            damaged[owners[at]] = bytes(flipped)
            sections = Sections(small.manifest, plan, in_memory(damaged))
            if names[at]:
                with pytest.raises(IntegrityError, match=f"^section {names[at]}: chunk {owners[at]}: ") as caught:
                    sections.read(names[at])
                assert caught.value.fields["field"] == names[at]
                assert caught.value.fields["chunk"] == owners[at]
                assert caught.value.fields["actual"] == blake3(bytes(flipped)).hexdigest()
            # What is whole can still be read.
            for name, data in expected.items():
                if bit == at % 64 and name != names[at]:
                    assert sections.read(name) == data


def test_chunks_of_another_length_are_never_returned(small: Any, in_memory: InMemory) -> None:
    chunks = small.chunks()
    plan = make_plan(small.manifest)
    for index in range(*plan.section_chunks[small.contents[-1].name]):
        for wrong in (b"", chunks[index][:-1], chunks[index] + b"\x00", chunks[index] * 2):
            damaged = (*chunks[:index], wrong, *chunks[index + 1 :])
            with pytest.raises(ContainerError, match=rf"chunk {index}: {len(wrong)} bytes, expected "):
                Sections(small.manifest, plan, in_memory(damaged)).read(small.contents[-1].name)


def test_chunks_that_changed_places_are_never_returned(kv_example: Callable[..., Any], in_memory: InMemory) -> None:
    example = kv_example()
    chunks = example.chunks()
    chunks[2], chunks[6] = chunks[6], chunks[2]
    plan = make_plan(example.manifest)
    sections = Sections(example.manifest, plan, in_memory(chunks))
    for name, chunk in (("layers.0.keys", 2), ("layers.0.values", 6)):
        with pytest.raises(IntegrityError, match=f"^section {name}: chunk {chunk}: "):
            sections.read(name)


def test_a_payload_that_is_too_short_is_never_returned(small: Any, tmp_path: Path) -> None:
    plan = make_plan(small.manifest)
    path = tmp_path / "payload.safetensors"
    for length in sorted({max(end + more, 0) for _, end in plan.ranges for more in (-17, -1, 0, 1)})[:-2]:
        path.write_bytes(small.payload[:length])
        sections = Sections(small.manifest, plan, FilePayload(path, plan))
        for name, data in contents_of(small).items():
            _, last = plan.section_chunks[name]
            whole = plan.ranges[last - 1][1] <= length
            with contextlib.nullcontext() if whole else pytest.raises(StoreError, match=r"^chunk \d+: "):
                assert sections.read(name) == data


@pytest.mark.parametrize("at", [0, 1, -1])
def test_content_that_a_frame_should_not_decode_to_is_never_returned(
    zstd_example: Callable[..., Any], in_memory: InMemory, at: int
) -> None:
    """Every chunk is the declared one, and so is the frame: its sender lied about what is in it."""
    example = zstd_example(text=TEXT)
    section = example.manifest.sections[1]
    wrong = bytearray(section.decoded.digest)
    wrong[at] ^= 1
    lied = replace(section, decoded=replace(section.decoded, digest=bytes(wrong)))
    manifest = replace(example.manifest, sections=(example.manifest.sections[0], lied))
    with pytest.raises(IntegrityError, match=r"^section document\.text: content digest") as caught:
        Sections(manifest, make_plan(manifest), in_memory(example.chunks())).read("document.text")
    assert caught.value.fields["field"] == "document.text"
    assert caught.value.fields["actual"] == blake3(TEXT).hexdigest()
    assert caught.value.fields["expected"] == bytes(wrong).hex()


# Payloads


def test_a_section_of_one_chunk_is_not_copied(text_example: Callable[..., Any], in_memory: InMemory) -> None:
    example = text_example()
    chunks = example.chunks()
    sections = Sections(example.manifest, make_plan(example.manifest), in_memory(chunks))
    assert sections.read("prompt.system") is chunks[1]


@pytest.mark.parametrize("index", [-1, -12, 12, 13, 10**9])
def test_a_chunk_that_is_not_there_is_refused(kv_example: Callable[..., Any], tmp_path: Path, index: int) -> None:
    example = kv_example()
    path = tmp_path / "payload.safetensors"
    path.write_bytes(example.payload)
    with pytest.raises(ContainerError, match=f"^chunk {index}: the payload has 12 chunks") as caught:
        FilePayload(path, make_plan(example.manifest)).read_chunk(index)
    assert caught.value.fields == {"field": "index", "value": index, "limit": 12}


def test_a_file_is_read_as_it_is(kv_example: Callable[..., Any], tmp_path: Path) -> None:
    """A payload does not judge what it returns: that is for whoever asked for it."""
    example = kv_example()
    path = tmp_path / "payload.safetensors"
    path.write_bytes(b"\x5a" * len(example.payload))
    payload = FilePayload(path, make_plan(example.manifest))
    assert payload.read_chunk(3) == b"\x5a" * 1024
    path.unlink()
    with pytest.raises(StoreError, match=r"^chunk 3: No such file") as caught:
        payload.read_chunk(3)
    assert caught.value.fields["chunk"] == 3
