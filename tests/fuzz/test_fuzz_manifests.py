"""Manifests: bytes of any kind, true ones that were edited, and fields of any kind in true ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import strategies as st

from kvferry.core import limits, manifest
from kvferry.core.compat import Profile, Verdict, judge
from kvferry.core.errors import KvferryError, ManifestError, TooLargeError
from kvferry.core.manifest import Manifest
from kvferry.core.plan import Plan, make_plan

MIB = 2**20
# Beyond a fixed part, what reading takes grows with the bytes that came: a section of a hundred bytes is one object.
PER_BYTE, FIXED = 40, MIB

scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from((0, 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63, 2**64 - 1)),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=40),
    st.binary(min_size=32, max_size=32),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
)
anything = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 40), st.binary(max_size=12)), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def true_ones(kv_example: Any, packed_example: Any, text_example: Any, zstd_example: Any) -> list[bytes]:
    dense = [kv_example(), kv_example("BF16", rows=3), text_example(), zstd_example()]
    return [one.encoded for one in (*dense, *map(packed_example, ("token", "channel", "renumbered")))]


@pytest.fixture(scope="module")
def reads(kv_example: Any, profile_of: Callable[..., Profile]) -> Callable[..., None]:
    """Return what a receiver does with a manifest before it takes anything in, and what must hold of it."""
    receiver = profile_of(kv_example().manifest)

    def check(budget: Any, data: bytes) -> None:
        with budget.at_most(FIXED + PER_BYTE * len(data)):
            outcome = judged(data, receiver)
        if isinstance(outcome, KvferryError):
            assert "\n" not in outcome.message
            return
        decoded, plan, verdict = outcome
        assert manifest.encode(decoded) == data
        # What is accepted holds together: chunks without a hole up to the payload's length, one digest each.
        edges = [0, *(end for _, end in plan.ranges)]
        assert [start for start, _ in plan.ranges] == edges[:-1]
        assert edges[-1] == decoded.payload.length
        assert len(plan.digests) == 32 * plan.count
        assert decoded.form != "kv" or verdict.accepted or all(reason.field for reason in verdict.reasons)

    return check


def judged(data: bytes, receiver: Profile) -> tuple[Manifest, Plan, Verdict] | ManifestError | TooLargeError:
    try:
        decoded = manifest.decode(data)
        return decoded, make_plan(decoded), judge(decoded, receiver)
    except (ManifestError, TooLargeError) as error:
        return error


def edited(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for place, removed, added in changes:
        at = int(place * (len(data) + 1))
        data = data[:at] + added + data[at + removed :]
    return data


def test_bytes_of_any_kind(fuzz: Any, reads: Any) -> None:
    fuzz(reads, data=st.binary(max_size=2000) | anything.map(lambda value: msgpack.packb(value, strict_types=False)))


def test_true_ones_edited(fuzz: Any, reads: Any, true_ones: list[bytes]) -> None:
    fuzz(reads, data=st.builds(edited, st.sampled_from(true_ones), edits))


def test_any_value_anywhere(fuzz: Any, reads: Any, true_ones: list[bytes]) -> None:
    @st.composite
    def changed(draw: Any) -> bytes:
        plain = msgpack.unpackb(draw(st.sampled_from(true_ones)))
        for _ in range(draw(st.integers(1, 3))):
            parent = plain
            while True:
                keys = sorted(parent) if isinstance(parent, dict) else range(len(parent))
                key = draw(st.sampled_from(keys))
                inside = isinstance(parent[key], dict | list) and parent[key]
                if not inside or draw(st.integers(0, 3)) == 0:
                    break
                parent = parent[key]
            parent[key] = draw(anything)
        packed: bytes = msgpack.packb(plain, strict_types=False)
        return packed

    fuzz(reads, data=changed())


def test_sizes_and_shapes_that_agree_with_nothing(fuzz: Any, reads: Any, describe: Any, kv_example: Any) -> None:
    """Every digest follows from every other, so that only sizes, shapes and names are left to be wrong."""
    whole = kv_example()

    def forged(index: int, shape: tuple[int, ...], dtype: Any, length: int, name: str, chunk_size: int) -> bytes:
        sections = list(whole.manifest.sections)
        section = sections[index % len(sections)]
        sections[index % len(sections)] = msgspec.structs.replace(
            section, shape=shape, dtype=dtype, length=length, name=name or section.name
        )
        payload = msgspec.structs.replace(whole.manifest.payload, chunk_size=chunk_size)
        return manifest.encode(msgspec.structs.replace(whole.manifest, sections=tuple(sections), payload=payload))

    size = st.sampled_from((0, 1, 2, 40, 1024, 2**31, 2**32, 2**53)) | st.integers(0, 2**53)
    fuzz(
        reads,
        data=st.builds(
            forged,
            st.integers(0, 20),
            st.lists(size, max_size=8).map(tuple),
            st.sampled_from(sorted(manifest.DTYPE_BYTES)),
            size,
            st.just("") | st.text(min_size=1, max_size=20),
            st.integers(limits.MIN_CHUNK_BYTES, limits.MAX_CHUNK_BYTES),
        ),
    )


def test_megabytes_of_one_thing(fuzz: Any, reads: Any, true_ones: list[bytes]) -> None:
    """Size bombs: as much as fits of something that costs little to write and much to hold."""

    start = true_ones[0]

    # Built here: hypothesis remembers whatever it has drawn.
    def explodes(budget: Any, key: bytes, opening: bytes, unit: bytes) -> None:
        at = start.index(key) + len(key)
        count = (limits.MAX_MANIFEST_BYTES - len(start) - 10) // len(unit)
        reads(budget, start[:at] + opening + count.to_bytes(4, "big") + unit * count + start[at:])

    units = (b"\x80", b"\x90", b"\x91\x90", b"\x81\xa0\x00", b"\x00", b"\xa0", b"\xc4\x00", b"\xcb" + bytes(8))
    keys = (b"params", b"suffix", b"ids", b"log_probabilities", b"layout", b"rope", b"calibration", b"sections")
    keys += (b"shape", b"version", b"form", b"chunks", b"model")
    fuzz(
        explodes,
        heavy=True,
        key=st.sampled_from(keys),
        opening=st.sampled_from((b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
        unit=st.sampled_from(units),
    )
