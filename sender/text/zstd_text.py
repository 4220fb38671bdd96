"""A7, lossless transport codec: the whole document through Zstandard (RFC 8878)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.sender.method import TextMaterial
from kvferry.sender.reading import Reading


class ZstdParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``level``: Zstandard's compression level, 1 to 22."""

    level: Annotated[int, Meta(ge=1, le=22)] = 3


class ZstdText:
    """Sends one checksummed frame; the receiver's text equals A1's byte for byte."""

    info = MethodInfo(
        id="A7",
        name="zstd",
        form="text",
        label="official",
        aware=False,
        source="Zstandard, RFC 8878; python-zstandard",
        summary="the whole text as one zstd frame; the receiver reads it again for every question",
    )
    parameters = ZstdParameters

    def make(self, reading: Reading, parameters: ZstdParameters) -> Generator[Progress, None, TextMaterial]:
        """Return the document, to be compressed."""
        yield Progress("method", 1, 1)
        return TextMaterial(reading.text, zstd=parameters.level)
