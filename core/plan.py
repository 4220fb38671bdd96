"""What a manifest says of its payload, checked to the last digest before a payload byte is there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvferry.core import container, layout, limits, probe, spans
from kvferry.core.digests import DIGEST_BYTES, digest
from kvferry.core.errors import ContainerError, IntegrityError, ManifestError, TooLargeError
from kvferry.core.manifest import DTYPE_BYTES, Form, Manifest, Payload, Section


@dataclass(frozen=True)
class Plan:
    """How a payload is cut into chunks.

    Attributes:
        ranges: the half-open byte range of every chunk, in order.
        section_chunks: for every section, the half-open range of its chunk indices.
        digests: the chunks' digests, joined.
    """

    ranges: tuple[tuple[int, int], ...]
    section_chunks: dict[str, tuple[int, int]]
    digests: bytes

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.ranges)

    def range(self, index: int) -> tuple[int, int]:
        """Return the half-open byte range of one chunk.

        Raises:
            ContainerError: when there is no such chunk.
        """
        if not 0 <= index < self.count:
            raise ContainerError(
                f"chunk {index}: the payload has {self.count} chunks", field="index", value=index, limit=self.count
            )
        return self.ranges[index]

    def check(self, index: int, data: bytes | memoryview) -> None:
        """Verify one chunk on its own.

        Raises:
            ContainerError: when there is no such chunk or its length is wrong.
            IntegrityError: when its digest differs.
        """
        start, end = self.range(index)
        if len(data) != end - start:
            raise ContainerError(
                f"chunk {index}: {len(data)} bytes, expected {end - start}",
                field="data",
                chunk=index,
                value=len(data),
                expected=end - start,
            )
        expected = self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        actual = digest(data)
        if actual != expected:
            raise IntegrityError(
                f"chunk {index}: digest {actual.hex()[:16]}…, expected {expected.hex()[:16]}…",
                field="data",
                chunk=index,
                actual=actual.hex(),
                expected=expected.hex(),
            )


def make_plan(manifest: Manifest) -> Plan:
    """Return the plan of a manifest that agrees with itself: sections, sizes, chunks, digests, form and probe.

    Raises:
        ManifestError: naming what contradicts what.
        TooLargeError: when a text is over its limit.
    """
    _check_section_sizes(manifest.sections)
    head = container.header(manifest.sections)
    _check_length(manifest, len(head))
    plan = _cut(manifest.sections, manifest.payload, len(head))
    if len(plan.digests) != plan.count * DIGEST_BYTES:
        raise ManifestError(
            f"payload.chunks: {len(plan.digests)} bytes, but {plan.count} chunks take {plan.count * DIGEST_BYTES}",
            field="payload.chunks",
        )
    _check_digests(manifest, plan, head)
    _check_form(manifest)
    return plan


def _check_length(manifest: Manifest, header_bytes: int) -> None:
    total = header_bytes + sum(section.length for section in manifest.sections)
    if total != manifest.payload.length:
        raise ManifestError(
            f"payload.length: {manifest.payload.length}, but header and sections take {total}",
            field="payload.length",
            value=manifest.payload.length,
            expected=total,
        )
    # Bounds the table of ranges that is about to be made.
    if total > len(manifest.payload.chunks) // DIGEST_BYTES * manifest.payload.chunk_size:
        raise ManifestError(
            f"payload.chunks: {len(manifest.payload.chunks)} bytes of digests are too few for {total} bytes of payload",
            field="payload.chunks",
        )


def _cut(sections: tuple[Section, ...], payload: Payload, header_bytes: int) -> Plan:
    ranges: list[tuple[int, int]] = []
    section_chunks: dict[str, tuple[int, int]] = {}
    start = 0
    for name, length in (("", header_bytes), *((section.name, section.length) for section in sections)):
        first = len(ranges)
        end = start + length
        ranges.extend((at, min(at + payload.chunk_size, end)) for at in range(start, end, payload.chunk_size))
        section_chunks[name] = (first, len(ranges))
        start = end
    return Plan(tuple(ranges), section_chunks, payload.chunks)


def _check_digests(manifest: Manifest, plan: Plan, head: bytes) -> None:
    """Check the digests that follow from others: the header's chunks, each section, the whole."""
    header_end = plan.section_chunks[""][1]
    expected = container.chunk_digests(head, manifest.payload.chunk_size)
    if plan.digests[: header_end * DIGEST_BYTES] != expected:
        raise ManifestError("payload.chunks: not those of the header that the sections imply", field="payload.chunks")
    for section in manifest.sections:
        first, end = plan.section_chunks[section.name]
        joined = digest(plan.digests[first * DIGEST_BYTES : end * DIGEST_BYTES])
        if joined != section.digest:
            raise _contradiction(f"sections.{section.name}.digest", section.digest, joined)
    whole = digest(plan.digests)
    if whole != manifest.payload.digest:
        raise _contradiction("payload.digest", manifest.payload.digest, whole)


def _contradiction(field: str, stated: bytes, implied: bytes) -> ManifestError:
    return ManifestError(
        f"{field}: {stated.hex()[:16]}…, but the chunk digests imply {implied.hex()[:16]}…",
        field=field,
        value=stated.hex(),
        expected=implied.hex(),
    )


def _check_form(manifest: Manifest) -> None:
    if manifest.form != "kv":
        _check_message_sections(manifest)
        return
    expected = tuple(layout.sections(manifest))
    actual = tuple(layout.Expected(section.name, section.dtype, section.shape) for section in manifest.sections)
    if actual != expected:
        _raise_first_difference(actual, expected)
    if manifest.parity is not None:
        probe.check(manifest.parity)


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


def _raise_first_difference(actual: tuple[object, ...], expected: tuple[object, ...]) -> None:
    for index in range(max(len(actual), len(expected))):
        got = actual[index] if index < len(actual) else None
        want = expected[index] if index < len(expected) else None
        if got != want:
            raise ManifestError(
                f"sections[{index}]: {_shown(got)}, but the layout asks for {_shown(want)}",
                field=f"sections[{index}]",
                value=_shown(got),
                expected=_shown(want),
            )


def _shown(section: object) -> str:
    return str(tuple(section)) if isinstance(section, tuple) else str(section)


def _check_message_sections(manifest: Manifest) -> None:
    names = [section.name for section in manifest.sections]
    allowed = _message_sections(manifest.form)
    if names not in allowed:
        listed = "; ".join(", ".join(one) for one in allowed)
        raise ManifestError(
            f"sections: {', '.join(names)}, but {manifest.form} is one of: {listed}", field="sections", value=str(names)
        )
    for section in manifest.sections:
        if section.name == container.SPANS:
            _check_spans_section(section)
            continue
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


def _message_sections(form: Form) -> list[list[str]]:
    """Return what the sections of an artifact without a cache may be."""
    if form == "evidence":
        return [[container.SYSTEM, container.EVIDENCE]]
    if form == "references":
        return [[container.SYSTEM, container.REFERENCES]]
    shortened = ([container.SYSTEM, kind, container.SPANS] for kind in container.SHORTENED)
    return [[container.SYSTEM], [container.SYSTEM, container.TEXT], *shortened]


def _check_spans_section(section: Section) -> None:
    if section.dtype != "U32" or section.shape[1:] != (spans.WIDTH,):
        raise ManifestError(
            f"sections.{section.name}: {section.dtype} {list(section.shape)}, spans are U32 [n, {spans.WIDTH}]",
            field=f"sections.{section.name}.shape",
            value=str(section.shape),
        )
    if section.shape[0] > limits.MAX_TEXT_SPANS:
        raise TooLargeError(
            f"sections.{section.name}: {section.shape[0]} spans, the limit is {limits.MAX_TEXT_SPANS}",
            value=section.shape[0],
            limit=limits.MAX_TEXT_SPANS,
        )
