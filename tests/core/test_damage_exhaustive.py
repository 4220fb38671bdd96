"""Every bit of a small KV artifact flipped, every length cut, every chunk in every wrong place: nothing gets in.

Manifest and payload go through ``Intake`` and the store, as a receiver has them, without sockets. By default a share of
the positions, the same in every run, is tried; with ``-m endurance`` it is every single one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core import manifest, verification
from kvferry.core.errors import (
    ContainerError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    QuarantinedError,
    StoreError,
    TransferError,
)
from kvferry.core.ledger import SenderAccount, to_json
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.plan import make_plan
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.receiver.intake import Intake, Judgement

ACCOUNT = to_json(SenderAccount(1, 2, 3.0, 4.0, 5.0, 6.0))
VERSIONS = {"kvferry": "0", "mlx": "0", "mlx_lm": "0", "device": "cpu", "blas": ""}
EVERYTHING = pytest.param(None, marks=[pytest.mark.endurance, pytest.mark.timeout(1200)], id="all")


def shares(count: int) -> pytest.MarkDecorator:
    """Run a test with ``count`` positions, and once with all of them."""
    return pytest.mark.parametrize("share", [pytest.param(count, id="share"), EVERYTHING])


def chosen(positions: Iterable[int], share: int | None) -> list[int]:
    """Return a share of the positions, the first and the last among them; None is all."""
    listed = list(positions)
    if share is None or share >= len(listed):
        return listed
    drawn = np.random.default_rng(share).choice(listed, share, replace=False)
    return sorted({listed[0], listed[-1], *map(int, drawn)})


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@dataclasses.dataclass(frozen=True)
class Receiver:
    """An intake on a store of its own, and the artifact that is meant for it."""

    intake: Intake
    store: ArtifactStore
    example: Any

    @property
    def chunks(self) -> list[bytes]:
        found: list[bytes] = self.example.chunks()
        return found

    def offer(self) -> list[int]:
        """Offer the true manifest and return what is missing."""
        judgement = self.intake.offer(self.example.encoded)
        assert judgement.verdict.accepted
        assert judgement.artifact_id == self.example.id
        return [index for start, end in judgement.missing for index in range(start, end)]

    def put(self, index: int, data: bytes) -> None:
        self.intake.put(self.example.id, index, data, 1)

    def invisible(self) -> bool:
        with pytest.raises(NotFoundError, match=self.example.id.hex()):
            self.store.get(self.example.id)
        return self.store.ids() == []

    def finish(self) -> Stored:
        """What a sender does that tries again: everything that is missing, and Commit."""
        for index in self.offer():
            self.put(index, self.chunks[index])
        stored = self.intake.commit(self.example.id, ACCOUNT, 1)
        self.example.check(stored)
        assert self.store.ids() == [self.example.id]
        return stored


@pytest.fixture
def opened(
    tmp_path: Path, example: Any, profile_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], contextlib.AbstractContextManager[Receiver]]:
    """Return a function that opens the receiver, a second time as a second process would."""
    # No power is cut here, and a sync a file would be most of the time.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    metrics = ReceiverMetrics("tiny", VERSIONS)

    @contextlib.contextmanager
    def again() -> Iterator[Receiver]:
        with contextlib.closing(ArtifactStore(tmp_path / "store")) as store:
            yield Receiver(Intake(store, profile_of(example.manifest), metrics), store, example)

    return again


@pytest.fixture
def receiver(opened: Callable[..., Any]) -> Iterator[Receiver]:
    with opened() as one:
        yield one


# On the way in


def offered(intake: Intake, encoded: bytes) -> Judgement | ManifestError:
    try:
        return intake.offer(encoded)
    except ManifestError as error:
        return error


@shares(600)
def test_every_bit_of_the_manifest(receiver: Receiver, share: int | None) -> None:
    encoded, outcomes = receiver.example.encoded, {"malformed": 0, "refused": 0, "another artifact": 0}
    for bit in chosen(range(8 * len(encoded)), share):
        judgement = offered(receiver.intake, flipped(encoded, bit))
        if isinstance(judgement, ManifestError):
            # It says where: "manifest" or a field of it.
            assert re.match(r"[a-z_]+[a-z0-9_.\[\]]*: ", judgement.message), judgement.message
            outcomes["malformed"] += 1
            continue
        # The sender compares this id with its own, and stops here when they differ.
        assert judgement.artifact_id != receiver.example.id, bit
        if judgement.verdict.accepted:
            # A name or a figure that describes and decides nothing: a manifest of its own, without a chunk.
            assert judgement.missing == ((0, len(receiver.chunks)),)
            with pytest.raises(TransferError, match="^chunk 0: missing, 12 chunks in all"):
                receiver.intake.commit(judgement.artifact_id, ACCOUNT, 1)
            receiver.store.drop(judgement.artifact_id)
            outcomes["another artifact"] += 1
        else:
            assert all(reason.field and reason.artifact != reason.receiver for reason in judgement.verdict.reasons)
            outcomes["refused"] += 1
    assert all(outcomes.values()), outcomes
    assert receiver.invisible()
    receiver.finish()


@shares(400)
def test_every_length_of_the_manifest(receiver: Receiver, share: int | None) -> None:
    encoded = receiver.example.encoded
    for length in chosen(range(len(encoded)), share):
        with pytest.raises(ManifestError):
            receiver.intake.offer(encoded[:length])
    assert receiver.invisible()
    assert list((receiver.store.root / "partial").iterdir()) == []
    receiver.finish()


@shares(1200)
def test_every_bit_of_the_payload(receiver: Receiver, share: int | None) -> None:
    chunks, count = receiver.chunks, len(receiver.chunks)
    assert receiver.offer() == list(range(count))
    bits = [(index, bit) for index, chunk in enumerate(chunks) for bit in range(8 * len(chunk))]
    for place in chosen(range(len(bits)), share):
        index, bit = bits[place]
        with pytest.raises(IntegrityError, match=f"^chunk {index}: digest") as caught:
            receiver.put(index, flipped(chunks[index], bit))
        assert caught.value.fields["chunk"] == index
    assert receiver.offer() == list(range(count))
    assert receiver.invisible()
    receiver.finish()


@shares(400)
def test_every_length_of_the_payload(receiver: Receiver, share: int | None) -> None:
    """The stream ends anywhere: whole chunks count, the one that was cut does not, and Commit names it."""
    chunks = receiver.chunks
    lengths = [(index, length) for index, chunk in enumerate(chunks) for length in range(len(chunk))]
    wanted = {lengths[place] for place in chosen(range(len(lengths)), share)}
    receiver.offer()
    for index, chunk in enumerate(chunks):
        for length in sorted(length for at, length in wanted if at == index):
            with pytest.raises(ContainerError, match=f"^chunk {index}: {length} bytes, expected {len(chunk)}"):
                receiver.put(index, chunk[:length])
        with pytest.raises(TransferError, match=f"^chunk {index}: missing, {len(chunks) - index} chunks in all"):
            receiver.intake.commit(receiver.example.id, ACCOUNT, 1)
        assert receiver.invisible()
        receiver.put(index, chunk)
    receiver.finish()


def test_every_chunk_in_the_place_of_every_other(receiver: Receiver) -> None:
    """Reordered and duplicated chunks, layers that changed places, K for V: all of them are one chunk for another."""
    chunks = receiver.chunks
    receiver.offer()
    for index, other in itertools.permutations(range(len(chunks)), 2):
        with pytest.raises(ContainerError, match=f"^chunk {index}: "):
            receiver.put(index, chunks[other])
    assert receiver.offer() == list(range(len(chunks)))
    assert receiver.invisible()
    receiver.finish()


def test_every_chunk_of_another_artifact(receiver: Receiver, describe: Callable[..., Any]) -> None:
    """Replay: chunks of an artifact of the same shape, in which the first bit of each tensor is another."""
    contents = tuple(
        dataclasses.replace(content, data=flipped(content.data, 0)) for content in receiver.example.contents
    )
    foreign = describe(receiver.example.manifest, contents)
    assert foreign.id != receiver.example.id
    receiver.offer()
    receiver.intake.offer(foreign.encoded)
    differing = 0
    for index, (chunk, own) in enumerate(zip(foreign.chunks(), receiver.chunks, strict=True)):
        if chunk == own:
            continue
        differing += 1
        with pytest.raises(IntegrityError, match=f"^chunk {index}: digest"):
            receiver.put(index, chunk)
        # Where it belongs it is welcome, and helps the other one nothing.
        receiver.intake.put(foreign.id, index, chunk, 1)
    assert differing == len(contents)
    assert receiver.offer() == list(range(len(receiver.chunks)))
    with pytest.raises(TransferError):
        receiver.intake.commit(foreign.id, ACCOUNT, 1)
    receiver.store.drop(foreign.id)
    assert receiver.invisible()
    receiver.finish()


def test_every_set_of_chunks_that_is_not_all(receiver: Receiver) -> None:
    chunks = receiver.chunks
    for dropped in range(len(chunks)):
        receiver.offer()
        for index in {*range(len(chunks))} - {dropped}:
            receiver.put(index, chunks[index])
            receiver.put(index, chunks[index])
        with pytest.raises(TransferError, match=f"^chunk {dropped}: missing, 1 chunks in all"):
            receiver.intake.commit(receiver.example.id, ACCOUNT, 1)
        assert receiver.invisible()
        receiver.store.drop(receiver.example.id)
    receiver.finish()


def test_every_two_sections_exchanged_in_the_manifest(receiver: Receiver) -> None:
    """A manifest that gives one section's digest, or place, to another contradicts itself or the layout."""
    example = receiver.example
    for one, two in itertools.combinations(range(len(example.manifest.sections)), 2):
        for exchange in (exchanged_digests, exchanged_places):
            sections = exchange(list(example.manifest.sections), one, two)
            forged = manifest.encode(msgspec.structs.replace(example.manifest, sections=tuple(sections)))
            with pytest.raises(ManifestError, match=r"^(sections|payload)[.\[]"):
                receiver.intake.offer(forged)
    assert receiver.invisible()
    receiver.finish()


def exchanged_digests(sections: list[Any], one: int, two: int) -> list[Any]:
    replace, (first, second) = msgspec.structs.replace, (sections[one], sections[two])
    sections[one], sections[two] = replace(first, digest=second.digest), replace(second, digest=first.digest)
    return sections


def exchanged_places(sections: list[Any], one: int, two: int) -> list[Any]:
    sections[one], sections[two] = sections[two], sections[one]
    return sections


# On the disk


def changed_on_disk(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def place_of(example: Any, at: int) -> tuple[int, str]:
    """Return chunk and section of a byte of the payload."""
    chunk = next(index for index in range(len(example.chunks())) if at < example.offset(index + 1))
    sections = make_plan(example.manifest).section_chunks
    (name,) = [name for name, (first, end) in sections.items() if first <= chunk < end]
    return chunk, name


@shares(300)
def test_every_bit_of_a_payload_that_was_committed(receiver: Receiver, share: int | None) -> None:
    stored = receiver.finish()
    for bit in chosen(range(8 * stored.manifest.payload.length), share):
        changed_on_disk(stored.payload_path, bit)
        chunk, name = place_of(receiver.example, bit // 8)
        place = f"section {name}" if name else "header"
        (found,) = verification.damage(stored.manifest, stored.plan, stored)
        assert isinstance(found, IntegrityError)
        assert found.message.startswith(f"{place}: chunk {chunk}: digest")
        if name:
            with pytest.raises(IntegrityError, match=f"^section {name}: chunk {chunk}: digest") as caught:
                stored.sections.read(name)
            assert (caught.value.fields["field"], caught.value.fields["chunk"]) == (name, chunk)
        changed_on_disk(stored.payload_path, bit)
    receiver.example.check(stored)


@shares(300)
def test_every_bit_of_a_manifest_that_was_committed(receiver: Receiver, share: int | None) -> None:
    path = receiver.finish().path / "manifest.msgpack"
    for bit in chosen(range(8 * len(receiver.example.encoded)), share):
        changed_on_disk(path, bit)
        with pytest.raises(IntegrityError, match="its manifest on disk has changed"):
            receiver.store.get(receiver.example.id)
        changed_on_disk(path, bit)
    receiver.example.check(receiver.store.get(receiver.example.id))


@shares(40)
def test_every_bit_of_a_payload_that_lay_over_a_restart(
    opened: Callable[..., contextlib.AbstractContextManager[Receiver]], share: int | None
) -> None:
    """All chunks came, a bit rotted, the receiver started anew: Commit names the chunk, and it alone comes again."""
    with opened() as first:
        first.offer()
        for index, chunk in enumerate(first.chunks):
            first.put(index, chunk)
        path = first.store.partial(first.example.id).path / "payload.safetensors"
        length = first.example.manifest.payload.length
    for bit in chosen(range(8 * length), share):
        changed_on_disk(path, bit)
        with opened() as receiver:
            chunk, _ = place_of(receiver.example, bit // 8)
            with pytest.raises(IntegrityError, match=f"^chunk {chunk}: digest"):
                receiver.intake.commit(receiver.example.id, ACCOUNT, 1)
            assert receiver.invisible()
            assert receiver.offer() == [chunk]
            receiver.put(chunk, receiver.chunks[chunk])
    with opened() as receiver:
        assert receiver.offer() == []
        receiver.finish()


@shares(40)
def test_every_length_of_a_payload_that_lay_over_a_restart(
    opened: Callable[..., contextlib.AbstractContextManager[Receiver]], share: int | None
) -> None:
    with opened() as first:
        first.offer()
        for index, chunk in enumerate(first.chunks):
            first.put(index, chunk)
        path = first.store.partial(first.example.id).path / "payload.safetensors"
        payload = first.example.payload
    for length in chosen(range(len(payload)), share):
        # A file that is cut comes back as zeros, so bytes that were zero are no damage.
        path.write_bytes(payload[:length])
        with opened() as receiver:
            bad = [
                index
                for index, chunk in enumerate(receiver.chunks)
                if receiver.example.offset(index + 1) > length and chunk != cut(chunk, length, receiver, index)
            ]
            with pytest.raises(IntegrityError, match=f"^chunk {bad[0]}: digest"):
                receiver.intake.commit(receiver.example.id, ACCOUNT, 1)
            assert receiver.invisible()
            assert receiver.offer() == bad
            for index in bad:
                receiver.put(index, receiver.chunks[index])
    with opened() as receiver:
        receiver.finish()


def cut(chunk: bytes, length: int, receiver: Receiver, index: int) -> bytes:
    kept = max(length - receiver.example.offset(index), 0)
    return chunk[:kept] + bytes(len(chunk) - kept)


@shares(20)
def test_every_length_of_a_payload_that_was_committed(
    opened: Callable[..., contextlib.AbstractContextManager[Receiver]], share: int | None
) -> None:
    """Cut while the receiver runs, reading stops at the cut; at the next start it is put aside, and comes again."""
    with opened() as receiver:
        length = receiver.finish().manifest.payload.length
        path = receiver.store.get(receiver.example.id).payload_path
    for size in chosen(range(length), share):
        with opened() as receiver:
            path.write_bytes(receiver.example.payload[:size])
            stored = receiver.store.get(receiver.example.id)
            chunk, _ = place_of(receiver.example, size)
            first = next(verification.damage(stored.manifest, stored.plan, stored))
            assert isinstance(first, StoreError)
            assert f"chunk {chunk}: the stored payload is cut short" in first.message
        with opened() as receiver:
            with pytest.raises(QuarantinedError, match=rf"payload.safetensors has {size} bytes"):
                receiver.store.get(receiver.example.id)
            assert receiver.store.ids() == []
            receiver.finish()
