"""Bytes that are not the declared ones, on their way in and on disk: named, never published, never returned."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from kvferry.core import container
from kvferry.core.errors import ContainerError, IntegrityError, NotFoundError, StoreError, TransferError
from kvferry.core.manifest import encode
from kvferry.core.store import ArtifactStore

replace = msgspec.structs.replace


def payload_path(store: ArtifactStore, example: Any) -> Path:
    """Where the assembly keeps its payload."""
    return store.root.joinpath("partial", example.id.hex(), "payload.safetensors")


# Wrong chunks


def test_a_wrong_chunk_is_named_and_stays_missing(store: ArtifactStore, example: Any, kv_example: Any) -> None:
    partial = store.begin(example.encoded)
    chunks = example.chunks()
    for index, chunk in enumerate(chunks):
        foreign = kv_example(dtype="F16").chunks()[min(index, 4)]
        flipped = bytes([chunk[0] ^ 1]) + chunk[1:]
        for wrong in (chunk[:-1], chunk + b"\x00", b"", flipped, chunks[index - 1], foreign):
            with pytest.raises(ContainerError, match=f"^chunk {index}: "):
                partial.put(index, wrong)
            assert partial.missing() == [(0, 9)]
    for index in (9, 10, -1):
        with pytest.raises(ContainerError, match="the payload has 9 chunks"):
            partial.put(index, chunks[0])
    example.put_into(partial)
    example.check(store.commit(example.id, None))


def test_a_wrong_chunk_does_not_undo_a_right_one(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    with pytest.raises(IntegrityError):
        partial.put(3, bytes(1024))
    example.check(store.commit(example.id, None))


@pytest.mark.parametrize("left_out", [[0], [8], [3, 4], [*range(9)]])
def test_commit_before_everything_arrived(store: ArtifactStore, example: Any, left_out: list[int]) -> None:
    partial = store.begin(example.encoded)
    chunks = example.chunks()
    for index in {*range(9)} - {*left_out}:
        partial.put(index, chunks[index])
    with pytest.raises(TransferError, match=f"^chunk {left_out[0]}: missing") as caught:
        store.commit(example.id, None)
    assert caught.value.fields == {"chunk": left_out[0], "missing": len(left_out)}
    assert store.ids() == []
    with pytest.raises(NotFoundError):
        store.get(example.id)
    for index in left_out:
        partial.put(index, chunks[index])
    example.check(store.commit(example.id, None))


@pytest.mark.parametrize("chunk", [0, 4, 8])
def test_damage_on_disk_after_put_is_found_by_commit(store: ArtifactStore, example: Any, chunk: int) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    path = payload_path(store, example)
    with path.open("r+b") as file:
        file.seek(chunk * 1024 + 3)
        file.write(bytes([example.payload[chunk * 1024 + 3] ^ 0x10]))
    with pytest.raises(IntegrityError, match=f"^chunk {chunk}: ") as caught:
        store.commit(example.id, None)
    assert caught.value.fields["chunk"] == chunk
    assert store.ids() == []
    assert store.partial(example.id).missing() == [(chunk, chunk + 1)]
    with pytest.raises(TransferError):
        store.commit(example.id, None)
    partial.put(chunk, example.chunks()[chunk])
    example.check(store.commit(example.id, None))


def test_all_damaged_chunks_are_found_at_once(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    path = payload_path(store, example)
    with path.open("r+b") as file:
        for chunk in (1, 2, 6):
            file.seek(chunk * 1024)
            file.write(b"\xa5" * 1024)
    with pytest.raises(IntegrityError, match=r"^chunk 1: "):
        store.commit(example.id, None)
    assert partial.missing() == [(1, 3), (6, 7)]


def test_a_payload_cut_short_on_disk_is_missing_from_there(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    os.truncate(payload_path(store, example), 7 * 1024 + 1)
    with pytest.raises(ContainerError, match=r"^chunk 7: 1 bytes"):
        store.commit(example.id, None)
    assert store.ids() == []
    assert partial.missing() == [(7, 9)]
    example.put_into(partial)
    example.check(store.commit(example.id, None))


def test_damage_is_remembered_by_the_next_process(tmp_path: Path, example: Any) -> None:
    store = ArtifactStore(tmp_path)
    example.put_into(store.begin(example.encoded))
    store.close()
    os.truncate(payload_path(store, example), 1024)
    store = ArtifactStore(tmp_path)
    assert store.partial(example.id).missing() == []
    with pytest.raises(IntegrityError):
        store.commit(example.id, None)
    store.close()
    store = ArtifactStore(tmp_path)
    assert store.partial(example.id).missing() == [(1, 9)]
    store.close()


def test_a_disk_that_refuses_leaves_the_chunk_missing(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = store.begin(example.encoded)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match=r"^chunk 2: No space left"):
            partial.put(2, example.chunks()[2])
    assert partial.missing() == [(0, 9)]


def test_short_writes_are_continued(store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = store.begin(example.encoded)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: pwrite(handle, bytes(data)[:100], offset))
    example.put_into(partial)
    example.check(store.commit(example.id, None))


# Manifests that contradict the payload, though every chunk is the declared one


def resealed(example: Any, data: bytes, **changes: Any) -> tuple[bytes, bytes, list[bytes]]:
    """Return id, manifest and chunks of an artifact whose payload was replaced and whose digests follow it."""
    chunks = [data[at : at + 1024] for at in range(0, len(data), 1024)]
    digests = b"".join(blake3(chunk).digest() for chunk in chunks)
    payload = replace(example.manifest.payload, digest=blake3(data).digest(), chunks=digests)
    encoded = encode(replace(example.manifest, payload=replace(payload, **changes)))
    return blake3(encoded).digest(), encoded, chunks


def commits_in_vain(store: ArtifactStore, sealed: tuple[bytes, bytes, list[bytes]], match: str) -> None:
    artifact_id, encoded, chunks = sealed
    partial = store.begin(encoded)
    for index, chunk in enumerate(chunks):
        partial.put(index, chunk)
    assert partial.missing() == []
    with pytest.raises(IntegrityError, match=match):
        store.commit(artifact_id, None)
    assert store.ids() == []
    # No resending can mend it, so nothing of it is kept.
    with pytest.raises(NotFoundError):
        store.partial(artifact_id)
    assert not list((store.root / "partial").iterdir())


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
def test_a_tampered_header_is_refused(store: ArtifactStore, example: Any, old: bytes, new: bytes) -> None:
    assert old in example.payload
    commits_in_vain(store, resealed(example, example.payload.replace(old, new, 1)), "header")


def test_a_tampered_header_length_is_refused(store: ArtifactStore, example: Any) -> None:
    for head in ((2**63 - 1).to_bytes(8, "little"), bytes(8)):
        commits_in_vain(store, resealed(example, head + example.payload[8:]), "header")


def test_swapped_tensors_are_refused(store: ArtifactStore, example: Any) -> None:
    """Keys and values have equal sizes in the first layer: only the sections' digests tell them apart."""
    ranges = container.section_offsets(example.manifest.sections)
    (start, middle), (_, end) = ranges["layers.0.keys"], ranges["layers.0.values"]
    data = example.payload
    wrong = data[:start] + data[middle:end] + data[start:middle] + data[end:]
    commits_in_vain(store, resealed(example, wrong), r"^section layers\.0\.keys: digest")


@pytest.mark.parametrize("name", ["prefix.ids", "layers.0.keys", "layers.1.positions", "layers.1.values"])
def test_a_section_other_than_its_digest_is_refused(store: ArtifactStore, example: Any, name: str) -> None:
    start, end = container.section_offsets(example.manifest.sections)[name]
    for at in (start, end - 1):
        wrong = bytearray(example.payload)
        wrong[at] ^= 1
        commits_in_vain(store, resealed(example, bytes(wrong)), rf"^section {name}: digest")


def test_a_payload_digest_of_something_else_is_refused(store: ArtifactStore, example: Any) -> None:
    commits_in_vain(store, resealed(example, example.payload, digest=b"\x07" * 32), r"^payload: digest")


# Reading back


def test_damage_after_commit_is_never_returned(store: ArtifactStore, example: Any) -> None:
    stored = example.received_by(store)
    path = stored.payload_path
    for at in {*range(0, len(example.payload), 61), len(example.payload) - 1, 0, 7, 8}:
        wrong = bytearray(example.payload)
        wrong[at] ^= 1 << at % 8
        path.write_bytes(wrong)
        with pytest.raises(IntegrityError):
            stored.read_sections()
    for length in (0, 7, 1024, len(example.payload) - 1):
        path.write_bytes(example.payload[:length])
        with pytest.raises(ContainerError):
            stored.read_sections()
        with pytest.raises(StoreError, match="cut short"):
            stored.read_chunk(8)
    path.write_bytes(example.payload + b"\x00")
    with pytest.raises(ContainerError):
        stored.read_sections()
    path.write_bytes(example.payload)
    example.check(stored)


def test_a_payload_that_is_gone_is_a_store_error(store: ArtifactStore, example: Any) -> None:
    stored = example.received_by(store)
    store.drop(example.id)
    with pytest.raises(StoreError):
        stored.read_sections()
    with pytest.raises(StoreError):
        stored.read_chunk(0)


@pytest.mark.parametrize("index", [-1, 9, 10**6])
def test_there_is_no_such_chunk(store: ArtifactStore, example: Any, index: int) -> None:
    stored = example.received_by(store)
    with pytest.raises(ContainerError, match=f"^chunk {index}: the payload has 9 chunks"):
        stored.read_chunk(index)


def test_a_manifest_changed_on_disk_is_found(store: ArtifactStore, example: Any) -> None:
    path = example.received_by(store).payload_path.with_name("manifest.msgpack")
    path.write_bytes(example.encoded.replace(b"0.32.4", b"0.32.5"))
    with pytest.raises(IntegrityError, match="manifest on disk has changed"):
        store.get(example.id)


@pytest.mark.parametrize("record", [b"", b"{}", b"[1", b"\xff\xfe", b'{"committed_at": "noon"}'])
def test_an_unreadable_record_is_a_store_error(store: ArtifactStore, example: Any, record: bytes) -> None:
    path = example.received_by(store).payload_path.with_name("record.json")
    assert json.loads(path.read_bytes())["committed_at"] > 0
    path.write_bytes(record)
    with pytest.raises(StoreError):
        store.get(example.id)


def test_ids_are_sorted_and_strangers_files_are_none(store: ArtifactStore, kv_example: Callable[..., Any]) -> None:
    examples = [kv_example(tokens=tokens) for tokens in (30, 31, 32, 33)]
    for example in examples:
        example.received_by(store)
    for name in (".DS_Store", "notes", "ab" * 31, "AB" * 32, "zz" * 32):
        (store.root / "artifacts" / name).touch()
    assert store.ids() == sorted(example.id for example in examples)
