"""Which manifests can describe a payload at all: sections, sizes and form, before a payload byte is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from kvferry.core import container, limits
from kvferry.core.errors import ManifestError, TooLargeError
from kvferry.core.manifest import Decoded, Manifest, Payload, Section
from kvferry.core.plan import make_plan

replace = msgspec.structs.replace


def planned(manifest: Manifest, sections: tuple[Section, ...]) -> Manifest:
    """The manifest with these sections, each in one chunk; sizes and digests agree with them."""
    head = container.header(sections)
    total = len(head) + sum(section.length for section in sections)
    digests = [b"\xc5" * 32 if section.length else b"" for section in sections]
    agreeing = tuple(
        replace(section, digest=blake3(joined).digest()) for section, joined in zip(sections, digests, strict=True)
    )
    chunks = blake3(head).digest() + b"".join(digests)
    return replace(manifest, sections=agreeing, payload=Payload(total, blake3(chunks).digest(), total, chunks))


def refused_for_its_sections(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match=r"^sections") as caught:
        make_plan(manifest)
    # What they are is wrong, and every digest is right.
    assert not str(caught.value.fields["field"]).endswith(".digest")


def swapped(sections: tuple[Section, ...], one: int, other: int) -> tuple[Section, ...]:
    found = list(sections)
    found[one], found[other] = found[other], found[one]
    return tuple(found)


def test_true_plans_are_accepted(
    kv_example: Callable[..., Any], text_example: Callable[..., Any], zstd_example: Callable[..., Any]
) -> None:
    for example in (
        *(kv_example(dtype=dtype) for dtype in ("F32", "F16", "BF16")),
        kv_example(rows=40),
        text_example(),
        text_example(text=b"", system=b""),
        zstd_example(),
        zstd_example(text=b""),
    ):
        assert make_plan(example.manifest).count == len(example.chunks())
        one = make_plan(planned(example.manifest, example.manifest.sections))
        assert one.count == 1 + sum(section.length > 0 for section in example.manifest.sections)


def test_every_length_that_does_not_follow_from_the_shape_is_refused(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    for index, section in enumerate(one.sections):
        for length in (0, section.length - 1, section.length + 1, 2 * section.length, 2**53):
            sections = (*one.sections[:index], replace(section, length=length), *one.sections[index + 1 :])
            with pytest.raises(ManifestError, match=rf"^sections\.{section.name}\.length: {length}, "):
                make_plan(planned(one, sections))


@pytest.mark.parametrize("shape", [(2**53,) * 8, (2**32, 2**32), (2**53,), (0, 2**53)])
def test_shapes_that_overflow_are_refused_without_memory(
    kv_example: Callable[..., Any], text_example: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    for one in (kv_example().manifest, text_example().manifest):
        sections = (replace(one.sections[0], shape=shape), *one.sections[1:])
        with pytest.raises(ManifestError):
            make_plan(replace(one, sections=sections))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda s: swapped(s, 1, 2), id="keys and values change places"),
        pytest.param(
            lambda s: (s[0], replace(s[1], name=s[2].name), replace(s[2], name=s[1].name), *s[3:]),
            id="keys are called values",
        ),
        pytest.param(lambda s: (s[0], *s[3:], *s[1:3]), id="layers change places"),
        pytest.param(lambda s: s[:3] + s[4:], id="no positions"),
        pytest.param(lambda s: s[1:], id="no ids"),
        pytest.param(lambda s: s[:1] + s[3:], id="no first layer"),
        pytest.param(lambda s: s[:3], id="no last layer"),
        pytest.param(lambda s: s[:-1], id="no last section"),
        pytest.param(lambda _: (), id="nothing"),
        pytest.param(lambda s: (*s, replace(s[0], name="more")), id="one section more"),
        pytest.param(lambda s: (*s, replace(s[4], name="layers.2.keys")), id="half a layer more"),
        pytest.param(lambda s: (s[0], replace(s[3], name="layers.0.positions"), *s[1:]), id="needless positions"),
        pytest.param(lambda s: swapped(s, 3, 4), id="positions after keys"),
        pytest.param(lambda s: (*s[:3], replace(s[3], dtype="U32"), *s[4:]), id="unsigned positions"),
        pytest.param(lambda s: (replace(s[0], dtype="I32"), *s[1:]), id="signed ids"),
        pytest.param(lambda s: (s[0], replace(s[1], dtype="I32"), *s[2:]), id="another dtype of the same size"),
        pytest.param(lambda s: (s[0], replace(s[1], shape=(40, 2, 8)), *s[2:]), id="transposed"),
        pytest.param(lambda s: (s[0], replace(s[1], shape=(1, 2, 40, 8)), *s[2:]), id="a batch axis"),
        pytest.param(lambda s: (replace(s[0], shape=(1, 40)), *s[1:]), id="ids with two axes"),
        pytest.param(lambda s: (s[0], replace(s[1], shape=(2, 39, 8), length=2 * 39 * 8 * 4), *s[2:]), id="a row less"),
        pytest.param(
            lambda s: (s[0], replace(s[1], encoding="zstd", decoded=Decoded(2**50, bytes(32))), *s[2:]),
            id="compressed keys",
        ),
        pytest.param(
            lambda s: (
                s[0],
                replace(s[1], dtype="U8", shape=(9,), length=9, encoding="zstd", decoded=Decoded(5120, bytes(32))),
                *s[2:],
            ),
            id="compressed keys as bytes",
        ),
    ],
)
def test_sections_that_are_not_those_of_the_layout_are_refused(
    kv_example: Callable[..., Any], wrong: Callable[[tuple[Section, ...]], tuple[Section, ...]]
) -> None:
    one = kv_example().manifest
    refused_for_its_sections(planned(one, wrong(one.sections)))


def test_the_first_difference_is_named_with_both_values(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    with pytest.raises(ManifestError) as caught:
        make_plan(planned(one, swapped(one.sections, 1, 2)))
    assert caught.value.fields["field"] == "sections[1]"
    assert "layers.0.values" in str(caught.value.fields["value"])
    assert "layers.0.keys" in str(caught.value.fields["expected"])


def test_duplicate_names_are_refused(kv_example: Callable[..., Any], text_example: Callable[..., Any]) -> None:
    for one in (kv_example().manifest, text_example().manifest):
        with pytest.raises(ManifestError, match="appears twice"):
            make_plan(planned(one, (*one.sections, one.sections[0])))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda _: (), id="nothing"),
        pytest.param(lambda s: s[1:], id="no system prompt"),
        pytest.param(lambda s: s[::-1], id="the other way round"),
        pytest.param(lambda s: (*s, replace(s[1], name="prefix.ids")), id="one section more"),
        pytest.param(lambda s: (s[0], replace(s[1], name="__metadata__")), id="the name of the metadata"),
        pytest.param(lambda s: (s[0], replace(s[1], dtype="U32", shape=(s[1].length // 4,))), id="not bytes"),
        pytest.param(lambda s: (s[0], replace(s[1], encoding="zstd")), id="compressed, decoding to nothing"),
        pytest.param(lambda s: (s[0], replace(s[1], decoded=Decoded(1, bytes(32)))), id="raw, decoding to something"),
        pytest.param(
            lambda s: (
                s[0],
                replace(s[1], shape=(2, s[1].length // 2), encoding="zstd", decoded=Decoded(1, bytes(32))),
            ),
            id="a frame with two axes",
        ),
    ],
)
def test_sections_that_are_no_text_are_refused(
    text_example: Callable[..., Any], wrong: Callable[[tuple[Section, ...]], tuple[Section, ...]]
) -> None:
    one = text_example(text=b"four" * 100).manifest
    refused_for_its_sections(planned(one, wrong(one.sections)))


def test_text_over_the_limit_is_refused_raw_and_compressed(
    text_example: Callable[..., Any], zstd_example: Callable[..., Any]
) -> None:
    limit = limits.MAX_DOCUMENT_BYTES
    raw, packed = text_example().manifest, zstd_example().manifest
    for size in (limit, limit + 1, 2**53):
        text = replace(raw.sections[1], shape=(size,), length=size)
        frame = replace(packed.sections[1], decoded=Decoded(size, bytes(32)))
        for one in (
            planned(raw, (raw.sections[0], text)),
            planned(packed, (packed.sections[0], frame)),
        ):
            if size == limit:
                make_plan(one)
                continue
            with pytest.raises(TooLargeError) as caught:
                make_plan(one)
            assert caught.value.fields == {"value": size, "limit": limit}
