"""Quotas of the store: what a token has stored counts against it, on its way in, published, and after a restart."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import manifest
from kvferry.core.errors import QuotaError
from kvferry.core.store import ArtifactStore
from kvferry.core.tokens import Token

Example = Any


def token(name: str = "studio", **limits_of: int) -> Token:
    return Token(name=name, digest="0" * 64, **limits_of)  # type: ignore[arg-type]


@pytest.fixture
def examples(text_example: Callable[..., Example]) -> list[Example]:
    """Artifacts of 3 KB each, all different."""
    return [text_example(text=f"document {number} ".encode() * 200) for number in range(4)]


Open = Callable[[], ArtifactStore]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the store, as a process does that was started again."""
    opened: list[ArtifactStore] = []

    def run() -> ArtifactStore:
        if opened:
            opened[-1].close()
        opened.append(ArtifactStore(tmp_path))
        return opened[-1]

    yield run
    for store in opened:
        store.close()


def size(example: Example) -> int:
    return len(example.encoded) + example.manifest.payload.length


def identity(example: Example) -> bytes:
    return manifest.artifact_id(example.encoded)


def deliver(store: ArtifactStore, example: Example, owner: Token | None) -> None:
    partial = store.begin(example.encoded, owner)
    for index, (start, end) in enumerate(partial.plan.ranges):
        partial.put(index, example.payload[start:end])
    store.commit(identity(example), None)


def test_the_number_of_artifacts_is_limited(tmp_path: Path, reopen: Open, examples: list[Example]) -> None:
    store = reopen()
    owner = token(max_artifacts=2)
    deliver(store, examples[0], owner)
    store.begin(examples[1].encoded, owner)
    with pytest.raises(QuotaError) as caught:
        store.begin(examples[2].encoded, owner)
    assert caught.value.fields == {
        "field": "max_artifacts",
        "token": "studio",
        "current": 2,
        "asked": 1,
        "limit": 2,
    }
    assert not caught.value.retryable
    assert not (tmp_path / "partial" / identity(examples[2]).hex()).exists()


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_bytes_are_counted_as_declared_before_any_has_come(
    reopen: Open, examples: list[Example], spare: int, *, fits: bool
) -> None:
    store = reopen()
    first, second = examples[:2]
    owner = token(max_bytes=size(first) + size(second) + spare)
    store.begin(first.encoded, owner)
    if fits:
        store.begin(second.encoded, owner)
    else:
        with pytest.raises(QuotaError) as caught:
            store.begin(second.encoded, owner)
        fields = caught.value.fields
        assert (fields["current"], fields["asked"], fields["limit"]) == (size(first), size(second), owner.max_bytes)
        assert all(str(value) in caught.value.message for value in (size(first), size(second), owner.max_bytes))


@pytest.mark.parametrize("when", ["partial", "published"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_dropped_artifact_gives_its_share_back(
    reopen: Open, examples: list[Example], when: str, *, restart: bool
) -> None:
    store = reopen()
    owner = token(max_artifacts=1, max_bytes=size(examples[0]) + 100)
    if when == "partial":
        store.begin(examples[0].encoded, owner)
    else:
        deliver(store, examples[0], owner)
    if restart:
        store = reopen()
    with pytest.raises(QuotaError):
        store.begin(examples[1].encoded, owner)
    store.drop(identity(examples[0]))
    deliver(store, examples[1], owner)
    assert store.get(identity(examples[1])).record.owner == "studio"


def test_a_restart_counts_the_same_bytes(reopen: Open, examples: list[Example]) -> None:
    store = reopen()
    deliver(store, examples[0], token())
    store.begin(examples[1].encoded, token())
    total = size(examples[0]) + size(examples[1])
    with pytest.raises(QuotaError) as caught:
        reopen().begin(examples[2].encoded, token(max_bytes=0))
    assert caught.value.fields["current"] == total


def test_each_token_has_a_share_of_its_own(reopen: Open, examples: list[Example]) -> None:
    store = reopen()
    store.begin(examples[0].encoded, token("studio", max_artifacts=1))
    store.begin(examples[1].encoded, token("laptop", max_artifacts=1))
    for number, name in itertools.product((2, 3), ("studio", "laptop")):
        with pytest.raises(QuotaError, match=name):
            store.begin(examples[number].encoded, token(name, max_artifacts=1))
    store.begin(examples[2].encoded)
    store.begin(examples[3].encoded, token("boundless"))


def test_an_artifact_belongs_to_whoever_offered_it_first(reopen: Open, examples: list[Example]) -> None:
    store = reopen()
    owner, other = token("studio", max_artifacts=1), token("laptop", max_artifacts=0)
    store.begin(examples[0].encoded, owner)
    # A second offer resumes what is there and costs nobody anything, also after a restart.
    store.begin(examples[0].encoded, other)
    store = reopen()
    store.begin(examples[0].encoded, other)
    deliver(store, examples[0], other)
    assert store.get(identity(examples[0])).record.owner == "studio"


def test_what_was_stored_without_a_token_counts_against_none(reopen: Open, examples: list[Example]) -> None:
    store = reopen()
    deliver(store, examples[0], None)
    assert store.get(identity(examples[0])).record.owner is None
    store = reopen()
    store.begin(examples[1].encoded, token(max_artifacts=1))


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_put_aside_counts_until_a_new_copy_replaces_it(
    reopen: Open, examples: list[Example], *, restart: bool
) -> None:
    store = reopen()
    owner = token(max_artifacts=1, max_bytes=size(examples[0]))
    deliver(store, examples[0], owner)
    store.quarantine(identity(examples[0]), "a digest differs")
    if restart:
        store = reopen()
    with pytest.raises(QuotaError):
        store.begin(examples[1].encoded, owner)
    deliver(store, examples[0], owner)
    assert store.get(identity(examples[0])).record.owner == "studio"
    with pytest.raises(QuotaError) as caught:
        store.begin(examples[1].encoded, owner)
    assert caught.value.fields["current"] == 1


def test_offers_at_the_same_time_do_not_slip_through(
    tmp_path: Path, reopen: Open, text_example: Callable[..., Example]
) -> None:
    store = reopen()
    offers = [text_example(text=f"offer {number}".encode()).encoded for number in range(16)]
    owner = token(max_artifacts=3)
    outcomes: list[bool] = []

    def offer(encoded: bytes) -> None:
        try:
            store.begin(encoded, owner)
        except QuotaError:
            outcomes.append(False)
        else:
            outcomes.append(True)

    threads = [threading.Thread(target=offer, args=(encoded,)) for encoded in offers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(True) == 3
    assert len(list((tmp_path / "partial").iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"owner": 3}', None])
def test_a_damaged_owner_does_not_keep_the_store_shut(
    tmp_path: Path, reopen: Open, examples: list[Example], damage: bytes | None
) -> None:
    store = reopen()
    path = store.begin(examples[0].encoded, token()).path
    store.close()
    if damage is None:
        (path / "owner").unlink()
    else:
        (path / "owner").write_bytes(damage)
    (tmp_path / "artifacts" / ".DS_Store").write_bytes(b"x")
    store = reopen()
    deliver(store, examples[0], token())
    assert store.ids() == [identity(examples[0])]
