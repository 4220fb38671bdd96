"""Bytes that are not the declared ones, on their way in and on disk: named, never published, never returned."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import (
    ContainerError,
    IntegrityError,
    NotFoundError,
    QuarantinedError,
    StoreError,
    TransferError,
)
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored

# Wrong chunks


def test_a_wrong_chunk_is_named_and_stays_missing(store: ArtifactStore, example: Any, kv_example: Any) -> None:
    partial = store.begin(example.encoded)
    chunks = example.chunks()
    for index, chunk in enumerate(chunks):
        foreign = kv_example(tokens=44).chunks()[index]
        flipped = bytes([chunk[0] ^ 1]) + chunk[1:]
        for wrong in (chunk[:-1], chunk + b"\x00", b"", flipped, chunks[index - 1], foreign):
            with pytest.raises(ContainerError, match=f"^chunk {index}: "):
                partial.put(index, wrong)
            assert partial.missing() == [(0, 12)]
    for index in (12, 13, -1):
        with pytest.raises(ContainerError, match="the payload has 12 chunks"):
            partial.put(index, chunks[0])
    example.put_into(partial)
    example.check(store.commit(example.id, None))


def test_a_wrong_chunk_does_not_undo_a_right_one(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    with pytest.raises(IntegrityError):
        partial.put(3, bytes(1024))
    example.check(store.commit(example.id, None))


@pytest.mark.parametrize("left_out", [[0], [11], [3, 4], [*range(12)]])
def test_commit_before_everything_arrived(store: ArtifactStore, example: Any, left_out: list[int]) -> None:
    partial = store.begin(example.encoded)
    chunks = example.chunks()
    for index in {*range(12)} - {*left_out}:
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


# A disk that refuses


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_disk_that_refuses_leaves_the_chunk_missing(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = store.begin(example.encoded)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refusing(errno.ENOSPC))
        with pytest.raises(StoreError, match=r"^chunk 2: No space left"):
            partial.put(2, example.chunks()[2])
    assert partial.missing() == [(0, 12)]


@pytest.mark.parametrize(("name", "missing"), [("pread", []), ("fsync", [(0, 12)])])
def test_a_disk_that_refuses_to_commit_publishes_nothing_and_trusts_no_chunk_it_may_have_lost(
    tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch, name: str, missing: list[tuple[int, int]]
) -> None:
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        example.put_into(store.begin(example.encoded))
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        partial = store.partial(example.id)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refusing(errno.EIO))
            with pytest.raises(StoreError, match="Input/output error"):
                store.commit(example.id, None)
        assert store.ids() == []
        assert partial.missing() == missing
        if missing:
            example.put_into(partial)
        example.check(store.commit(example.id, None))


def test_a_disk_that_refuses_to_count_is_a_store_error(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = store.begin(example.encoded)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refusing(errno.ENOSPC))
        with pytest.raises(StoreError, match="No space left"):
            partial.count(10, 1)


@pytest.mark.parametrize(
    ("name", "calls"), [("open", 0), ("open", 1), ("ftruncate", 0), ("ftruncate", 1), ("pread", 0)]
)
def test_an_assembly_that_cannot_be_opened_leaves_no_file_open(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    """A process that has no file left can take no connection either."""
    true = {other: getattr(os, other) for other in ("open", "close", "ftruncate", "pread")}
    handles: set[int] = set()
    left = calls

    def opening(path: Any, *args: Any, **options: Any) -> int:
        handle: int = true["open"](path, *args, **options)
        handles.add(handle)
        return handle

    def closing(handle: int) -> None:
        handles.discard(handle)
        true["close"](handle)

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal left
        if name == "open" and Path(args[0]).name not in {"payload.safetensors", "chunks"}:
            return opening(*args, **options)
        left -= 1
        if left < 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return opening(*args, **options) if name == "open" else true[name](*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        patch.setattr(os, "close", closing)
        patch.setattr(os, name, failing)
        with pytest.raises(StoreError, match="File too large"):
            store.begin(example.encoded)
    assert handles == set()
    example.check(example.received_by(store))


def test_short_writes_are_continued(store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = store.begin(example.encoded)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: pwrite(handle, bytes(data)[:100], offset))
    example.put_into(partial)
    example.check(store.commit(example.id, None))


# Reading back


def read_all(stored: Stored) -> list[bytes | memoryview]:
    return [stored.sections.read(section.name) for section in stored.manifest.sections]


def test_damage_after_commit_is_never_returned(store: ArtifactStore, example: Any) -> None:
    stored = example.received_by(store)
    path = stored.payload_path
    header = example.offset(1)
    for at in {*range(0, len(example.payload), 61), len(example.payload) - 1, 0, 7, 8, header - 1, header}:
        wrong = bytearray(example.payload)
        wrong[at] ^= 1 << at % 8
        path.write_bytes(wrong)
        chunk = max(index for index in range(12) if example.offset(index) <= at)
        with pytest.raises(IntegrityError, match=f"^chunk {chunk}: "):
            stored.plan.check(chunk, stored.read_chunk(chunk))
        if at < header:
            # No section holds it, so every section is whole.
            assert read_all(stored) == [content.data for content in example.contents]
        else:
            with pytest.raises(IntegrityError, match=f": chunk {chunk}: "):
                read_all(stored)
    for length in (0, 7, 1024, len(example.payload) - 1):
        path.write_bytes(example.payload[:length])
        with pytest.raises(StoreError, match="cut short"):
            read_all(stored)
        with pytest.raises(StoreError, match="cut short"):
            stored.read_chunk(11)
    path.write_bytes(example.payload)
    example.check(stored)


@pytest.mark.parametrize("length", [0, -1, 1])
def test_a_payload_of_another_length_is_put_aside_at_the_next_start(tmp_path: Path, example: Any, length: int) -> None:
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        path = example.received_by(store).payload_path
    data = example.payload
    path.write_bytes({0: b"", -1: data[:-1], 1: data + b"\x00"}[length])
    size = path.stat().st_size
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        assert store.ids() == []
        with pytest.raises(QuarantinedError, match=rf"\b{size} bytes.* the manifest says {len(data)}\b"):
            store.get(example.id)


def test_a_payload_that_is_gone_is_a_store_error(store: ArtifactStore, example: Any) -> None:
    stored = example.received_by(store)
    store.drop(example.id)
    for section in stored.manifest.sections:
        with pytest.raises(StoreError):
            stored.sections.read(section.name)
    with pytest.raises(StoreError):
        stored.read_chunk(0)


@pytest.mark.parametrize("index", [-1, 12, 10**6])
def test_there_is_no_such_chunk(store: ArtifactStore, example: Any, index: int) -> None:
    stored = example.received_by(store)
    with pytest.raises(ContainerError, match=f"^chunk {index}: the payload has 12 chunks"):
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
