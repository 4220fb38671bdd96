"""Which sections a text artifact may hold: the document, or something shorter with its spans."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.core import container
from kvferry.core.container import Content, raw_section, write_payload, zstd_section
from kvferry.core.errors import ManifestError, TooLargeError
from kvferry.core.manifest import Manifest
from kvferry.core.plan import make_plan

SYSTEM = raw_section(container.SYSTEM, "U8", (1,), b"S")
SPANS = raw_section(container.SPANS, "U32", (1, 3), struct.pack("<III", 0, 3, 5))
NO_SPANS = raw_section(container.SPANS, "U32", (0, 3), b"")


def text(name: str) -> Content:
    return raw_section(name, "U8", (2,), b"hi")


@pytest.fixture
def manifest(text_example: Callable[..., Any]) -> Callable[..., Manifest]:
    """Return a factory: a manifest of a text artifact with these sections."""

    def build(*contents: Content) -> Manifest:
        example = text_example()
        sections, payload = write_payload(contents, lambda _: None, 1024)
        return msgspec.structs.replace(example.manifest, sections=sections, payload=payload)

    return build


@pytest.mark.parametrize("kind", ["document.ends", "document.excerpts", "document.summary"])
@pytest.mark.parametrize("spans", [SPANS, NO_SPANS], ids=["one", "none"])
def test_a_shortened_text_comes_with_its_spans(manifest: Callable[..., Manifest], kind: str, spans: Content) -> None:
    plan = make_plan(manifest(SYSTEM, text(kind), spans))
    assert list(plan.section_chunks) == ["", container.SYSTEM, kind, container.SPANS]


@pytest.mark.parametrize(
    "contents",
    [
        (SYSTEM, text("document.ends")),
        (SYSTEM, text("document.text"), SPANS),
        (SYSTEM, SPANS),
        (SYSTEM, SPANS, text("document.ends")),
        (SYSTEM, text("document.text"), text("document.summary"), SPANS),
        (SYSTEM, text("document.summary"), SPANS, text("document.more")),
        (SYSTEM, text("document.other"), SPANS),
        (text("document.summary"), SPANS),
    ],
    ids=lambda contents: "+".join(content.name.split(".")[1] for content in contents),
)
def test_anything_else_is_refused(manifest: Callable[..., Manifest], contents: tuple[Content, ...]) -> None:
    with pytest.raises(ManifestError, match="^sections: "):
        make_plan(manifest(*contents))


@pytest.mark.parametrize(
    "spans",
    [
        raw_section(container.SPANS, "U8", (12,), bytes(12)),
        raw_section(container.SPANS, "I32", (1, 3), bytes(12)),
        raw_section(container.SPANS, "U32", (3,), bytes(12)),
        raw_section(container.SPANS, "U32", (3, 1), bytes(12)),
        raw_section(container.SPANS, "U32", (1, 1, 3), bytes(12)),
        raw_section(container.SPANS, "U32", (), bytes(4)),
        zstd_section(container.SPANS, bytes(12), 3),
    ],
    ids=lambda content: f"{content.dtype} {content.shape}",
)
def test_spans_are_three_words_each(manifest: Callable[..., Manifest], spans: Content) -> None:
    with pytest.raises(ManifestError, match=r"^sections\.document\.spans: .*spans are U32 \[n, 3\]"):
        make_plan(manifest(SYSTEM, text("document.ends"), spans))


def test_a_shortened_text_is_bytes_too(manifest: Callable[..., Manifest]) -> None:
    words = raw_section(container.SUMMARY, "U32", (1,), b"hihi")
    with pytest.raises(ManifestError, match=r"^sections\.document\.summary\.dtype: U32, text is U8"):
        make_plan(manifest(SYSTEM, words, NO_SPANS))


def test_more_spans_than_a_text_can_have_are_refused(text_example: Callable[..., Any]) -> None:
    count = 2**20 + 1
    spans = Content(container.SPANS, "U32", (count, 3), memoryview(bytes(12 * count)))
    sections, payload = write_payload((SYSTEM, text(container.ENDS), spans), lambda _: None, 2**20)
    broken = msgspec.structs.replace(text_example().manifest, sections=sections, payload=payload)
    with pytest.raises(TooLargeError, match="1048577 spans, the limit is 1048576"):
        make_plan(broken)
