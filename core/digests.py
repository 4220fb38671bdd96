"""BLAKE3 digests, always 32 raw bytes inside and lower-case hexadecimal for people."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from kvferry.core.errors import InvalidRequestError

DIGEST_BYTES = 32


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the 32-byte BLAKE3 digest of ``data``."""
    return blake3(data).digest()


def file_digest(path: Path) -> bytes:
    """Return the digest of a file's contents, read through a memory map on all cores."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.digest()


class Hasher:
    """A running BLAKE3 digest, for content that never stands in memory as a whole."""

    def __init__(self) -> None:
        self._state = blake3()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``."""
        self._state.update(data)

    def digest(self) -> bytes:
        """Return the digest of everything so far."""
        return self._state.digest()


def from_hex(text: str, field: str) -> bytes:
    """Parse a digest that a person typed.

    Raises:
        InvalidRequestError: when ``text`` is not 64 hexadecimal digits.
    """
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != DIGEST_BYTES:
        raise InvalidRequestError(
            f"{field}: expected {2 * DIGEST_BYTES} hexadecimal digits, got {text!r}", field=field, value=text
        )
    return raw
