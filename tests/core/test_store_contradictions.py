"""Manifests that contradict themselves: nothing of theirs is taken in, not even a directory."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from kvferry.core.errors import ManifestError, NotFoundError
from kvferry.core.manifest import encode
from kvferry.core.store import ArtifactStore

replace = msgspec.structs.replace


def resealed(example: Any, data: bytes, *, sections: bool = False, **changes: Any) -> bytes:
    """Return the manifest of an artifact whose payload was replaced, whose chunk digests and payload digest follow it.

    Those of the sections follow only when ``sections`` says so.
    """
    edges = [0, *itertools.accumulate(map(len, example.chunks()))]
    listed = [blake3(data[start:end]).digest() for start, end in itertools.pairwise(edges)]
    chunks = b"".join(listed)
    payload = replace(example.manifest.payload, digest=blake3(chunks).digest(), chunks=chunks)
    manifest = replace(example.manifest, payload=replace(payload, **changes))
    if sections:
        own = [(1, 2), (2, 5), (5, 8), (8, 9), (9, 11), (11, 12)]
        digests = [blake3(b"".join(listed[start:end])).digest() for start, end in own]
        following = zip(manifest.sections, digests, strict=True)
        manifest = replace(manifest, sections=tuple(replace(one, digest=digest) for one, digest in following))
    return encode(manifest)


def begins_nothing(store: ArtifactStore, encoded: bytes, field: str) -> None:
    with pytest.raises(ManifestError, match=rf"^{field}: ") as caught:
        store.begin(encoded)
    assert caught.value.fields["field"] == field
    assert store.ids() == []
    with pytest.raises(NotFoundError):
        store.partial(blake3(encoded).digest())
    assert not any(path.is_file() for path in store.root.rglob("*") if path.name != "lock")
    assert not list((store.root / "partial").iterdir())


def test_the_resealed_artifact_is_the_true_one_as_long_as_nothing_was_replaced(
    store: ArtifactStore, example: Any
) -> None:
    assert resealed(example, example.payload) == resealed(example, example.payload, sections=True) == example.encoded
    # A whole artifact of other bytes is another artifact, and nothing is wrong with it.
    data = bytearray(example.payload)
    data[-1] ^= 1
    encoded = resealed(example, bytes(data), sections=True)
    partial = store.begin(encoded)
    for index in range(11):
        partial.put(index, example.chunks()[index])
    partial.put(11, bytes(data[example.offset(11) :]))
    assert bytes(store.commit(blake3(encoded).digest(), None).sections.read("layers.1.values"))[-1] == data[-1]


@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[2,40,8]', b'"shape":[40,2,8]'),
        (b'"dtype":"F32"', b'"dtype":"I32"'),
        (b"layers.0.keys", b"layers.1.keys"),
        (b'"prefix.ids"', b'"prefix.idz"'),
        (b'"data_offsets":[0,160]', b'"data_offsets":[1,160]'),
        (b"}}", b"} "),
    ],
)
def test_a_tampered_header_begins_nothing(
    store: ArtifactStore,
    example: Any,
    old: bytes,
    new: bytes,
    sections: bool,  # noqa: FBT001
) -> None:
    assert old in example.payload
    tampered = example.payload.replace(old, new, 1)
    begins_nothing(store, resealed(example, tampered, sections=sections), "payload.chunks")


def test_a_tampered_header_length_begins_nothing(store: ArtifactStore, example: Any) -> None:
    for head in ((2**63 - 1).to_bytes(8, "little"), bytes(8)):
        begins_nothing(store, resealed(example, head + example.payload[8:], sections=True), "payload.chunks")


def test_swapped_tensors_begin_nothing(store: ArtifactStore, example: Any) -> None:
    """Keys and values have equal sizes in the first layer: only the sections' digests tell them apart."""
    start, middle, end = (example.offset(chunk) for chunk in (2, 5, 8))
    data = example.payload
    wrong = data[:start] + data[middle:end] + data[start:middle] + data[end:]
    assert len(wrong) == len(data)
    begins_nothing(store, resealed(example, wrong), "sections.layers.0.keys.digest")


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("prefix.ids", (1, 2)), ("layers.0.keys", (2, 5)), ("layers.1.positions", (8, 9)), ("layers.1.values", (11, 12))],
)
def test_a_section_other_than_its_digest_begins_nothing(
    store: ArtifactStore, example: Any, name: str, chunks: tuple[int, int]
) -> None:
    for at in (example.offset(chunks[0]), example.offset(chunks[1]) - 1):
        wrong = bytearray(example.payload)
        wrong[at] ^= 1
        begins_nothing(store, resealed(example, bytes(wrong)), f"sections.{name}.digest")


def test_a_payload_digest_of_something_else_begins_nothing(store: ArtifactStore, example: Any) -> None:
    for digest in (b"\x07" * 32, blake3(example.payload).digest()):
        begins_nothing(store, resealed(example, example.payload, digest=digest), "payload.digest")
