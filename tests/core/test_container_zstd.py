"""Compressed sections from a stranger: a frame that is not exactly the declared one is a typed error, in little memory.

What is decoded has passed its chunks' digests: the bad frame is the declared one, as a sender that lies would have it,
so nothing but the frame itself can give it away.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import container, limits
from kvferry.core.errors import ContainerError, IntegrityError
from kvferry.core.manifest import Decoded, Section
from kvferry.core.payloads import Payload, Sections
from kvferry.core.plan import make_plan

replace = msgspec.structs.replace
steady = settings(derandomize=True, database=None, deadline=None, max_examples=100)
MIB = 2**20
TEXT = b"Every crate that arrives is weighed, counted and entered in the ledger before noon. " * 12


def declared(frame: bytes, length: int, content: bytes = b"") -> Section:
    """A section that stores ``frame`` and says that it decodes to ``length`` bytes with the digest of ``content``."""
    decoded = Decoded(length, blake3(content).digest())
    digest = blake3(blake3(frame).digest()).digest()
    return Section("document.text", "U8", (len(frame),), "zstd", len(frame), digest, decoded)


def compressed(data: bytes, *, sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=sized).compress(data)


def frame_declaring(size: int, blocks: bytes) -> bytes:
    """A single-segment frame, put together by hand (RFC 8878, 3.1.1), that declares ``size`` in eight bytes."""
    return zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", size) + blocks


def block(kind: int, size: int, data: bytes, *, last: bool = True) -> bytes:
    return struct.pack("<I", (size << 3) | (kind << 1) | last)[:3] + data


RAW, RLE = 0, 1


@contextmanager
def at_most(cap: int) -> Iterator[None]:
    """Fail when the block's peak of Python memory, the decoder's output included, goes over ``cap`` bytes."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak <= cap, f"{peak} bytes, the cap is {cap}"


def refused(section: Section, frame: bytes, cap: int = MIB) -> ContainerError:
    with at_most(cap), pytest.raises(ContainerError, match=r"^section document\.text: ") as caught:
        container.decode_section(section, frame)
    return caught.value


@pytest.mark.parametrize("text", [b"", b"x", TEXT, bytes(300_000)])
@pytest.mark.parametrize("level", [1, 3, 19])
def test_round_trip(text: bytes, level: int) -> None:
    content = container.zstd_section("document.text", text, level)
    (section,), _ = container.write_payload([content], lambda _: None, MIB)
    assert (section.dtype, section.shape, section.length) == ("U8", (len(content.data),), len(content.data))
    assert section == declared(bytes(content.data), len(text), text)
    assert container.decode_section(section, content.data) == text
    assert container.decode_section(section, memoryview(bytes(content.data))) == text


def test_frames_carry_their_size_and_a_checksum() -> None:
    frame = bytes(container.zstd_section("document.text", TEXT, 3).data)
    parameters = zstandard.get_frame_parameters(frame)
    assert parameters.content_size == len(TEXT)
    assert parameters.has_checksum


def test_the_handmade_frames_are_frames() -> None:
    frame = frame_declaring(5, block(RLE, 5, b"a"))
    assert container.decode_section(declared(frame, 5, b"aaaaa"), frame) == b"aaaaa"


def test_a_flipped_bit_in_transit_is_found_by_the_digest_before_decoding(
    zstd_example: Callable[..., Any], in_memory: Callable[..., Payload], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = zstd_example(text=TEXT)
    chunks = example.chunks()
    plan = make_plan(example.manifest)
    (index,) = range(*plan.section_chunks["document.text"])
    frame = chunks[index]
    assert frame == example.contents[1].data
    whole = Sections(example.manifest, plan, in_memory(chunks))
    assert whole.read("document.text") == TEXT
    monkeypatch.setattr(container, "decode_section", lambda *_: pytest.fail("decoded what was not verified"))
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        chunks[index] = bytes(flipped)
        with pytest.raises(IntegrityError) as caught:
            Sections(example.manifest, plan, in_memory(chunks)).read("document.text")
        assert caught.value.fields["expected"] == blake3(frame).hexdigest()


@pytest.mark.parametrize("text", [b"", b"short", TEXT])
def test_a_flipped_bit_in_the_frame_never_gives_other_content(text: bytes) -> None:
    frame = compressed(text)
    wrong = 0
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert container.decode_section(declared(bytes(flipped), len(text), text), bytes(flipped)) == text
        except ContainerError:
            wrong += 1
    # The format has a few bits that mean nothing; the last 32 are the checksum, and each of those counts.
    assert wrong >= 8 * len(frame) - 24


@pytest.mark.parametrize("text", [b"", b"short", TEXT])
def test_the_checksum_counts(text: bytes) -> None:
    frame = compressed(text)
    for bit in range(32):
        flipped = bytearray(frame)
        flipped[-1 - bit // 8] ^= 1 << bit % 8
        refused(declared(bytes(flipped), len(text), text), bytes(flipped))


@pytest.mark.parametrize("text", [b"", b"short", TEXT])
@pytest.mark.parametrize(
    "more",
    [b"\x00", b"junk", compressed(b""), compressed(b"more"), compressed(TEXT), b"\x50\x2a\x4d\x18\x02\x00\x00\x00ab"],
    ids=["zero", "junk", "empty frame", "frame", "long frame", "skippable frame"],
)
def test_anything_after_the_frame_is_refused(text: bytes, more: bytes) -> None:
    frame = compressed(text) + more
    refused(declared(frame, len(text), text), frame)


def test_two_joined_frames_are_refused_under_either_size() -> None:
    frame = compressed(b"first half, ") + compressed(b"second half")
    refused(declared(frame, 12, b"first half, "), frame)
    refused(declared(frame, 23, b"first half, second half"), frame)


@pytest.mark.parametrize("text", [b"", b"short", TEXT])
def test_a_truncated_frame_is_refused_at_every_length(text: bytes) -> None:
    frame = compressed(text)
    for length in range(len(frame)):
        cut = frame[:length]
        with pytest.raises(ContainerError):
            container.decode_section(declared(cut, len(text), text), cut)


@pytest.mark.parametrize("text", [b"", b"short", TEXT])
def test_a_frame_without_its_size_is_refused(text: bytes) -> None:
    frame = compressed(text, sized=False)
    refused(declared(frame, len(text), text), frame)


@pytest.mark.parametrize("difference", [-1, 1, 1000, 2**40])
def test_a_size_other_than_the_frames_is_refused(difference: int) -> None:
    frame = compressed(TEXT)
    refused(declared(frame, len(TEXT) + difference, TEXT), frame)


def test_a_bomb_that_declares_its_size_is_refused_before_it_is_decoded() -> None:
    frame = compressed(bytes(64 * MIB))
    assert len(frame) < 10_000
    refused(declared(frame, 1000), frame)
    refused(declared(frame, 0), frame)


@pytest.mark.parametrize("size", [2**32, 2**40, 2**53, 2**62, 2**63, 2**64 - 3])
def test_a_header_that_declares_a_huge_size_takes_no_memory(size: int) -> None:
    frame = frame_declaring(size, block(RAW, 5, b"hello"))
    refused(declared(frame, 5, b"hello"), frame)
    refused(declared(frame, 0), frame)


def test_a_frame_that_holds_less_than_both_sizes_say_is_refused_within_the_text_limit() -> None:
    frame = frame_declaring(limits.MAX_DOCUMENT_BYTES, block(RAW, 5, b"hello"))
    refused(declared(frame, limits.MAX_DOCUMENT_BYTES, b"hello"), frame, cap=limits.MAX_DOCUMENT_BYTES + MIB)


@pytest.mark.parametrize("size", [0, 1, 4, 100])
def test_a_frame_that_holds_more_than_both_sizes_say_is_refused(size: int) -> None:
    blocks = block(RLE, 131_000, b"x", last=False) * 2000 + block(RAW, 0, b"")
    frame = frame_declaring(size, blocks)
    refused(declared(frame, size, b"x" * size), frame)


def test_a_bomb_that_declares_nothing_is_refused() -> None:
    """Without the single-segment flag a window goes with the size, so that blocks of 128 KiB are allowed."""
    head = zstandard.FRAME_HEADER + b"\xc0" + b"\x70" + struct.pack("<Q", 0)
    frame = head + block(RLE, 131_072, b"x", last=False) * 20_000 + block(RAW, 0, b"")
    assert zstandard.frame_content_size(frame) == 0
    refused(declared(frame, 0), frame)


@pytest.mark.parametrize("length", [0, 4])
def test_a_skippable_frame_is_no_content(length: int) -> None:
    frame = b"\x50\x2a\x4d\x18" + struct.pack("<I", length) + b"abcd"[:length]
    refused(declared(frame, 0), frame)
    refused(declared(frame, 4, b"abcd"), frame)


def test_content_other_than_declared_is_refused() -> None:
    frame = compressed(TEXT)
    error = refused(declared(frame, len(TEXT), TEXT[::-1]), frame)
    assert isinstance(error, IntegrityError)
    assert error.fields["actual"] == blake3(TEXT).hexdigest()


@steady
@given(st.binary(max_size=80), st.integers(0, 80))
def test_arbitrary_bytes_are_refused(data: bytes, length: int) -> None:
    for frame in (data, zstandard.FRAME_HEADER + data):
        with pytest.raises(ContainerError):
            container.decode_section(declared(frame, length, b"what these bytes are not"), frame)


@pytest.mark.parametrize("data", [b"", b"stored as it is", TEXT, b"\x28\xb5\x2f\xfd no frame"])
def test_a_raw_section_is_returned_as_it_is(data: bytes) -> None:
    section = Section("prompt.system", "U8", (len(data),), "raw", len(data), blake3(b"").digest(), None)
    for stored in (data, memoryview(data)):
        assert container.decode_section(section, stored) is stored
