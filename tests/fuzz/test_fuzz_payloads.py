"""What lies on a disk or in a payload: zstd frames, artifact files, journals of transfers, records, token files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from blake3 import blake3
from hypothesis import strategies as st

from kvferry.core import artifact_file, container, manifest
from kvferry.core.errors import (
    ContainerError,
    KvferryError,
    ManifestError,
    NotFoundError,
    StoreError,
    TooLargeError,
    TransferError,
)
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import Decoded, Section
from kvferry.core.plan import make_plan
from kvferry.core.store import ArtifactStore

MIB = 2**20
TEXT = b"Every crate that arrives is weighed, counted and entered in the ledger before noon. " * 12
ACCOUNT = SenderAccount(1, 2, 3.0, 4.0, 5.0, 6.0)
edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 9), st.binary(max_size=9)), min_size=1, max_size=3
)


def edited(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for place, removed, added in changes:
        at = int(place * (len(data) + 1))
        data = data[:at] + added + data[at + removed :]
    return data


# Compressed sections


def compressed(data: bytes, level: int, *, sized: bool, checksum: bool) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=sized).compress(data)


ZEROS = bytes(8 * MIB)
contents = st.binary(max_size=300) | st.sampled_from((b"", TEXT, ZEROS))
true_frames = st.builds(compressed, contents, st.integers(1, 9), sized=st.booleans(), checksum=st.booleans())
handmade = st.builds(
    lambda flags, size, rest: zstandard.FRAME_HEADER + bytes([flags]) + struct.pack("<Q", size) + rest,
    st.integers(0, 255),
    st.integers(0, 2**64 - 1) | st.sampled_from((5, MIB, 2**53)),
    st.binary(max_size=60),
)
some_frames = true_frames | handmade | st.binary(max_size=80) | st.builds(edited, true_frames, edits)


def decodes(budget: Any, frame: bytes, length: int, joined: bytes) -> None:
    """A section that promises ``length`` bytes gives exactly those that its digest names, or an error."""
    data = frame + joined
    section = Section(
        "document.text", "U8", (len(data),), "zstd", len(data), bytes(32), Decoded(length, blake3(TEXT).digest())
    )
    with budget.at_most(length + 2 * MIB + 2 * len(data)):
        try:
            content = container.decode_section(section, data)
        except ContainerError as error:
            said = error.message
        else:
            said = ""
    assert said.startswith("section document.text: ") or (content == TEXT and length == len(TEXT))


def test_zstd_frames(fuzz: Any) -> None:
    fuzz(
        decodes,
        frame=some_frames,
        length=st.sampled_from((0, 1, len(TEXT), 8 * MIB)) | st.integers(0, 8 * MIB),
        joined=st.just(b"") | st.binary(max_size=9) | true_frames,
    )


# Artifact files


@dataclasses.dataclass(frozen=True)
class Carried:
    """An artifact in memory."""

    example: Any

    @property
    def artifact_id(self) -> bytes:
        return self.example.id  # type: ignore[no-any-return]

    @property
    def manifest(self) -> Any:
        return self.example.manifest

    @property
    def encoded(self) -> bytes:
        return self.example.encoded  # type: ignore[no-any-return]

    @property
    def plan(self) -> Any:
        return make_plan(self.example.manifest)

    def read_chunk(self, index: int) -> bytes:
        return self.example.chunks()[index]  # type: ignore[no-any-return]


@pytest.fixture
def files(kv_example: Any, zstd_example: Any, tmp_path: Path) -> list[bytes]:
    found = []
    for index, (example, account) in enumerate(((kv_example(), ACCOUNT), (zstd_example(), None))):
        path = tmp_path / f"{index}.kvferry"
        artifact_file.write(path, Carried(example), account)
        found.append(path.read_bytes())
    return found


def opened(path: Path, data: bytes, budget: Any) -> Any:
    """Return the artifact file, read and verified, or our error."""
    path.write_bytes(data)
    with budget.at_most(4 * MIB + 60 * len(data)):
        try:
            found = artifact_file.read(path)
            found.verify()
        except (ContainerError, ManifestError, TooLargeError) as error:
            return error
    return found


def test_artifact_files(fuzz: Any, files: list[bytes], tmp_path: Path) -> None:
    def reads(budget: Any, data: bytes) -> None:
        outcome = opened(tmp_path / "odd.kvferry", data, budget)
        assert isinstance(outcome, KvferryError) == (data not in files)

    heads = st.builds(
        lambda magic, manifest, account, rest: magic + struct.pack("<II", manifest, account) + rest,
        st.just(artifact_file.MAGIC) | st.binary(min_size=8, max_size=8),
        st.integers(0, 2**32 - 1) | st.integers(0, 300),
        st.integers(0, 2**32 - 1) | st.integers(0, 300),
        st.binary(max_size=400),
    )
    true_ones = st.sampled_from(files)
    fuzz(reads, data=st.binary(max_size=200) | heads | st.builds(edited, true_ones, edits) | true_ones)


def test_artifact_files_whose_head_was_sealed_anew(fuzz: Any, files: list[bytes], tmp_path: Path) -> None:
    """As whoever means it would: what is left is another artifact that holds together, or an error."""

    def reads(budget: Any, data: bytes, changes: list[tuple[float, int, bytes]]) -> None:
        lengths = struct.unpack("<II", data[8:16])
        end = 16 + sum(lengths)
        encoded = edited(data[16 : 16 + lengths[0]], changes)
        head = data[:8] + struct.pack("<II", len(encoded), lengths[1]) + encoded + data[16 + lengths[0] : end]
        outcome = opened(tmp_path / "odd.kvferry", head + blake3(head).digest() + data[end + 32 :], budget)
        if not isinstance(outcome, KvferryError):
            assert manifest.encode(outcome.manifest) == outcome.encoded == encoded
            assert make_plan(outcome.manifest).digests == outcome.manifest.payload.chunks

    fuzz(reads, data=st.sampled_from(files), changes=edits)


# The store


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def attempt(action: Callable[[], Any], *allowed: type[KvferryError]) -> KvferryError | None:
    try:
        action()
    except allowed as error:
        return error
    return None


def finish(store: ArtifactStore, example: Any) -> KvferryError | None:
    """Put what is missing, and commit."""
    partial = store.begin(example.encoded)
    for start, end in partial.missing():
        for index in range(start, end):
            partial.put(index, example.chunks()[index])
    return attempt(lambda: store.commit(example.id, None), ContainerError)


def test_journals_of_a_transfer(fuzz: Any, quick: None, kv_example: Any, tmp_path: Path) -> None:
    """Whatever a journal says: what is not there is missing, what is wrong is found, and the transfer ends well."""
    example = kv_example()
    chunks = example.chunks()
    root = tmp_path / "store"

    def resumes(budget: Any, journal: bytes, present: int, *, wrong: bool) -> None:
        shutil.rmtree(root, ignore_errors=True)
        with contextlib.closing(ArtifactStore(root)) as store:
            partial = store.begin(example.encoded)
            for index in range(present):
                partial.put(index, chunks[index])
            path = partial.path
        (path / "chunks").write_bytes(journal)
        if wrong:
            (path / "payload.safetensors").write_bytes(bytes(100))
        with contextlib.closing(ArtifactStore(root)) as store, budget.at_most(4 * MIB):
            partial = store.partial(example.id)
            partial.count(1, 1)
            attempt(lambda: store.commit(example.id, None), TransferError, ContainerError)
            if store.ids():
                assert present == len(chunks)
                assert not wrong
            else:
                assert attempt(lambda: store.get(example.id), NotFoundError) is not None
                # What the journal was wrong about is found by Commit, and then it is missing.
                while (error := finish(store, example)) is not None:
                    assert isinstance(error, ContainerError)
                stored = store.get(example.id)
                assert stored.record.traffic is not None
                assert 0 < stored.record.traffic.received_bytes < 2**53
            example.check(store.get(example.id))

    count = len(chunks)
    flags = st.lists(st.sampled_from((0, 1, 2, 255)), min_size=count, max_size=count).map(bytes)
    counters = st.binary(min_size=16, max_size=24) | st.just(b"\xff" * 16)
    fuzz(
        resumes,
        journal=st.builds(lambda left, right: left + right, flags, counters) | st.binary(max_size=60),
        present=st.integers(0, count),
        wrong=st.booleans(),
    )


def test_records_and_owners(fuzz: Any, quick: None, kv_example: Any, tmp_path: Path) -> None:
    """Beside a whole payload: the artifact is there as it was, or put aside, and the store opens."""
    example, root = kv_example(), tmp_path / "store"
    with contextlib.closing(ArtifactStore(root)) as store:
        path = example.received_by(store).path
    true = (path / "record.json").read_bytes()

    def opens(budget: Any, record: bytes) -> None:
        (path / "record.json").write_bytes(record)
        (path / "owner").write_bytes(record)
        with budget.at_most(4 * MIB), contextlib.closing(ArtifactStore(root)) as store:
            error = attempt(lambda: store.get(example.id), StoreError)
            assert store.ids() == ([] if error else [example.id])
            if error is not None:
                assert list(store.quarantined()) == [example.id]
                (root / "quarantine" / example.id.hex()).rename(path)

    nested = st.integers(1, 3000).map(lambda depth: b'{"x":' + b"[" * depth + b"]" * depth + b"}")
    fuzz(opens, record=st.binary(max_size=60) | st.builds(edited, st.just(true), edits) | nested | st.just(true))
