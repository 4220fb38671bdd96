"""The artifact file: written whole, read back the same, and refused whatever else happened to it on its way."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import artifact_file, verification
from kvferry.core.errors import (
    ContainerError,
    IntegrityError,
    InvalidRequestError,
    KvferryError,
    ManifestError,
    StoreError,
)
from kvferry.core.ledger import SenderAccount
from kvferry.core.payloads import Payload
from kvferry.core.plan import make_plan
from kvferry.core.store import ArtifactStore, Stored

MAGIC = bytes.fromhex("89 4B 56 46 0D 0A 01 0A")
ACCOUNT = SenderAccount(40, 5120, 1.0, 2.0, 3.0, 4.0, None)


def expected_file(example: Any, account: bytes) -> bytes:
    """The file as docs/wire.md describes it."""
    head = MAGIC + struct.pack("<II", len(example.encoded), len(account)) + example.encoded + account
    return head + blake3(head).digest() + example.payload


def spent() -> bytes:
    return json.dumps(
        {
            "prefill_tokens": 40,
            "dense_bf16_bytes": 5120,
            "prefill_ms": 1.0,
            "method_ms": 2.0,
            "encode_ms": 3.0,
            "transfer_ms": 4.0,
            "fallback_reason": None,
            "auto": None,
        },
        separators=(",", ":"),
    ).encode()


@pytest.fixture
def stored(store: ArtifactStore, example: Any) -> Stored:
    received: Stored = example.received_by(store)
    return received


@pytest.fixture(scope="module")
def small(text_example: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """A whole file of about a kilobyte, and a path to write variants of it to."""
    data = expected_file(text_example(b"hi", b"S"), spent())
    path = tmp_path_factory.mktemp("small") / "variant"
    path.write_bytes(data)
    artifact_file.read(path).verify()
    return data, path


def refusal(path: Path, data: bytes) -> KvferryError:
    """What is said of a file with these bytes."""
    path.write_bytes(data)
    with pytest.raises(KvferryError) as caught:
        artifact_file.read(path).verify()
    assert str(path) in caught.value.message or isinstance(caught.value, ManifestError)
    return caught.value


# There and back


@pytest.mark.parametrize("account", [None, ACCOUNT])
def test_the_bytes_are_those_of_the_document(
    stored: Stored, example: Any, tmp_path: Path, account: SenderAccount | None
) -> None:
    path = tmp_path / "out.kvf"
    seen: list[tuple[int, int]] = []
    size = artifact_file.write(path, stored, account, progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == expected_file(example, b"" if account is None else spent())
    assert size == path.stat().st_size
    assert seen[-1] == (len(example.payload), len(example.payload))
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["out.kvf"]


@pytest.mark.parametrize("kind", ["kv", "text", "zstd"])
def test_what_is_read_is_what_was_written(
    store: ArtifactStore,
    tmp_path: Path,
    kind: str,
    kv_example: Callable[..., Any],
    text_example: Callable[..., Any],
    zstd_example: Callable[..., Any],
) -> None:
    example = {"kv": kv_example, "text": text_example, "zstd": zstd_example}[kind]()
    path = tmp_path / "out.kvf"
    artifact_file.write(path, example.received_by(store), ACCOUNT)
    found = artifact_file.read(path)
    found.verify()
    assert (found.artifact_id, found.encoded, found.manifest) == (example.id, example.encoded, example.manifest)
    assert found.account == ACCOUNT
    assert [found.read_chunk(index) for index in range(found.plan.count)] == example.chunks()
    with pytest.raises(ContainerError, match=f"the payload has {found.plan.count} chunks"):
        found.read_chunk(found.plan.count)
    # A file can be written again from a file.
    again = tmp_path / "again.kvf"
    artifact_file.write(again, found, found.account)
    assert again.read_bytes() == path.read_bytes()


# Writing


def test_nothing_is_overwritten_unasked(stored: Stored, tmp_path: Path) -> None:
    path = tmp_path / "out.kvf"
    path.write_bytes(b"mine")
    (tmp_path / "link.kvf").symlink_to(tmp_path / "nowhere")
    for taken in (path, tmp_path / "link.kvf", tmp_path):
        with pytest.raises(InvalidRequestError, match="is there already"):
            artifact_file.write(taken, stored, None)
    assert path.read_bytes() == b"mine"
    artifact_file.write(path, stored, None, overwrite=True)
    artifact_file.read(path).verify()


def test_a_file_that_appears_meanwhile_stays(stored: Stored, tmp_path: Path) -> None:
    path = tmp_path / "out.kvf"
    with pytest.raises(InvalidRequestError):
        artifact_file.write(path, stored, None, progress=lambda *_: path.write_bytes(b"mine") and None)
    assert path.read_bytes() == b"mine"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["out.kvf"]


@pytest.mark.parametrize("at", [0, 1, -1])
def test_damage_is_found_while_it_is_written(stored: Stored, tmp_path: Path, at: int) -> None:
    whole = stored.payload_path.read_bytes()
    data = bytearray(whole)
    data[at] ^= 1
    stored.payload_path.write_bytes(data)
    path = tmp_path / "out.kvf"
    path.write_bytes(b"old")
    with pytest.raises(IntegrityError, match=r"^chunk \d+: digest"):
        artifact_file.write(path, stored, None, overwrite=True)
    stored.payload_path.write_bytes(whole[:-1])
    with pytest.raises(StoreError, match="cut short"):
        artifact_file.write(path, stored, None, overwrite=True)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["out.kvf"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_nothing(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "out.kvf"
    with monkeypatch.context() as patch:
        patch.setattr(os, name, refuse)
        with pytest.raises(StoreError, match="No space left"):
            artifact_file.write(path, stored, None)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == []


@pytest.mark.parametrize("place", ["no/such/folder/out.kvf", "x" * 300])
def test_an_impossible_place_is_a_store_error(stored: Stored, tmp_path: Path, place: str) -> None:
    with pytest.raises(StoreError):
        artifact_file.write(tmp_path / place, stored, None)


# Reading what went wrong


def test_every_cut_is_refused(small: tuple[bytes, Path]) -> None:
    data, path = small
    for length in range(len(data)):
        assert "is cut short" in refusal(path, data[:length]).message, length


@pytest.mark.parametrize("more", [b"\x00", b"\n", b"x" * 5000])
def test_bytes_behind_the_end_are_refused(small: tuple[bytes, Path], more: bytes) -> None:
    data, path = small
    assert f"has {len(more)} bytes too many" in refusal(path, data + more).message


@settings(derandomize=True, database=None, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_refused(small: tuple[bytes, Path], data: st.DataObject) -> None:
    whole, path = small
    at = data.draw(st.integers(0, len(whole) - 1), "byte")
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    check_named(refusal(path, bytes(flipped)), whole, at)


def check_named(error: KvferryError, whole: bytes, at: int) -> None:
    """Assert that the error says which part of the file is wrong."""
    start = len(whole) - 147
    if at < 8:
        assert "magic" in error.message
    elif at < start:
        assert "head" in error.message
    elif at < start + 144:
        assert "header: chunk 0: digest" in error.message
    elif at == start + 144:
        assert "section prompt.system: chunk 1: digest" in error.message
    else:
        assert "section document.text: chunk 2: digest" in error.message


def test_one_bit_of_every_byte_is_refused(small: tuple[bytes, Path]) -> None:
    whole, path = small
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        check_named(refusal(path, bytes(flipped)), whole, at)


@pytest.mark.parametrize(
    "mend",
    [
        lambda data: data.replace(b"\r\n", b"\n"),
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.decode("latin-1").encode(),
        lambda data: bytes(byte & 0x7F for byte in data),
        lambda data: b"\xef\xbb\xbf" + data,
    ],
)
def test_a_file_that_was_taken_for_text_is_named_by_its_magic(
    small: tuple[bytes, Path], mend: Callable[[bytes], bytes]
) -> None:
    data, path = small
    assert "magic" in refusal(path, mend(data)).message


@pytest.mark.parametrize(
    "data", [b"PK\x03\x04" * 20, b"\x89PNG\r\n\x1a\n" + bytes(50), MAGIC[:6] + b"\x02\n" + bytes(60)]
)
def test_another_file_is_no_artifact(small: tuple[bytes, Path], data: bytes) -> None:
    error = refusal(small[1], data)
    assert isinstance(error, ContainerError)
    assert f"an artifact file begins with {MAGIC.hex(' ')}" in error.message


@pytest.mark.parametrize(
    ("lengths", "name"),
    [((2**21 + 1, 0), "manifest"), ((2**32 - 1, 0), "manifest"), ((10, 2**16 + 1), "account")],
)
def test_lengths_are_bounded_before_anything_is_read(
    small: tuple[bytes, Path], lengths: tuple[int, int], name: str
) -> None:
    data, path = small
    error = refusal(path, MAGIC + struct.pack("<II", *lengths) + data[16:])
    assert error.fields["field"] == name
    assert "the limit is" in error.message


def sealed(manifest: bytes, account: bytes, payload: bytes) -> bytes:
    head = MAGIC + struct.pack("<II", len(manifest), len(account)) + manifest + account
    return head + blake3(head).digest() + payload


@pytest.mark.parametrize("account", [b"{}", b"null", b"\xff", b'{"prefill_tokens":"many"}', spent()[:-1] + b',"x":1}'])
def test_an_account_that_is_none_is_refused(
    small: tuple[bytes, Path], text_example: Callable[..., Any], account: bytes
) -> None:
    example = text_example(b"hi", b"S")
    error = refusal(small[1], sealed(example.encoded, account, example.payload))
    assert isinstance(error, ContainerError)
    assert "account" in error.message


def test_a_sealed_manifest_is_checked_like_an_offer(
    small: tuple[bytes, Path], text_example: Callable[..., Any]
) -> None:
    example = text_example(b"hi", b"S")
    for encoded in (b"\xc1", example.encoded[:-1], example.encoded + b"\x00"):
        assert isinstance(refusal(small[1], sealed(encoded, b"", example.payload)), ManifestError)
    # Canonical, but sections and payload contradict each other.
    wrong = example.encoded.replace(example.manifest.payload.digest, b"\x07" * 32)
    assert isinstance(refusal(small[1], sealed(wrong, b"", example.payload)), ManifestError)


def test_a_packed_section_must_unpack(small: tuple[bytes, Path], zstd_example: Callable[..., Any]) -> None:
    """Every chunk is the declared one, and what it unpacks to is not."""
    example = zstd_example()
    encoded = example.encoded.replace(example.contents[1].decoded.digest, b"\x07" * 32)
    assert encoded != example.encoded
    error = refusal(small[1], sealed(encoded, b"", example.payload))
    assert isinstance(error, IntegrityError)
    assert "section document.text: content digest" in error.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StoreError):
            artifact_file.read(path)


# Everything that is wrong, not the first alone


def test_all_damage_is_found(example: Any, in_memory: Callable[..., Payload]) -> None:
    chunks = example.chunks()
    plan = make_plan(example.manifest)
    assert list(verification.damage(example.manifest, plan, in_memory(chunks))) == []
    first = plan.section_chunks["layers.1.positions"][0]
    for index in (0, first, len(chunks) - 1):
        chunks[index] = chunks[index][:-1] + bytes([chunks[index][-1] ^ 0x80])
    found = list(verification.damage(example.manifest, plan, in_memory(chunks)))
    assert [error.fields["chunk"] for error in found] == [0, first, len(chunks) - 1]
    assert [error.message.split(": chunk")[0] for error in found] == [
        "header",
        "section layers.1.positions",
        "section layers.1.values",
    ]
    assert all(isinstance(error, IntegrityError) for error in found)
