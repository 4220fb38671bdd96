"""Damage on disk between Put and Commit: found by Commit after a restart, and when it is read in any case."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ContainerError, IntegrityError, QuarantinedError, StoreError, TransferError
from kvferry.core.store import ArtifactStore


def payload_path(store: ArtifactStore, example: Any) -> Path:
    """Where the assembly keeps its payload."""
    return store.root.joinpath("partial", example.id.hex(), "payload.safetensors")


def damage(store: ArtifactStore, example: Any, *chunks: int) -> None:
    """Flip a bit of each of these chunks of an assembly, in the file."""
    with payload_path(store, example).open("r+b") as file:
        for chunk in chunks:
            at = example.offset(chunk) + 3
            file.seek(at)
            file.write(bytes([example.payload[at] ^ 0x10]))


@contextlib.contextmanager
def arrived(root: Path, example: Any, *chunks: int) -> Iterator[ArtifactStore]:
    """A process in which nothing has arrived yet: these chunks, by default all, came in an earlier one."""
    with contextlib.closing(ArtifactStore(root)) as earlier:
        partial = earlier.begin(example.encoded)
        for chunk in chunks or range(len(example.chunks())):
            partial.put(chunk, example.chunks()[chunk])
    with contextlib.closing(ArtifactStore(root)) as store:
        yield store


@pytest.mark.parametrize("chunk", [0, 1, 4, 10, 11])
def test_damage_is_found_by_commit_after_a_restart(tmp_path: Path, example: Any, chunk: int) -> None:
    with arrived(tmp_path, example) as store:
        damage(store, example, chunk)
        assert store.partial(example.id).missing() == []
        with pytest.raises(IntegrityError, match=f"^chunk {chunk}: ") as caught:
            store.commit(example.id, None)
        assert caught.value.fields["chunk"] == chunk
        assert store.ids() == []
        assert store.partial(example.id).missing() == [(chunk, chunk + 1)]
        with pytest.raises(TransferError):
            store.commit(example.id, None)
        store.partial(example.id).put(chunk, example.chunks()[chunk])
        example.check(store.commit(example.id, None))


@pytest.mark.parametrize("chunk", [*range(12)])
def test_damage_within_a_process_is_found_when_it_is_read(store: ArtifactStore, example: Any, chunk: int) -> None:
    """Commit does not read again what was verified before it was written; whoever reads it does."""
    example.put_into(store.begin(example.encoded))
    damage(store, example, chunk)
    stored = store.commit(example.id, None)
    with pytest.raises(IntegrityError, match=f"^chunk {chunk}: "):
        stored.plan.check(chunk, stored.read_chunk(chunk))
    damaged = 0
    for content in example.contents:
        first, end = stored.plan.section_chunks[content.name]
        if first <= chunk < end:
            damaged += 1
            with pytest.raises(IntegrityError, match=f"^section {content.name}: chunk {chunk}: ") as caught:
                stored.sections.read(content.name)
            assert (caught.value.fields["field"], caught.value.fields["chunk"]) == (content.name, chunk)
        else:
            assert stored.sections.read(content.name) == content.data
    # The header belongs to no section, and nobody takes anything from it.
    assert damaged == (chunk > 0)


def test_all_damaged_chunks_are_found_at_once(tmp_path: Path, example: Any) -> None:
    with arrived(tmp_path, example) as store:
        damage(store, example, 1, 2, 6)
        with pytest.raises(IntegrityError, match=r"^chunk 1: "):
            store.commit(example.id, None)
        assert store.partial(example.id).missing() == [(1, 3), (6, 7)]


def test_what_came_before_the_restart_is_judged_though_more_came_after(tmp_path: Path, example: Any) -> None:
    with arrived(tmp_path, example, 0, 2, 4, 6, 8, 10) as store:
        damage(store, example, 4, 8, 10)
        partial = store.partial(example.id)
        # Chunk 8 comes once more, and is whole again by that.
        for chunk in (1, 3, 5, 7, 8, 9, 11):
            partial.put(chunk, example.chunks()[chunk])
        with pytest.raises(IntegrityError, match=r"^chunk 4: "):
            store.commit(example.id, None)
        assert partial.missing() == [(4, 5), (10, 11)]
        for chunk in (4, 10):
            partial.put(chunk, example.chunks()[chunk])
        example.check(store.commit(example.id, None))


def test_commit_reads_what_an_earlier_process_wrote_and_nothing_else(
    tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    offsets: list[int] = []

    def noted(handle: int, size: int, offset: int) -> bytes:
        offsets.append(offset)
        return pread(handle, size, offset)

    earlier = (0, 3, 7, 11)
    with arrived(tmp_path, example, *earlier) as store:
        partial = store.partial(example.id)
        for chunk in {*range(12)} - {*earlier}:
            partial.put(chunk, example.chunks()[chunk])
        damage(store, example, 7)
        monkeypatch.setattr(os, "pread", noted)
        with pytest.raises(IntegrityError, match=r"^chunk 7: "):
            store.commit(example.id, None)
        assert offsets == [example.offset(chunk) for chunk in earlier]
        # What was found whole is not read once more.
        partial.put(7, example.chunks()[7])
        stored = store.commit(example.id, None)
        assert len(offsets) == len(earlier)
        example.check(stored)


def test_a_payload_cut_short_on_disk_is_missing_from_there(tmp_path: Path, example: Any) -> None:
    with arrived(tmp_path, example) as store:
        partial = store.partial(example.id)
        os.truncate(payload_path(store, example), example.offset(7) + 1)
        with pytest.raises(ContainerError, match=r"^chunk 7: 1 bytes"):
            store.commit(example.id, None)
        assert store.ids() == []
        assert partial.missing() == [(7, 12)]
        example.put_into(partial)
        example.check(store.commit(example.id, None))


def test_a_payload_cut_short_within_a_process_is_never_returned_and_put_aside_at_the_next_start(
    tmp_path: Path, example: Any
) -> None:
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        example.put_into(store.begin(example.encoded))
        os.truncate(payload_path(store, example), example.offset(7) + 1)
        stored = store.commit(example.id, None)
        for content in example.contents[:2]:
            assert stored.sections.read(content.name) == content.data
        for content in example.contents[2:]:
            with pytest.raises(StoreError, match=r"^chunk \d+: the stored payload is cut short"):
                stored.sections.read(content.name)
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        assert store.ids() == []
        with pytest.raises(QuarantinedError, match=rf"\b{example.offset(7) + 1} bytes"):
            store.get(example.id)


def test_damage_is_remembered_by_the_next_process(tmp_path: Path, example: Any) -> None:
    with arrived(tmp_path, example) as store:
        os.truncate(payload_path(store, example), example.offset(1))
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        assert store.partial(example.id).missing() == []
        with pytest.raises(IntegrityError):
            store.commit(example.id, None)
    with contextlib.closing(ArtifactStore(tmp_path)) as store:
        assert store.partial(example.id).missing() == [(1, 12)]
