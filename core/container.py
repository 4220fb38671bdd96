"""The payload container: sections in one safetensors file whose header is a function of the manifest.

Layout: u64 little-endian header length, JSON header padded with spaces to a multiple of 8, then every section's bytes
in manifest order without holes. Because the header follows from the manifest alone, a receiver never parses it. Any
safetensors reader opens the stored file.

Chunks never cross a section's edge. A section's digest is the digest of its chunk digests, the payload's that of all
chunk digests: every byte is hashed once, and everything but the chunks' own bytes can be checked beforehand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kvferry.core import zstd_frames
from kvferry.core.digests import DIGEST_BYTES, digest
from kvferry.core.errors import ContainerError, IntegrityError
from kvferry.core.manifest import DTYPE_BYTES, Decoded, Dtype, Payload, Section

IDS = "prefix.ids"
SYSTEM = "prompt.system"
TEXT = "document.text"
ENDS = "document.ends"
EXCERPTS = "document.excerpts"
SUMMARY = "document.summary"
COMPRESSED = "document.compressed"
SPANS = "document.spans"
EVIDENCE = "document.evidence"
REFERENCES = "document.references"
SHORTENED = (ENDS, EXCERPTS, SUMMARY, COMPRESSED)
"""What may stand in the place of the document's text; ``SPANS`` says then which passages are the document's."""
_HEADER_ALIGNMENT = 8


def positions_name(layer: int) -> str:
    """Name of the section that holds layer ``layer``'s int32 positions, shape [Hk, rows]."""
    return f"layers.{layer}.positions"


def keys_name(layer: int) -> str:
    """Name of the section that holds layer ``layer``'s keys, shape [Hk, rows, Dk]."""
    return f"layers.{layer}.keys"


def values_name(layer: int) -> str:
    """Name of the section that holds layer ``layer``'s values, shape [Hk, rows, Dv]."""
    return f"layers.{layer}.values"


class Described(Protocol):
    """What the payload's header says of a section."""

    @property
    def name(self) -> str:
        """The section's name."""

    @property
    def dtype(self) -> Dtype:
        """The stored dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""

    @property
    def length(self) -> int:
        """Stored bytes."""


@dataclass(frozen=True)
class Content:
    """A section to store: its description and its bytes. Digests are made when it is written."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes | memoryview
    encoding: Literal["raw", "zstd"] = "raw"
    decoded: Decoded | None = None

    @property
    def length(self) -> int:
        """Stored bytes."""
        return len(self.data)


def raw_section(name: str, dtype: Dtype, shape: tuple[int, ...], data: bytes | memoryview) -> Content:
    """Describe an uncompressed tensor. ``data`` is C-contiguous and little-endian.

    Raises:
        ContainerError: when the number of bytes does not follow from dtype and shape.
    """
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if len(data) != expected:
        raise ContainerError(f"{name}: {dtype} {list(shape)} takes {expected} bytes, got {len(data)}", field=name)
    return Content(name, dtype, shape, data)


def zstd_section(name: str, data: bytes, level: int) -> Content:
    """Describe ``data`` compressed as one zstd frame with its size declared and its checksum on."""
    packed = zstd_frames.compress(data, level)
    return Content(name, "U8", (len(packed),), packed, "zstd", Decoded(len(data), digest(data)))


def header(sections: Iterable[Described]) -> bytes:
    """Return the safetensors header (length word included) that these sections must carry."""
    entries: dict[str, object] = {}
    start = 0
    for section in sections:
        end = start + section.length
        entries[section.name] = {
            "dtype": section.dtype,
            "shape": list(section.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_payload(
    contents: Iterable[Content], write: Callable[[bytes | memoryview], object], chunk_size: int
) -> tuple[tuple[Section, ...], Payload]:
    """Write a payload and make its digests, reading every byte once.

    Args:
        contents: sections in order.
        write: takes each piece, for instance a file's ``write``.
        chunk_size: most bytes a chunk.

    Returns:
        What the manifest says of the sections and of the whole.
    """
    listed = tuple(contents)
    first = header(listed)
    write(first)
    joined = bytearray(chunk_digests(first, chunk_size))
    length = len(first)
    sections = []
    for content in listed:
        write(content.data)
        digests = chunk_digests(content.data, chunk_size)
        joined += digests
        length += content.length
        sections.append(
            Section(
                content.name,
                content.dtype,
                content.shape,
                content.encoding,
                content.length,
                digest(digests),
                content.decoded,
            )
        )
    return tuple(sections), Payload(length, digest(joined), chunk_size, bytes(joined))


def outline(contents: Iterable[Content], chunk_size: int) -> tuple[tuple[Section, ...], Payload]:
    """Return what ``write_payload`` would, with zeros for digests: every size is right before a byte is hashed."""
    listed = tuple(contents)
    lengths = [len(header(listed)), *(content.length for content in listed)]
    chunks = sum(-(-length // chunk_size) for length in lengths)
    sections = tuple(
        Section(item.name, item.dtype, item.shape, item.encoding, item.length, bytes(DIGEST_BYTES), item.decoded)
        for item in listed
    )
    return sections, Payload(sum(lengths), bytes(DIGEST_BYTES), chunk_size, bytes(chunks * DIGEST_BYTES))


def chunk_digests(data: bytes | memoryview, chunk_size: int) -> bytes:
    """Return the digests of the chunks that ``data`` is cut into, joined."""
    view = memoryview(data)
    return b"".join(digest(view[start : start + chunk_size]) for start in range(0, len(view), chunk_size))


def decode_section(section: Section, stored: bytes | memoryview) -> bytes | memoryview:
    """Return a section's content from its verified stored bytes, decompressed within the declared size.

    Raises:
        IntegrityError: when the content is not the one that was declared.
        ContainerError: when the zstd frame is not exactly the one that was declared.
    """
    if section.decoded is None:
        return stored
    content = zstd_frames.decompress(bytes(stored), section.decoded.length, f"section {section.name}", section.name)
    actual = digest(content)
    if actual != section.decoded.digest:
        raise IntegrityError(
            f"section {section.name}: content digest {actual.hex()[:16]}…, "
            f"expected {section.decoded.digest.hex()[:16]}…",
            field=section.name,
            actual=actual.hex(),
            expected=section.decoded.digest.hex(),
        )
    return content


def ids_to_bytes(ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    return np.fromiter(ids, dtype="<u4").tobytes()


def ids_from_bytes(data: bytes | memoryview) -> list[int]:
    """Return token ids from little-endian uint32."""
    return [int(item) for item in np.frombuffer(data, dtype="<u4")]
