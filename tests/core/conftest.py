"""Artifacts to test with, small and whole: manifest, contents and payload bytes that belong together.

==============  ======================================================================================================
kv_example      factory: two layers, the first contiguous, the second with explicit positions (an evicted cache)
packed_example  factory: packed rows by token or by channel, ragged heads, shared and renumbered positions
text_example    factory: system prompt and document as raw sections
message_example  factory: an artifact of a given form that has no cache
zstd_example    factory: the same with the document compressed
describe        rebuild an example around other contents, every size and digest recomputed
full_manifest   a KV manifest in which every field that may be nil is set somewhere; it describes no payload
profile_of      factory: the receiver that a KV manifest came from
example, store  ``kv_example()`` and an empty store, for the tests that need one of each
in_memory       a payload by its chunks, whatever a test wants them to be
==============  ======================================================================================================

Factories are shared by all tests of a run, so they suit property tests; what they return is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from kvferry.core import container
from kvferry.core.compat import LayerGeometry, Profile
from kvferry.core.container import Content
from kvferry.core.manifest import (
    Document,
    Encoding,
    LayerLayout,
    Manifest,
    Mapper,
    Method,
    Model,
    Parity,
    Payload,
    Positions,
    Prefix,
    Prompt,
    Quantization,
    Rope,
    Runtime,
    Section,
    Tokenizer,
    encode,
)
from kvferry.core.partial import Partial
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored

CHUNK = 1024
SYSTEM = b"Use only what the document says."
TEXT = "The access code of the north warehouse is 4417. Tür und Tor, 門.\n".encode() * 40
NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bfloat16: its bits stand as uint16
NO_ENCODING = Encoding(None, None, None, None, None, None, None)


@dataclass(frozen=True)
class Example:
    """An artifact: what its manifest says, and the bytes that it speaks of."""

    manifest: Manifest
    contents: tuple[Content, ...]

    @property
    def encoded(self) -> bytes:
        return encode(self.manifest)

    @property
    def id(self) -> bytes:
        return blake3(self.encoded).digest()

    @property
    def payload(self) -> bytes:
        return b"".join(pieces(self.contents))

    def chunks(self) -> list[bytes]:
        size = self.manifest.payload.chunk_size
        return [chunk for piece in pieces(self.contents) for chunk in cut(piece, size)]

    def offset(self, index: int) -> int:
        """Where chunk ``index`` begins in the payload; that of the chunk behind the last is the payload's length."""
        return sum(len(chunk) for chunk in self.chunks()[:index])

    def put_into(self, partial: Partial) -> None:
        for index, chunk in enumerate(self.chunks()):
            partial.put(index, chunk)

    def received_by(self, store: ArtifactStore) -> Stored:
        self.put_into(store.begin(self.encoded))
        return store.commit(self.id, None)

    def check(self, stored: Stored) -> None:
        """Assert that ``stored`` is this artifact, every byte of it, and that nothing else lies beside it."""
        assert stored.artifact_id == self.id
        assert stored.manifest == self.manifest
        assert stored.encoded == self.encoded
        for content in self.contents:
            assert stored.sections.read(content.name) == content.data
        assert [stored.read_chunk(index) for index in range(len(self.chunks()))] == self.chunks()
        assert stored.payload_path.read_bytes() == self.payload
        names = sorted(path.name for path in stored.payload_path.parent.iterdir())
        assert names == ["manifest.msgpack", "payload.safetensors", "record.json"]


@dataclass(frozen=True)
class InMemory:
    """A payload that lies in no file."""

    chunks: Sequence[bytes]

    def read_chunk(self, index: int) -> bytes:
        return self.chunks[index]


def named_digest(name: str) -> bytes:
    return blake3(name.encode()).digest()


def pieces(contents: tuple[Content, ...]) -> list[bytes]:
    """What no chunk crosses the edges of: the header, then each section."""
    return [container.header(contents), *(bytes(content.data) for content in contents)]


def cut(data: bytes, chunk_size: int) -> list[bytes]:
    return [data[at : at + chunk_size] for at in range(0, len(data), chunk_size)]


def described(manifest: Manifest, contents: tuple[Content, ...], chunk_size: int = CHUNK) -> Example:
    """Return the example with these contents: sections, sizes and digests follow from them, by docs/wire.md §3."""
    parts = pieces(contents)
    digests = [b"".join(blake3(chunk).digest() for chunk in cut(part, chunk_size)) for part in parts]
    sections = tuple(
        Section(one.name, one.dtype, one.shape, one.encoding, len(one.data), blake3(joined).digest(), one.decoded)
        for one, joined in zip(contents, digests[1:], strict=True)
    )
    chunks = b"".join(digests)
    payload = Payload(sum(map(len, parts)), blake3(chunks).digest(), chunk_size, chunks)
    return Example(msgspec.structs.replace(manifest, sections=sections, payload=payload), contents)


def tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> bytes:
    if dtype == "BF16":
        return rng.integers(0, 2**16, shape, dtype=np.uint16).astype("<u2").tobytes()
    return rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype]).tobytes()


def layer_contents(rng: np.random.Generator, index: int, layer: LayerLayout) -> list[Content]:
    shape = (layer.kv_heads, layer.rows)
    found = []
    if layer.positions == "explicit":
        rows = [np.sort(rng.choice(layer.offset, layer.rows, replace=False)) for _ in range(layer.kv_heads)]
        positions = np.stack(rows).astype("<i4").tobytes()
        found.append(container.raw_section(container.positions_name(index), "I32", shape, positions))
    for name, dims in (
        (container.keys_name(index), layer.key_dim),
        (container.values_name(index), layer.value_dim),
    ):
        data = tensor(rng, layer.dtype, (*shape, dims))
        found.append(container.raw_section(name, layer.dtype, (*shape, dims), data))
    return found


def kv_contents(layout: tuple[LayerLayout, ...], tokens: int) -> tuple[Content, ...]:
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 2**32, tokens, dtype=np.uint32).astype("<u4").tobytes()
    found = [container.raw_section(container.IDS, "U32", (tokens,), ids)]
    for index, layer in enumerate(layout):
        found += layer_contents(rng, index, layer)
    return tuple(found)


# Layouts and the sections that docs/wire.md §3 asks for, written down. Keys have 64 dimensions, values 32.
PACKED_LAYOUTS: dict[str, tuple[int, Encoding, tuple[tuple[Any, ...], ...], tuple[tuple[Any, ...], ...]]] = {
    # Layers: rows, head_rows, offset, positions, packed_keys, packed_values. Sections: name, dtype ("" is the rows'),
    # shape.
    "token": (
        40,
        Encoding(3, 4, 32, 32, "token", None, None),
        (
            (40, None, 40, "contiguous", 40, 40),
            (24, None, 40, "shared", 16, 0),
            (24, (24, 9), 40, "explicit", 24, 24),
        ),
        (
            ("layers.0.keys.codes", "U32", (2, 40, 6)),
            ("layers.0.keys.scales", "", (2, 40, 2)),
            ("layers.0.keys.biases", "", (2, 40, 2)),
            ("layers.0.values.codes", "U32", (2, 40, 4)),
            ("layers.0.values.scales", "", (2, 40, 1)),
            ("layers.0.values.biases", "", (2, 40, 1)),
            ("layers.1.positions", "I32", (24,)),
            ("layers.1.keys.codes", "U32", (2, 16, 6)),
            ("layers.1.keys.scales", "", (2, 16, 2)),
            ("layers.1.keys.biases", "", (2, 16, 2)),
            ("layers.1.keys.tail", "", (2, 8, 64)),
            ("layers.1.values", "", (2, 24, 32)),
            ("layers.2.positions", "I32", (33,)),
            ("layers.2.keys.codes", "U32", (33, 6)),
            ("layers.2.keys.scales", "", (33, 2)),
            ("layers.2.keys.biases", "", (33, 2)),
            ("layers.2.values.codes", "U32", (33, 4)),
            ("layers.2.values.scales", "", (33, 1)),
            ("layers.2.values.biases", "", (33, 1)),
        ),
    ),
    "channel": (
        100,
        Encoding(2, 2, 32, 32, "channel", None, None),
        ((100, None, 100, "contiguous", 96, 68), (20, None, 100, "explicit", 0, 0)),
        (
            ("layers.0.keys.codes", "U32", (2, 64, 6)),
            ("layers.0.keys.scales", "", (2, 64, 3)),
            ("layers.0.keys.biases", "", (2, 64, 3)),
            ("layers.0.keys.tail", "", (2, 4, 64)),
            ("layers.0.values.codes", "U32", (2, 68, 2)),
            ("layers.0.values.scales", "", (2, 68, 1)),
            ("layers.0.values.biases", "", (2, 68, 1)),
            ("layers.0.values.tail", "", (2, 32, 32)),
            ("layers.1.positions", "I32", (2, 20)),
            ("layers.1.keys", "", (2, 20, 64)),
            ("layers.1.values", "", (2, 20, 32)),
        ),
    ),
    "renumbered": (
        40,
        NO_ENCODING,
        ((24, None, 24, "renumbered", 0, 0), (24, None, 24, "renumbered", 0, 0)),
        (
            ("layers.0.keys", "", (2, 24, 64)),
            ("layers.0.values", "", (2, 24, 32)),
            ("layers.1.keys", "", (2, 24, 64)),
            ("layers.1.values", "", (2, 24, 32)),
        ),
    ),
}


def packed_contents(which: str, dtype: str) -> tuple[Content, ...]:
    tokens, _, layers, sections = PACKED_LAYOUTS[which]
    rng = np.random.default_rng(9)
    ids = rng.integers(0, 2**32, tokens, dtype=np.uint32).astype("<u4").tobytes()
    found = [container.raw_section(container.IDS, "U32", (tokens,), ids)]
    for name, given, shape in sections:
        kind = given or dtype
        if kind == "I32":
            counts = layers[int(name.split(".")[1])][1] or ((shape[-1],) * (shape[0] if len(shape) > 1 else 1))
            rows = [np.sort(rng.choice(tokens, count, replace=False)) for count in counts]
            data = np.concatenate(rows).astype("<i4").tobytes()
        elif kind == "U32":
            data = rng.integers(0, 2**32, shape, dtype=np.uint32).astype("<u4").tobytes()
        else:
            data = tensor(rng, kind, shape)
        found.append(container.raw_section(name, kind, shape, data))
    return tuple(found)


def packed_manifest(which: str, dtype: Any, ids: bytes) -> Manifest:
    tokens, encoding, layers, _ = PACKED_LAYOUTS[which]
    layout = tuple(LayerLayout("KVCache", 2, 64, 32, dtype, *layer) for layer in layers)
    plain = kv_manifest(layout, tokens, ids)
    assert plain.positions is not None
    rope = (plain.positions.rope * 2)[: len(layout)]
    positions = msgspec.structs.replace(plain.positions, rope=rope)
    return msgspec.structs.replace(plain, positions=positions, encoding=encoding)


def kv_manifest(layout: tuple[LayerLayout, ...], tokens: int, ids: bytes) -> Manifest:
    return Manifest(
        version=1,
        form="kv",
        model=Model(
            id="ferry/tiny",
            revision="main",
            type="llama",
            weights=named_digest("weights"),
            config=named_digest("config"),
            quantization=Quantization(4, 64, "affine"),
            adapter=None,
        ),
        tokenizer=Tokenizer(named_digest("vocab"), named_digest("template")),
        document=Document(blake3(TEXT).digest(), len(TEXT), len(TEXT.decode())),
        prompt=Prompt(1, blake3(SYSTEM).digest()),
        prefix=Prefix(tokens, blake3(ids).digest()),
        positions=Positions(
            (
                Rope("rope", 8, False, 10000.0, 1.0, None, 1.0),  # noqa: FBT003
                Rope("rope", 8, False, None, 1.0, named_digest("freqs"), 1.0),  # noqa: FBT003
            ),
            2.5e-7,
        ),
        layout=layout,
        method=Method("B4", "faithful", False, "inject", {"budget": 24, "window": 8}, None, ()),  # noqa: FBT003
        mapper=None,
        encoding=NO_ENCODING,
        sections=(),
        payload=Payload(1, named_digest("payload"), CHUNK, b""),
        parity=Parity((1, 2), (5, 4, 3), (-0.5, -1.5, -2.25), 0.0),
        runtime=Runtime("0.1.0", "0.32.4", "0.32.2", "cpu"),
    )


def text_manifest() -> Manifest:
    return Manifest(
        version=1,
        form="text",
        model=None,
        tokenizer=None,
        document=Document(blake3(TEXT).digest(), len(TEXT), len(TEXT.decode())),
        prompt=Prompt(1, blake3(SYSTEM).digest()),
        prefix=None,
        positions=None,
        layout=None,
        method=Method("A0", "custom", False, "prefill_once", {}, None, ()),  # noqa: FBT003
        mapper=None,
        encoding=NO_ENCODING,
        sections=(),
        payload=Payload(1, named_digest("payload"), CHUNK, b""),
        parity=None,
        runtime=Runtime("0.1.0", "0.32.4", "0.32.2", "cpu"),
    )


@pytest.fixture(scope="session")
def describe() -> Callable[..., Example]:
    """Return ``described``."""
    return described


@pytest.fixture(scope="session")
def kv_example() -> Callable[..., Example]:
    """Return a factory: ``kv_example(dtype="F32", tokens=40, rows=24, chunk_size=1024)``; about 8 KB in 12 chunks.

    Chunk 0 is the header, 1 the ids, 2-4 and 5-7 the first layer's keys and values, 8-11 the second's positions, keys
    (two chunks) and values.
    """

    def build(dtype: Any = "F32", tokens: int = 40, rows: int = 24, chunk_size: int = CHUNK) -> Example:
        layout = (
            LayerLayout("KVCache", 2, 8, 8, dtype, tokens, None, tokens, "contiguous", 0, 0),
            LayerLayout("KVCache", 2, 8, 4, dtype, rows, None, tokens, "explicit", 0, 0),
        )
        contents = kv_contents(layout, tokens)
        return described(kv_manifest(layout, tokens, bytes(contents[0].data)), contents, chunk_size)

    return build


@pytest.fixture(scope="session")
def packed_example() -> Callable[..., Example]:
    """Return a factory: ``packed_example(which="token", dtype="F32", chunk_size=1024)``.

    "token": a layer packed whole, one of selected rows with dense ones behind the packed keys, and a ragged one;
    "channel": keys by channel and both with a dense tail, and a layer too short to pack; "renumbered": dense rows.
    """

    def build(which: str = "token", dtype: Any = "F32", chunk_size: int = CHUNK) -> Example:
        contents = packed_contents(which, dtype)
        return described(packed_manifest(which, dtype, bytes(contents[0].data)), contents, chunk_size)

    return build


@pytest.fixture
def example(kv_example: Callable[..., Example]) -> Example:
    """Return ``kv_example()``."""
    return kv_example()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArtifactStore]:
    """Yield an empty, open store; closed afterwards."""
    opened = ArtifactStore(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def in_memory() -> type[InMemory]:
    """Return ``InMemory``."""
    return InMemory


@pytest.fixture(scope="session")
def text_example() -> Callable[..., Example]:
    """Return a factory: ``text_example(text=…, system=…, chunk_size=1024)``; about 3 KB."""

    def build(text: bytes = TEXT, system: bytes = SYSTEM, chunk_size: int = CHUNK) -> Example:
        contents = (
            container.raw_section(container.SYSTEM, "U8", (len(system),), system),
            container.raw_section(container.TEXT, "U8", (len(text),), text),
        )
        document = Document(blake3(text).digest(), len(text), len(text.decode()))
        return described(msgspec.structs.replace(text_manifest(), document=document), contents, chunk_size)

    return build


@pytest.fixture(scope="session")
def zstd_example() -> Callable[..., Example]:
    """Return a factory: ``zstd_example(text=…, level=3, chunk_size=1024)``."""

    def build(text: bytes = TEXT, level: int = 3, chunk_size: int = CHUNK) -> Example:
        contents = (
            container.raw_section(container.SYSTEM, "U8", (len(SYSTEM),), SYSTEM),
            container.zstd_section(container.TEXT, text, level),
        )
        manifest = msgspec.structs.replace(
            text_manifest(),
            document=Document(blake3(text).digest(), len(text), len(text.decode())),
            encoding=msgspec.structs.replace(NO_ENCODING, zstd=level),
        )
        return described(manifest, contents, chunk_size)

    return build


@pytest.fixture(scope="session")
def message_example(text_example: Callable[..., Example]) -> Callable[..., Example]:
    """Return a factory: ``message_example(form, data=…, kind=…)``, an artifact without a cache, of any form."""
    kinds = {"text": container.TEXT, "evidence": container.EVIDENCE, "references": container.REFERENCES}

    def build(form: str, data: bytes = b"{}", kind: str = "") -> Example:
        contents = (
            container.raw_section(container.SYSTEM, "U8", (len(SYSTEM),), SYSTEM),
            container.raw_section(kind or kinds[form], "U8", (len(data),), data),
        )
        plain = text_example().manifest
        method = msgspec.structs.replace(plain.method, consume="look_up" if form == "references" else "prefill")
        return described(msgspec.structs.replace(plain, form=form, method=method), contents, CHUNK)

    return build


@pytest.fixture(scope="session")
def full_manifest(kv_example: Callable[..., Example], zstd_example: Callable[..., Example]) -> Manifest:
    """Return a manifest that sets every field that may be nil; one compressed section stands among the tensors."""
    manifest = kv_example().manifest
    assert manifest.model is not None
    assert manifest.layout is not None
    ragged = msgspec.structs.replace(manifest.layout[1], head_rows=(24, 9), packed_keys=24, packed_values=24)
    return msgspec.structs.replace(
        manifest,
        model=msgspec.structs.replace(manifest.model, adapter=named_digest("adapter")),
        layout=(manifest.layout[0], ragged),
        method=msgspec.structs.replace(
            manifest.method,
            params={"budget": 24, "floor": 0.5, "name": "snap", "on": True, "share": None},
            seed=11,
            calibration=(named_digest("calibration"), named_digest("more calibration")),
        ),
        mapper=Mapper(named_digest("map"), named_digest("source"), named_digest("target"), "L2"),
        encoding=Encoding(8, 4, 64, 32, "token", "range", 3),
        sections=(*manifest.sections, zstd_example().manifest.sections[1]),
    )


@pytest.fixture(scope="session")
def profile_of() -> Callable[[Manifest], Profile]:
    """Return a factory of the receiver that runs exactly what a KV manifest asks for."""

    def build(manifest: Manifest) -> Profile:
        assert manifest.model is not None
        assert manifest.tokenizer is not None
        assert manifest.positions is not None
        return Profile(
            model=manifest.model,
            tokenizer=manifest.tokenizer,
            prompt_version=manifest.prompt.version,
            rope=manifest.positions.rope,
            layers=tuple(
                LayerGeometry(layer.cache_class, layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype)
                for layer in manifest.layout or ()
            ),
            probe_error=manifest.positions.probe_error,
            context_length=4096,
            max_payload_bytes=2**30,
        )

    return build
