"""Artifacts made, received in pieces, committed, dropped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core.errors import ManifestError, NotFoundError, StoreError
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import Manifest, Payload, Section, encode
from kvferry.core.partial import Partial
from kvferry.core.store import ArtifactStore

replace = msgspec.structs.replace
ACCOUNT = SenderAccount(40, 5120, 1.0, 2.0, 3.0, 4.0)


# Making


def describer(example: Any, **changes: Any) -> Callable[[tuple[Section, ...], Payload], Manifest]:
    """What tells the store of a payload that it is this example's."""
    return lambda sections, payload: replace(example.manifest, sections=sections, payload=payload, **changes)


def test_a_made_artifact_is_the_one_that_was_described(store: ArtifactStore, example: Any) -> None:
    stored = store.create(example.contents, 1024, describer(example))
    example.check(stored)
    assert store.ids() == [example.id]
    assert stored.record.account is None
    assert not list((store.root / "aside").iterdir())


def test_making_it_again_changes_nothing(store: ArtifactStore, example: Any) -> None:
    for _ in range(2):
        stored = store.create(example.contents, 1024, describer(example))
    example.check(stored)
    assert store.ids() == [example.id]
    assert not list((store.root / "aside").iterdir())


def test_a_manifest_that_cannot_be_written_publishes_nothing(store: ArtifactStore, example: Any) -> None:
    with pytest.raises(ManifestError):
        store.create(example.contents, 1024, describer(example, model=None))
    assert store.ids() == []
    assert not list((store.root / "aside").iterdir())


# Receiving


@pytest.mark.parametrize("seed", range(5))
def test_chunks_may_come_in_any_order_and_twice(store: ArtifactStore, example: Any, seed: int) -> None:
    partial = store.begin(example.encoded)
    order = [*range(12), *range(0, 12, 2)]
    for index in np.random.default_rng(seed).permutation(order).tolist():
        partial.put(index, example.chunks()[index])
    assert partial.missing() == []
    assert store.ids() == []
    example.check(store.commit(example.id, None))
    assert store.ids() == [example.id]


def test_compressed_and_text_artifacts_travel_alike(
    store: ArtifactStore, text_example: Callable[..., Any], zstd_example: Callable[..., Any]
) -> None:
    text_example(chunk_size=4096).check(text_example(chunk_size=4096).received_by(store))
    packed = zstd_example()
    assert packed.received_by(store).sections.read("document.text") == text_example().contents[1].data
    assert store.ids() == sorted([packed.id, text_example(chunk_size=4096).id])


def test_missing_chunks_are_half_open_runs(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    chunks = example.chunks()
    assert len(chunks) == 12
    assert partial.missing() == [(0, 12)]
    for index, expected in (
        (0, [(1, 12)]),
        (11, [(1, 11)]),
        (4, [(1, 4), (5, 11)]),
        (4, [(1, 4), (5, 11)]),
        (5, [(1, 4), (6, 11)]),
    ):
        new = any(start <= index < end for start, end in partial.missing())
        assert partial.put(index, chunks[index]) is new
        assert partial.missing() == expected


def test_an_assembly_goes_on_in_another_process(tmp_path: Path, example: Any) -> None:
    chunks = example.chunks()
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    for count, index in enumerate(order):
        store = ArtifactStore(tmp_path)
        partial = store.partial(example.id) if count else store.begin(example.encoded)
        assert store.begin(example.encoded) is partial
        missing = {chunk for start, end in partial.missing() for chunk in range(start, end)}
        assert missing == set(order[count:])
        partial.put(index, chunks[index])
        store.close()
    store = ArtifactStore(tmp_path)
    assert store.partial(example.id).missing() == []
    example.check(store.commit(example.id, None))
    store.close()
    store = ArtifactStore(tmp_path)
    example.check(store.get(example.id))
    store.close()


def test_the_senders_account_and_the_traffic_are_kept(tmp_path: Path, example: Any) -> None:
    store = ArtifactStore(tmp_path)
    store.begin(example.encoded).count(received=3000, control=50)
    store.close()
    store = ArtifactStore(tmp_path)
    partial = store.begin(example.encoded)
    partial.count(received=len(example.payload), control=7)
    example.put_into(partial)
    record = store.commit(example.id, ACCOUNT).record
    assert record.account == ACCOUNT
    assert record.traffic is not None
    assert record.traffic.manifest_bytes == len(example.encoded)
    assert record.traffic.payload_bytes == len(example.payload)
    assert record.traffic.received_bytes == 3000 + len(example.payload)
    assert record.traffic.control_bytes == 57
    assert record.verify_ms > 0
    assert store.get(example.id).record == record
    store.close()


def test_a_plan_that_does_not_hold_together_begins_nothing(store: ArtifactStore, example: Any) -> None:
    wrong = encode(replace(example.manifest, sections=example.manifest.sections[:-1]))
    with pytest.raises(ManifestError):
        store.begin(wrong)
    with pytest.raises(ManifestError):
        store.begin(example.encoded[:-1])
    assert not list((store.root / "partial").iterdir())


def test_a_payload_without_room_begins_nothing(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=len(example.payload) - 1))
    with pytest.raises(StoreError) as caught:
        store.begin(example.encoded)
    assert caught.value.fields == {"value": len(example.payload), "limit": len(example.payload) - 1}
    assert not list((store.root / "partial").iterdir())


def test_an_offer_begins_only_what_is_not_published(store: ArtifactStore, example: Any) -> None:
    partial = store.offer(example.encoded)
    assert partial is store.partial(example.id)
    example.put_into(partial)
    stored = store.commit(example.id, None)
    assert store.offer(example.encoded) is None
    assert not list((store.root / "partial").iterdir())
    stored.payload_path.write_bytes(b"cut short")
    again = store.offer(example.encoded)
    assert again is not None
    assert again.missing() == [(0, 12)]
    assert [*store.quarantined()] == [example.id]


# Dropping, committing again


def test_drop_removes_a_published_artifact(store: ArtifactStore, example: Any) -> None:
    example.received_by(store)
    store.drop(example.id)
    assert store.ids() == []
    for call in (store.get, store.partial, store.drop, lambda artifact_id: store.commit(artifact_id, None)):
        with pytest.raises(NotFoundError, match=example.id.hex()):
            call(example.id)
    assert not list((store.root / "aside").iterdir())
    example.check(example.received_by(store))


def test_drop_removes_an_assembly(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    partial.put(0, example.chunks()[0])
    store.drop(example.id)
    for call in (lambda: partial.put(1, example.chunks()[1]), lambda: partial.count(1, 1)):
        with pytest.raises(StoreError, match="committed or dropped"):
            call()
    with pytest.raises(NotFoundError):
        store.partial(example.id)
    assert not list((store.root / "partial").iterdir())
    assert store.begin(example.encoded).missing() == [(0, 12)]


def test_drop_removes_an_assembly_of_an_earlier_process(tmp_path: Path, example: Any) -> None:
    store = ArtifactStore(tmp_path)
    store.begin(example.encoded)
    store.close()
    store = ArtifactStore(tmp_path)
    store.drop(example.id)
    assert not list((tmp_path / "partial").iterdir())
    store.close()


def test_what_was_never_offered_is_not_found(store: ArtifactStore) -> None:
    for call in (store.get, store.partial, store.drop, lambda artifact_id: store.commit(artifact_id, None)):
        with pytest.raises(NotFoundError):
            call(b"\x01" * 32)


def test_committing_twice_keeps_the_artifact(store: ArtifactStore, example: Any) -> None:
    first = example.received_by(store)
    with pytest.raises(NotFoundError):
        store.commit(example.id, None)
    example.check(store.get(example.id))
    # Sent once more from the beginning, it is the same artifact with its first record.
    again = example.received_by(store)
    assert again.record == first.record
    example.check(again)
    assert not list((store.root / "partial").iterdir())


def test_a_put_after_commit_is_refused(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    store.commit(example.id, None)
    with pytest.raises(StoreError, match="committed or dropped"):
        partial.put(0, example.chunks()[0])
    with pytest.raises(StoreError, match="committed or dropped"):
        partial.verify()


def test_an_assembly_that_took_the_place_of_the_verified_one_is_not_published(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.put_into(store.begin(example.encoded))
    verify = Partial.verify

    def overtaken(self: Partial) -> None:
        verify(self)
        store.drop(example.id)
        store.begin(example.encoded)

    monkeypatch.setattr(Partial, "verify", overtaken)
    with pytest.raises(StoreError):
        store.commit(example.id, None)
    assert store.ids() == []
    assert store.partial(example.id).missing() == [(0, 12)]
