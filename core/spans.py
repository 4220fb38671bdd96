"""Which passages of a text that was sent stand in the document, and where.

A shortened text is made of passages of the document and of what its method wrote itself: a summary, or a mark where
something was left out. Every passage has a span; what no span covers is generated. Positions are code points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.core.errors import ContainerError

WIDTH = 3
"""Numbers a span; the section's shape is [n, 3], U32."""


class Span(NamedTuple):
    """``text[at : at + end - start] == document[start:end]``."""

    at: int
    start: int
    end: int


def to_bytes(spans: Sequence[Span]) -> bytes:
    """Return spans as little-endian uint32."""
    return np.array(spans, dtype="<u4").tobytes()


def from_bytes(name: str, data: bytes | memoryview, text: int, document: int) -> tuple[Span, ...]:
    """Return the spans of a text.

    Args:
        name: of the section.
        data: its bytes, as many as the manifest's shape asks for.
        text: code points of the text.
        document: code points of the document.

    Raises:
        ContainerError: when a span is empty, out of bounds, or not behind the one before it in the text.
    """
    spans = tuple(Span(*row) for row in np.frombuffer(data, dtype="<u4").reshape(-1, WIDTH).tolist())
    free = 0
    for span in spans:
        until = span.at + span.end - span.start
        if not (free <= span.at < until <= text and span.end <= document):
            raise ContainerError(
                f"section {name}: {tuple(span)} does not fit {free}..{text} of the text "
                f"and 0..{document} of the document",
                field=name,
            )
        free = until
    return spans
