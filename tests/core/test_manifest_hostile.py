"""Manifest bytes from a stranger: whatever they are, one of our errors or a manifest that encodes to the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.core import limits, manifest
from kvferry.core.errors import ManifestError, TooLargeError
from kvferry.core.manifest import Manifest

steady = settings(derandomize=True, database=None, deadline=None, max_examples=100)

extension = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=40))
timestamp = st.builds(msgpack.Timestamp, st.integers(-(2**33), 2**33), st.integers(0, 10**9 - 1))
scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.binary(min_size=32, max_size=32),
    extension,
    timestamp,
)
anything = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12) | st.binary(max_size=4), inner),
    max_leaves=6,
)


def outcome(data: bytes) -> str:
    try:
        decoded = manifest.decode(data)
    except (ManifestError, TooLargeError):
        return "refused"
    assert manifest.encode(decoded) == data
    return "accepted"


@steady
@given(st.binary(max_size=300))
@example(b"\xc1")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdb\xff\xff\xff\xff")
@example(b"\xc9\xff\xff\xff\xff\xff")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\x81\xa7version\xc0")
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert outcome(data) == "refused"


@steady
@given(anything)
def test_arbitrary_values_are_refused(value: Any) -> None:
    assert outcome(msgpack.packb(value, strict_types=False)) == "refused"


@steady
@given(key=st.sampled_from(Manifest.__struct_fields__), value=anything)
def test_any_value_in_the_place_of_a_group(full_manifest: Manifest, key: str, value: Any) -> None:
    outcome(msgpack.packb(msgpack.unpackb(manifest.encode(full_manifest)) | {key: value}))


@steady
@given(data=st.data())
def test_any_value_in_the_place_of_any_field(full_manifest: Manifest, data: st.DataObject) -> None:
    plain = msgpack.unpackb(manifest.encode(full_manifest))
    parent: Any = plain
    while True:
        key = data.draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        if not isinstance(parent[key], dict | list) or not parent[key] or data.draw(st.booleans()):
            break
        parent = parent[key]
    parent[key] = data.draw(anything)
    outcome(msgpack.packb(plain))


@steady
@given(place=st.floats(0, 1, exclude_max=True), removed=st.integers(0, 3), added=st.binary(max_size=3))
def test_edited_bytes(kv_example: Callable[..., Any], place: float, removed: int, added: bytes) -> None:
    encoded = kv_example().encoded
    at = int(place * len(encoded))
    outcome(encoded[:at] + added + encoded[at + removed :])


def test_every_flipped_bit_is_refused_or_another_artifact(text_example: Callable[..., Any]) -> None:
    encoded = text_example().encoded
    accepted = 0
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        accepted += outcome(bytes(flipped)) == "accepted"
        assert manifest.artifact_id(bytes(flipped)) != manifest.artifact_id(encoded)
    # Bits of digests, names and numbers make other manifests; those of the structure must not.
    assert 0 < accepted < 8 * len(encoded)


@pytest.mark.parametrize("depth", [2, 100, 500, 990, 1000, 1010, 1022, 1024, 5000, 1_000_000])
@pytest.mark.parametrize(
    "opening",
    [b"", b"\x81\xa7version", b"\x82\xa7version\x01\xa4form", b"\x82\xa7version\x01\xa7surplus"],
    ids=["root", "version", "field", "surplus"],
)
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1k"], ids=["lists", "maps"])
def test_deep_nesting_is_refused(depth: int, opening: bytes, level: bytes) -> None:
    data = opening + level * depth + b"\x00"
    assert outcome(data[: limits.MAX_MANIFEST_BYTES]) == "refused"


@pytest.mark.timeout(20)
def test_deep_and_wide_costs_no_more_than_its_size() -> None:
    """Two million integers below 480 levels: a walk that pays the depth for each would take minutes."""
    count = limits.MAX_MANIFEST_BYTES - 600
    data = b"\x82\xa7version\x01\xa4form" + b"\x91" * 480 + b"\xdd" + count.to_bytes(4, "big") + b"\x01" * count
    assert outcome(data) == "refused"


def test_declared_lengths_take_no_memory() -> None:
    for tag in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        assert outcome(b"\x82\xa7version\x01\xa4form" + tag + b"\x7f\xff\xff\xff" + b"\x01" * 20) == "refused"


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"])
def test_text_that_is_not_utf8_is_refused(text_example: Callable[..., Any], text: bytes) -> None:
    mark = "#" * len(text)
    plain = msgpack.unpackb(text_example().encoded)
    plain["method"]["params"] = {"x": mark}
    data = msgpack.packb(plain)
    assert outcome(data) == "accepted"
    assert outcome(data.replace(mark.encode(), text)) == "refused"
