"""Data as one zstd frame, and back within a size that is known beforehand."""

from __future__ import annotations

import zstandard

from kvferry.core.errors import ContainerError

_MAX_EMPTY_FRAME = 25  # RFC 8878: 4 magic, at most 14 of header, 3 of the one empty block, 4 of checksum


def compress(data: bytes, level: int) -> bytes:
    """Return ``data`` as one frame with its size declared and its checksum on."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(data)


def longest(length: int) -> int:
    """Return the most bytes that a frame of ``length`` bytes need take: what cannot be compressed is stored."""
    return length + length // 256 + 1024


def decompress(frame: bytes, length: int, what: str, field: str) -> bytes:
    """Return the content of exactly one frame.

    Args:
        frame: stored bytes.
        length: bytes that it must hold.
        what: begins the message of an error.
        field: what an error is about.

    Raises:
        ContainerError: when that is no such frame, declares another length, or does not hold what it declares.
    """
    try:
        declared = zstandard.frame_content_size(frame)
        # The one-shot decoder allocates what the frame declares, so the declaration is compared first.
        if declared != length:
            raise ContainerError(
                f"{what}: the zstd frame declares {declared} bytes, {length} are announced", field=field
            )
        if length == 0 and not _is_empty(frame):
            raise ContainerError(f"{what}: not exactly one empty zstd frame", field=field)
        return zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=length, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ContainerError(f"{what}: {error}", field=field) from error


def _is_empty(frame: bytes) -> bool:
    # The one-shot decoder takes a frame that declares nothing for empty and looks no further.
    decoder = zstandard.ZstdDecompressor().decompressobj()
    whole = len(frame) <= _MAX_EMPTY_FRAME and frame.startswith(zstandard.FRAME_HEADER)
    return whole and not decoder.decompress(frame) and decoder.eof and not decoder.unused_data
