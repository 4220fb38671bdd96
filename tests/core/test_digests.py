from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core import digests
from kvferry.core.errors import InvalidRequestError

# The published BLAKE3 test vectors: their input is the bytes 0, 1, …, 250, again and again.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
}


def vector_input(length: int) -> bytes:
    return bytes(index % 251 for index in range(length))


@pytest.mark.parametrize(("length", "expected"), VECTORS.items())
def test_published_vectors(tmp_path: Path, length: int, expected: str) -> None:
    data = vector_input(length)
    path = tmp_path / "file"
    path.write_bytes(data)
    hasher = digests.Hasher()
    hasher.update(data)
    assert digests.digest(data).hex() == expected
    assert digests.digest(memoryview(data)).hex() == expected
    assert digests.digest(bytearray(data)).hex() == expected
    assert hasher.digest().hex() == expected
    assert digests.file_digest(path).hex() == expected


def test_a_file_larger_than_one_block_of_any_reader(tmp_path: Path) -> None:
    data = vector_input(300_000)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert digests.file_digest(path) == digests.digest(data)


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=100), max_size=8))
def test_a_running_digest_does_not_depend_on_the_cuts(pieces: list[bytes]) -> None:
    hasher = digests.Hasher()
    for piece in pieces:
        hasher.update(memoryview(piece))
        hasher.digest()  # looking does not change it
    assert hasher.digest() == digests.digest(b"".join(pieces))


def test_digests_have_the_size_that_the_schema_asks_for() -> None:
    assert len(digests.digest(b"")) == digests.DIGEST_BYTES == 32


def test_hexadecimal_is_parsed_in_either_case() -> None:
    raw = digests.digest(b"x")
    assert digests.from_hex(raw.hex(), "artifact") == raw
    assert digests.from_hex(raw.hex().upper(), "artifact") == raw


@pytest.mark.parametrize(
    "text", ["", "ab", "a" * 63, "a" * 65, "a" * 66, "g" * 64, "0x" + "a" * 62, "é" * 64, "../" * 22]
)
def test_anything_else_is_refused_with_the_field_named(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^artifact: expected 64 hexadecimal digits") as caught:
        digests.from_hex(text, "artifact")
    assert caught.value.fields == {"field": "artifact", "value": text}
