"""How a payload is cut, which chunks are its own, and manifests whose sizes or digests contradict each other.

The oracle for a cut knows no arithmetic of chunks: it labels every byte of the payload with the piece that holds it and
the chunk within that piece, and groups what is labelled alike.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from kvferry.core.errors import ContainerError, IntegrityError, ManifestError
from kvferry.core.manifest import Manifest, Section
from kvferry.core.plan import Plan, make_plan

replace = msgspec.structs.replace
TEXT = b"What is written on the crates of paper? Nothing."


def labelled(lengths: list[int], chunk_size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return every chunk's byte range, and every piece's range of chunks."""
    labels = [(piece, at // chunk_size) for piece, length in enumerate(lengths) for at in range(length)]
    ranges, owners = [], []
    for (piece, _), group in itertools.groupby(range(len(labels)), key=labels.__getitem__):
        found = list(group)
        ranges.append((found[0], found[-1] + 1))
        owners.append(piece)
    edges = [sum(owner < piece for owner in owners) for piece in range(len(lengths) + 1)]
    return ranges, list(itertools.pairwise(edges))


def check_table(example: Any) -> None:
    plan = make_plan(example.manifest)
    sections = example.manifest.sections
    header = len(example.payload) - sum(section.length for section in sections)
    size = example.manifest.payload.chunk_size
    ranges, chunks = labelled([header, *(section.length for section in sections)], size)
    assert list(plan.ranges) == ranges
    assert [plan.range(index) for index in range(plan.count)] == ranges
    assert [plan.section_chunks[section.name] for section in sections] == chunks[1:]
    assert plan.digests == b"".join(blake3(example.payload[start:end]).digest() for start, end in ranges)


# Tables


@pytest.mark.parametrize("size", [1, 2, 7, 200])
def test_sections_of_every_size_around_the_chunk_size_are_cut(text_example: Callable[..., Any], size: int) -> None:
    around = sorted({0, 1, size - 1, size, size + 1, 2 * size, 3 * size - 1, 3 * size, 3 * size + 1})
    for system, text in itertools.product(around, around):
        check_table(text_example(text=b"t" * text, system=b"s" * system, chunk_size=size))


@pytest.mark.parametrize("size", [5, 96, 160, 161, 192, 768, 1024, 1536, 2559, 2560, 2561, 8000, 2**20])
def test_tensors_are_cut(kv_example: Callable[..., Any], size: int) -> None:
    """160, 192, 768, 1536 and 2560 are the sections' own lengths."""
    example = kv_example(chunk_size=size)
    check_table(example)
    assert {160, 192, 768, 1536, 2560} == {section.length for section in example.manifest.sections}


def test_a_known_table(kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    plan = make_plan(example.manifest)
    assert plan.section_chunks == {
        "": (0, 1),
        "prefix.ids": (1, 2),
        "layers.0.keys": (2, 5),
        "layers.0.values": (5, 8),
        "layers.1.positions": (8, 9),
        "layers.1.keys": (9, 11),
        "layers.1.values": (11, 12),
    }
    sizes = [end - start for start, end in plan.ranges]
    assert sizes[1:] == [160, 1024, 1024, 512, 1024, 1024, 512, 192, 1024, 512, 768]


def test_empty_sections_have_no_chunk(text_example: Callable[..., Any]) -> None:
    plan = make_plan(text_example(text=b"", system=b"").manifest)
    assert plan.count == 1
    assert plan.section_chunks == {"": (0, 1), "prompt.system": (1, 1), "document.text": (1, 1)}


# Chunks


@pytest.fixture(scope="module")
def small(text_example: Callable[..., Any]) -> Any:
    """Chunks of 20 bytes: eight of the header, the last one short, one of five bytes, three of the text, one short."""
    return text_example(text=TEXT, system=b"brief", chunk_size=20)


@pytest.fixture(scope="module")
def plan(small: Any) -> Plan:
    return make_plan(small.manifest)


def test_every_true_chunk_is_accepted(plan: Plan, small: Any) -> None:
    assert [len(chunk) for chunk in small.chunks()] == [20] * 7 + [4, 5, 20, 20, 8]
    for index, chunk in enumerate(small.chunks()):
        plan.check(index, chunk)
        plan.check(index, memoryview(chunk))


def test_every_wrong_index_is_refused(plan: Plan, small: Any) -> None:
    for index in (-1, -12, 12, 13, 2**63):
        with pytest.raises(ContainerError, match=f"^chunk {index}: the payload has 12 chunks"):
            plan.range(index)
        for data in (small.chunks()[-1], b""):
            with pytest.raises(ContainerError, match=f"^chunk {index}: the payload has 12 chunks") as caught:
                plan.check(index, data)
            assert not isinstance(caught.value, IntegrityError)


def test_every_wrong_length_is_refused(plan: Plan, small: Any) -> None:
    for index, chunk in enumerate(small.chunks()):
        for length in {*range(40)} - {len(chunk)}:
            with pytest.raises(ContainerError, match=f"^chunk {index}: {length} bytes, expected {len(chunk)}"):
                plan.check(index, (chunk * 40)[:length])


def test_every_flipped_bit_is_refused(plan: Plan, small: Any) -> None:
    for index, chunk in enumerate(small.chunks()):
        for bit in range(8 * len(chunk)):
            flipped = bytearray(chunk)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(IntegrityError) as caught:
                plan.check(index, bytes(flipped))
            assert caught.value.fields["chunk"] == index
            assert caught.value.fields["actual"] == blake3(flipped).hexdigest()
            assert caught.value.fields["expected"] == blake3(chunk).hexdigest()


def test_a_chunk_in_the_place_of_another_is_refused(plan: Plan, small: Any) -> None:
    chunks = small.chunks()
    for index, other in itertools.permutations(range(len(chunks)), 2):
        error = IntegrityError if len(chunks[index]) == len(chunks[other]) else ContainerError
        with pytest.raises(error):
            plan.check(index, chunks[other])


# Sizes that contradict each other


@pytest.mark.parametrize("difference", [-1, 1, -8, 8, 2**40])
def test_a_payload_with_a_hole_or_an_overlap_is_refused(kv_example: Callable[..., Any], difference: int) -> None:
    one = kv_example().manifest
    wrong = replace(one, payload=replace(one.payload, length=one.payload.length + difference))
    with pytest.raises(ManifestError, match=r"^payload\.length: ") as caught:
        make_plan(wrong)
    assert caught.value.fields["expected"] == one.payload.length


def test_a_chunk_list_of_another_length_is_refused(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    chunks = one.payload.chunks
    # Nine chunks would hold all bytes, if it were not for the edges.
    for wrong in (b"", chunks[:-1], chunks[:-32], chunks[: 9 * 32], chunks[: 8 * 32], chunks + b"\x00", chunks * 2):
        with pytest.raises(ManifestError, match=r"^payload\.chunks: ") as caught:
            make_plan(following(one, chunks=wrong))
        assert caught.value.fields["field"] == "payload.chunks"


@pytest.mark.parametrize("size", [1, 100, 1500, 2560, 2**20])
def test_another_chunk_size_than_that_of_the_digests_is_refused(kv_example: Callable[..., Any], size: int) -> None:
    one = kv_example().manifest
    with pytest.raises(ManifestError, match=r"^payload\.chunks: "):
        make_plan(replace(one, payload=replace(one.payload, chunk_size=size)))


@pytest.mark.parametrize("size", [2**40, 2**53, 2**60])
def test_a_payload_far_beyond_its_chunk_list_is_refused_without_memory(
    text_example: Callable[..., Any], size: int
) -> None:
    example = text_example()
    text = replace(example.manifest.sections[1], shape=(size,), length=size)
    sections = (example.manifest.sections[0], text)
    # The lengths agree but for the few digits that the header has more.
    for more in range(40):
        length = size + more + len(example.payload) - len(example.contents[1].data)
        wrong = replace(example.manifest, sections=sections, payload=replace(example.manifest.payload, length=length))
        tracemalloc.start()
        with pytest.raises(ManifestError) as caught:
            make_plan(wrong)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
        if caught.value.fields["field"] == "payload.chunks":
            return
    pytest.fail("no length agreed")


# Digests that contradict each other


def following(manifest: Manifest, chunks: bytes) -> Manifest:
    """The manifest with these chunk digests, and the digest of the payload that follows from them."""
    return replace(manifest, payload=replace(manifest.payload, digest=blake3(chunks).digest(), chunks=chunks))


def with_section(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    found = list(manifest.sections)
    found[index] = replace(found[index], **changes)
    return replace(manifest, sections=tuple(found))


def refused_for(manifest: Manifest, field: str, stated: bytes | None = None, implied: bytes | None = None) -> None:
    with pytest.raises(ManifestError, match=rf"^{field}: ") as caught:
        make_plan(manifest)
    assert caught.value.fields["field"] == field
    if stated is not None and implied is not None:
        assert (caught.value.fields["value"], caught.value.fields["expected"]) == (stated.hex(), implied.hex())


@pytest.fixture(params=["tensors", "text", "frame", "small chunks", "nothing"])
def any_example(
    request: pytest.FixtureRequest,
    kv_example: Callable[..., Any],
    text_example: Callable[..., Any],
    zstd_example: Callable[..., Any],
) -> Any:
    return {
        "tensors": kv_example,
        "text": text_example,
        "frame": zstd_example,
        "small chunks": lambda: kv_example(chunk_size=100),
        "nothing": lambda: text_example(text=b"", system=b""),
    }[request.param]()


def flips(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` with the first, the last and one more bit flipped, one at a time."""
    for bit in {0, 8 * len(data) - 1, 77 % (8 * len(data))}:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def owner(manifest: Manifest, plan: Plan, chunk: int) -> Section | None:
    found = [one for one in manifest.sections if chunk in range(*plan.section_chunks[one.name])]
    assert len(found) <= 1
    return found[0] if found else None


def test_every_section_digest_that_does_not_follow_is_refused(any_example: Any) -> None:
    one = any_example.manifest
    for index, section in enumerate(one.sections):
        stored = bytes(any_example.contents[index].data)
        own = [stored[at : at + one.payload.chunk_size] for at in range(0, len(stored), one.payload.chunk_size)]
        # The digest of all of it, of the first chunk, and of the chunks without their order are no section digests.
        near = [blake3(stored).digest()] if stored else [bytes(32)]
        near += [blake3(chunk).digest() for chunk in own[:1]]
        if len(own) > 1:
            near.append(blake3(b"".join(blake3(chunk).digest() for chunk in reversed(own))).digest())
        for wrong in (*flips(section.digest), *near):
            refused_for(
                with_section(one, index, digest=wrong), f"sections.{section.name}.digest", wrong, section.digest
            )


def test_a_payload_digest_that_does_not_follow_is_refused(any_example: Any) -> None:
    one = any_example.manifest
    of_sections = blake3(b"".join(section.digest for section in one.sections)).digest()
    for wrong in (*flips(one.payload.digest), blake3(any_example.payload).digest(), of_sections, bytes(32)):
        changed = replace(one, payload=replace(one.payload, digest=wrong))
        refused_for(changed, "payload.digest", wrong, one.payload.digest)


@pytest.mark.parametrize("follow", [False, True], ids=["alone", "the payload's digest follows"])
def test_every_chunk_digest_that_was_changed_is_refused(any_example: Any, follow: bool) -> None:  # noqa: FBT001
    one = any_example.manifest
    plan = make_plan(one)
    for index in range(plan.count):
        start, end = 32 * index, 32 * index + 32
        section = owner(one, plan, index)
        for wrong in flips(one.payload.chunks[start:end]):
            chunks = one.payload.chunks[:start] + wrong + one.payload.chunks[end:]
            changed = following(one, chunks) if follow else replace(one, payload=replace(one.payload, chunks=chunks))
            refused_for(changed, "payload.chunks" if section is None else f"sections.{section.name}.digest")


def test_a_header_digest_is_refused_even_if_everything_follows(kv_example: Callable[..., Any]) -> None:
    """The header's own chunks belong to no section, so only the header itself can contradict them."""
    one = kv_example(chunk_size=100).manifest
    header = make_plan(one).section_chunks[""][1]
    assert header > 3
    for index in range(header):
        other = blake3(b"another header").digest()
        refused_for(
            following(one, one.payload.chunks[: 32 * index] + other + one.payload.chunks[32 * index + 32 :]),
            "payload.chunks",
        )


def test_chunk_digests_that_changed_places_are_refused(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    count = make_plan(one).count
    listed = [one.payload.chunks[at : at + 32] for at in range(0, 32 * count, 32)]
    for first, second in itertools.combinations(range(count), 2):
        found = list(listed)
        found[first], found[second] = found[second], found[first]
        with pytest.raises(ManifestError, match=r"^(payload\.chunks|sections\.[a-z0-9.]+\.digest): "):
            make_plan(following(one, b"".join(found)))


def test_sections_that_changed_digests_are_refused(kv_example: Callable[..., Any]) -> None:
    one = kv_example().manifest
    keys, values = one.sections[1:3]
    changed = with_section(with_section(one, 1, digest=values.digest), 2, digest=keys.digest)
    refused_for(changed, "sections.layers.0.keys.digest", values.digest, keys.digest)


def test_the_digest_of_the_content_of_a_frame_is_not_judged_here(zstd_example: Callable[..., Any]) -> None:
    """It follows from nothing that is there yet: it is judged when the section is read."""
    one = zstd_example().manifest
    changed = with_section(one, 1, decoded=replace(one.sections[1].decoded, digest=bytes(32)))
    assert make_plan(changed) == make_plan(one)
