"""Spans of a shortened text: their bytes, and everything that a stranger may have put there."""

from __future__ import annotations

import struct

import pytest

from kvferry.core.errors import ContainerError
from kvferry.core.spans import Span, from_bytes, to_bytes

SPANS = (Span(0, 5, 9), Span(4, 9, 10), Span(7, 2, 5))


def packed(*rows: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("<III", *row) for row in rows)


def test_bytes_are_little_endian_words_row_by_row() -> None:
    assert to_bytes(SPANS) == packed((0, 5, 9), (4, 9, 10), (7, 2, 5))
    assert to_bytes(()) == b""
    assert from_bytes("s", packed((0, 0, 2**32 - 1)), 2**32, 2**32) == (Span(0, 0, 2**32 - 1),)


def test_they_come_back() -> None:
    assert from_bytes("s", to_bytes(SPANS), 10, 10) == SPANS
    assert from_bytes("s", b"", 0, 0) == ()


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (((0, 5, 5),), "(0, 5, 5)"),
        (((0, 6, 5),), "(0, 6, 5)"),
        (((0, 5, 11),), "(0, 5, 11)"),
        (((8, 0, 3),), "(8, 0, 3)"),
        (((0, 0, 4), (3, 4, 5)), "(3, 4, 5)"),
        (((5, 0, 1), (0, 1, 2)), "(0, 1, 2)"),
        (((0, 2**32 - 1, 1),), "(0, 4294967295, 1)"),
    ],
)
def test_what_does_not_fit_is_refused(rows: tuple[tuple[int, int, int], ...], wrong: str) -> None:
    with pytest.raises(ContainerError) as caught:
        from_bytes("document.spans", packed(*rows), text=10, document=10)
    assert caught.value.message.startswith(f"section document.spans: {wrong} does not fit ")
    assert caught.value.fields["field"] == "document.spans"
