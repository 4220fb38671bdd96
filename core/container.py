"""The payload container: sections in one safetensors file whose header is a function of the manifest.

Layout: u64 little-endian header length, JSON header padded with spaces to a multiple of 8, then every section's bytes
in manifest order without holes. Because the header follows from the manifest alone, a receiver never parses it: it
compares bytes. Any safetensors reader opens the stored file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from kvferry.core import limits
from kvferry.core.digests import DIGEST_BYTES, Hasher, digest
from kvferry.core.errors import ContainerError, IntegrityError, ManifestError, TooLargeError
from kvferry.core.manifest import DTYPE_BYTES, Decoded, Dtype, LayerLayout, Manifest, Payload, Section

IDS = "prefix.ids"
SYSTEM = "prompt.system"
TEXT = "document.text"
_HEADER_ALIGNMENT = 8
_MAX_EMPTY_FRAME = 25  # RFC 8878: 4 magic, at most 14 of header, 3 of the one empty block, 4 of checksum


def positions_name(layer: int) -> str:
    """Name of the section that holds layer ``layer``'s int32 positions, shape [Hk, rows]."""
    return f"layers.{layer}.positions"


def keys_name(layer: int) -> str:
    """Name of the section that holds layer ``layer``'s keys, shape [Hk, rows, Dk]."""
    return f"layers.{layer}.keys"


def values_name(layer: int) -> str:
    """Name of the section that holds layer ``layer``'s values, shape [Hk, rows, Dv]."""
    return f"layers.{layer}.values"


@dataclass(frozen=True)
class Content:
    """A section's description with the bytes to store."""

    section: Section
    data: bytes | memoryview


def raw_section(name: str, dtype: Dtype, shape: tuple[int, ...], data: bytes | memoryview) -> Content:
    """Describe an uncompressed tensor. ``data`` is C-contiguous and little-endian.

    Raises:
        ContainerError: when the number of bytes does not follow from dtype and shape.
    """
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if len(data) != expected:
        raise ContainerError(f"{name}: {dtype} {list(shape)} takes {expected} bytes, got {len(data)}", field=name)
    return Content(Section(name, dtype, shape, "raw", len(data), digest(data), None), data)


def zstd_section(name: str, data: bytes, level: int) -> Content:
    """Describe ``data`` compressed as one zstd frame with its size declared and its checksum on."""
    packed = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(data)
    decoded = Decoded(len(data), digest(data))
    return Content(Section(name, "U8", (len(packed),), "zstd", len(packed), digest(packed), decoded), packed)


def header(sections: Iterable[Section]) -> bytes:
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


def check_header(sections: Iterable[Section], data: bytes | memoryview) -> None:
    """Check that a payload begins with the header that its sections imply.

    Raises:
        IntegrityError: when it does not.
    """
    expected = header(sections)
    if data[: len(expected)] != expected:
        raise IntegrityError("payload: the safetensors header is not the one that the manifest implies", field="header")


def section_offsets(sections: Iterable[Section]) -> dict[str, tuple[int, int]]:
    """Return the half-open byte range of every section within the payload."""
    listed = tuple(sections)
    start = len(header(listed))
    ranges: dict[str, tuple[int, int]] = {}
    for section in listed:
        ranges[section.name] = (start, start + section.length)
        start += section.length
    return ranges


def pieces(contents: Iterable[Content]) -> Iterator[bytes | memoryview]:
    """Yield the payload's bytes in order: the header, then each section."""
    listed = tuple(contents)
    yield header(content.section for content in listed)
    for content in listed:
        yield content.data


def write_payload(
    contents: Iterable[Content], write: Callable[[bytes | memoryview], object], chunk_size: int
) -> Payload:
    """Write a payload in one pass and return its digests.

    Args:
        contents: sections in order; the bytes are read once.
        write: takes each piece, for instance a file's ``write``.
        chunk_size: bytes a chunk.
    """
    whole, chunk = Hasher(), Hasher()
    digests = bytearray()
    total = filled = 0
    for piece in pieces(contents):
        write(piece)
        whole.update(piece)
        view = memoryview(piece)
        total += len(view)
        while view:
            part, view = view[: chunk_size - filled], view[chunk_size - filled :]
            chunk.update(part)
            filled += len(part)
            if filled == chunk_size:
                digests += chunk.digest()
                chunk, filled = Hasher(), 0
    if filled:
        digests += chunk.digest()
    return Payload(total, whole.digest(), chunk_size, bytes(digests))


def chunk_count(payload: Payload) -> int:
    """Return how many chunks the payload travels in."""
    return -(-payload.length // payload.chunk_size)


def chunk_range(payload: Payload, index: int) -> tuple[int, int]:
    """Return the half-open byte range of chunk ``index``.

    Raises:
        ContainerError: when there is no such chunk.
    """
    count = chunk_count(payload)
    if not 0 <= index < count:
        raise ContainerError(f"chunk {index}: the payload has {count} chunks", field="index", value=index, limit=count)
    start = index * payload.chunk_size
    return start, min(start + payload.chunk_size, payload.length)


def check_chunk(payload: Payload, index: int, data: bytes | memoryview) -> None:
    """Verify one chunk on its own.

    Raises:
        ContainerError: when there is no such chunk or its length is wrong.
        IntegrityError: when its digest differs.
    """
    start, end = chunk_range(payload, index)
    if len(data) != end - start:
        raise ContainerError(
            f"chunk {index}: {len(data)} bytes, expected {end - start}",
            field="data",
            chunk=index,
            value=len(data),
            expected=end - start,
        )
    expected = payload.chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
    actual = digest(data)
    if actual != expected:
        raise IntegrityError(
            f"chunk {index}: digest {actual.hex()[:16]}…, expected {expected.hex()[:16]}…",
            field="data",
            chunk=index,
            actual=actual.hex(),
            expected=expected.hex(),
        )


def check_plan(manifest: Manifest) -> None:
    """Check that a manifest's sections and chunks can describe a payload, before anything is allocated.

    Raises:
        ManifestError: when sections, sizes and chunks contradict each other or the form.
    """
    _check_section_sizes(manifest.sections)
    total = len(header(manifest.sections)) + sum(section.length for section in manifest.sections)
    if total != manifest.payload.length:
        raise ManifestError(
            f"payload.length: {manifest.payload.length}, but header and sections take {total}",
            field="payload.length",
            value=manifest.payload.length,
            expected=total,
        )
    count = chunk_count(manifest.payload)
    if len(manifest.payload.chunks) != count * DIGEST_BYTES:
        raise ManifestError(
            f"payload.chunks: {len(manifest.payload.chunks)} bytes, but {count} chunks take {count * DIGEST_BYTES}",
            field="payload.chunks",
        )
    expected = tuple(_expected_sections(manifest))
    actual = tuple((section.name, section.dtype, section.shape) for section in manifest.sections)
    if manifest.form == "kv" and actual != expected:
        _raise_first_difference(actual, expected)
    if manifest.form != "kv":
        _check_text_sections(manifest)


def _check_section_sizes(sections: tuple[Section, ...]) -> None:
    seen: set[str] = set()
    for section in sections:
        if section.name in seen:
            raise ManifestError(f"sections: {section.name!r} appears twice", field="sections", value=section.name)
        seen.add(section.name)
        size = math.prod(section.shape) * DTYPE_BYTES[section.dtype]
        if size != section.length:
            raise ManifestError(
                f"sections.{section.name}.length: {section.length}, "
                f"but {section.dtype} {list(section.shape)} takes {size}",
                field=f"sections.{section.name}.length",
                value=section.length,
                expected=size,
            )
        if (section.encoding == "zstd") != (section.decoded is not None):
            raise ManifestError(
                f"sections.{section.name}.decoded: must be there exactly when the encoding is zstd",
                field=f"sections.{section.name}.decoded",
            )
        if section.encoding == "zstd" and (section.dtype, len(section.shape)) != ("U8", 1):
            raise ManifestError(
                f"sections.{section.name}.dtype: {section.dtype} {list(section.shape)}, a zstd section is U8 [length]",
                field=f"sections.{section.name}.dtype",
            )


def _expected_sections(manifest: Manifest) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    if manifest.prefix is not None:
        yield IDS, "U32", (manifest.prefix.tokens,)
    for index, layer in enumerate(manifest.layout or ()):
        yield from _layer_sections(index, layer)


def _layer_sections(index: int, layer: LayerLayout) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    if layer.positions == "explicit":
        yield positions_name(index), "I32", (layer.kv_heads, layer.rows)
    yield keys_name(index), layer.dtype, (layer.kv_heads, layer.rows, layer.key_dim)
    yield values_name(index), layer.dtype, (layer.kv_heads, layer.rows, layer.value_dim)


def _raise_first_difference(actual: tuple[object, ...], expected: tuple[object, ...]) -> None:
    for index in range(max(len(actual), len(expected))):
        got = actual[index] if index < len(actual) else None
        want = expected[index] if index < len(expected) else None
        if got != want:
            raise ManifestError(
                f"sections[{index}]: {got}, but the layout asks for {want}",
                field=f"sections[{index}]",
                value=str(got),
                expected=str(want),
            )


def _check_text_sections(manifest: Manifest) -> None:
    names = [section.name for section in manifest.sections]
    if names not in ([SYSTEM], [SYSTEM, TEXT]):
        raise ManifestError(
            f"sections: {names}, but a text artifact holds {SYSTEM} and at most {TEXT}",
            field="sections",
            value=str(names),
        )
    for section in manifest.sections:
        if section.dtype != "U8":
            raise ManifestError(
                f"sections.{section.name}.dtype: {section.dtype}, text is U8",
                field=f"sections.{section.name}.dtype",
            )
        size = section.decoded.length if section.decoded else section.length
        if size > limits.MAX_DOCUMENT_BYTES:
            raise TooLargeError(
                f"sections.{section.name}: {size} bytes of text, the limit is {limits.MAX_DOCUMENT_BYTES}",
                value=size,
                limit=limits.MAX_DOCUMENT_BYTES,
            )


def read_section(section: Section, stored: bytes | memoryview) -> bytes | memoryview:
    """Verify a section's stored bytes and return its content, decompressed within the declared size.

    Raises:
        IntegrityError: when a digest differs.
        ContainerError: when the zstd frame is not exactly the one that was declared.
    """
    _check_digest(section.name, stored, section.digest)
    if section.decoded is None:
        return stored
    content = _decompress(section.name, stored, section.decoded.length)
    _check_digest(section.name, content, section.decoded.digest)
    return content


def _check_digest(name: str, data: bytes | memoryview, expected: bytes) -> None:
    actual = digest(data)
    if actual != expected:
        raise IntegrityError(
            f"section {name}: digest {actual.hex()[:16]}…, expected {expected.hex()[:16]}…",
            field=name,
            actual=actual.hex(),
            expected=expected.hex(),
        )


def _decompress(name: str, stored: bytes | memoryview, length: int) -> bytes:
    frame = bytes(stored)
    try:
        declared = zstandard.frame_content_size(frame)
        # The one-shot decoder allocates what the frame declares, so the declaration is compared first.
        if declared != length:
            raise ContainerError(
                f"section {name}: the zstd frame declares {declared} bytes, the manifest {length}", field=name
            )
        if length == 0:
            return _decompress_empty(name, frame)
        return zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=length, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ContainerError(f"section {name}: {error}", field=name) from error


def _decompress_empty(name: str, frame: bytes) -> bytes:
    # The one-shot decoder takes a frame that declares nothing for empty and looks no further.
    decoder = zstandard.ZstdDecompressor().decompressobj()
    whole = len(frame) <= _MAX_EMPTY_FRAME and frame.startswith(zstandard.FRAME_HEADER)
    if not whole or decoder.decompress(frame) or not decoder.eof or decoder.unused_data:
        raise ContainerError(f"section {name}: not exactly one empty zstd frame", field=name)
    return b""


def ids_to_bytes(ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    return np.fromiter(ids, dtype="<u4").tobytes()


def ids_from_bytes(data: bytes | memoryview) -> list[int]:
    """Return token ids from little-endian uint32."""
    return [int(item) for item in np.frombuffer(data, dtype="<u4")]
