"""A store with a budget and a time to live: what is evicted, what stays, and that disk and quotas get it back."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import NotFoundError, QuotaError, StoreError, TooLargeError
from kvferry.core.store import ArtifactStore
from kvferry.core.tokens import Token

Examples = Callable[[int], list[Any]]


@pytest.fixture
def examples(text_example: Callable[..., Any]) -> Examples:
    """Return a factory of different text artifacts of one size."""
    return lambda count: [text_example(f"{number:04}".encode() * 500) for number in range(count)]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ArtifactStore]]:
    """Return a factory of stores on one directory; opening it again closes it first."""
    stores: list[ArtifactStore] = []

    def build(**options: Any) -> ArtifactStore:
        if stores:
            stores[-1].close()
        stores.append(ArtifactStore(tmp_path / "store", **options))
        return stores[-1]

    yield build
    if stores:
        stores[-1].close()


def size(example: Any) -> int:
    return len(example.encoded) + len(example.payload)


def token(name: str = "ada", max_artifacts: int | None = None, max_bytes: int | None = None) -> Token:
    return msgspec.convert(
        {"name": name, "digest": "0" * 64, "max_artifacts": max_artifacts, "max_bytes": max_bytes}, Token, strict=False
    )


def disk(store: ArtifactStore) -> int:
    """Return the bytes of all manifests and payloads, wherever they lie."""
    files = [path for path in store.root.rglob("*") if path.suffix in (".msgpack", ".safetensors")]
    return sum(path.stat().st_size for path in files)


def make(store: ArtifactStore, example: Any) -> None:
    manifest = example.manifest
    store.create(
        example.contents,
        manifest.payload.chunk_size,
        lambda sections, payload: msgspec.structs.replace(manifest, sections=sections, payload=payload),
    )


def set_age(store: ArtifactStore, example: Any, seconds: float, folder: str = "artifacts") -> None:
    """Let an artifact have been used that long ago, as far as the disk knows."""
    path = store.root / folder / example.id.hex()
    then = path.stat().st_mtime - seconds
    for entry in (*path.iterdir(), path):
        os.utime(entry, (then, then))


def use(store: ArtifactStore, example: Any) -> None:
    with store.pinned(example.id):
        store.get(example.id)


def ids(*examples: Any) -> list[bytes]:
    return sorted(example.id for example in examples)


# Eviction


@pytest.mark.parametrize("arrive", ["received", "made"])
def test_the_least_recently_used_goes_and_its_bytes_with_it(
    opened: Callable[..., ArtifactStore], examples: Examples, arrive: str
) -> None:
    first, second, third, fourth = examples(4)
    store = opened(budget=3 * size(first))
    for example in (first, second, third):
        example.received_by(store)
    use(store, first)
    (make(store, fourth) if arrive == "made" else fourth.received_by(store))
    assert store.ids() == ids(first, third, fourth)
    assert disk(store) == 3 * size(first)
    assert store.evictions == 1
    with pytest.raises(NotFoundError):
        store.get(second.id)
    fourth.check(store.get(fourth.id))


def test_header_and_manifest_count(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second = examples(2)
    store = opened(budget=2 * size(first) - 1)
    for example in (first, second):
        make(store, example)
    assert store.ids() == [second.id]
    assert disk(store) <= 2 * size(first) - 1


def test_what_is_too_large_evicts_nothing(
    opened: Callable[..., ArtifactStore], examples: Examples, text_example: Callable[..., Any]
) -> None:
    first, second = examples(2)
    store = opened(budget=2 * size(first))
    for example in (first, second):
        example.received_by(store)
    huge = text_example(b"x" * 5000)
    for arrive in (lambda: store.begin(huge.encoded), lambda: make(store, huge)):
        with pytest.raises(TooLargeError, match=f"the budget is {2 * size(first)}"):
            arrive()
    assert store.ids() == ids(first, second)
    assert sorted(path.name for path in (store.root / "partial").iterdir()) == []
    assert sorted(path.name for path in (store.root / "aside").iterdir()) == []


def test_an_artifact_in_use_stays(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    for example in (first, second):
        example.received_by(store)
    with store.pinned(first.id):
        use(store, second)
        third.received_by(store)
        assert store.ids() == ids(first, third)
        with store.pinned(third.id), pytest.raises(TooLargeError):
            store.begin(second.encoded)
    second.received_by(store)
    assert store.ids() == ids(second, third)


def test_an_artifact_on_its_way_in_counts_whole(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    first.received_by(store)
    partial = store.begin(second.encoded)
    partial.put(0, second.chunks()[0])
    third.received_by(store)
    assert store.ids() == [third.id]
    for index, chunk in enumerate(second.chunks()):
        partial.put(index, chunk)
    second.check(store.commit(second.id, None))
    assert store.ids() == ids(second, third)


def test_every_chunk_is_a_use(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    """Otherwise two transfers that do not both fit would throw each other out for ever."""
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    store.begin(first.encoded)
    second.received_by(store)
    store.partial(first.id).put(0, first.chunks()[0])
    third.received_by(store)
    assert store.ids() == [third.id]
    assert store.partial(first.id).missing() == [(1, len(first.chunks()))]


def test_an_abandoned_transfer_goes_like_anything_else(
    opened: Callable[..., ArtifactStore], examples: Examples
) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    partial = store.begin(first.encoded)
    second.received_by(store)
    third.received_by(store)
    assert store.ids() == ids(second, third)
    assert list((store.root / "partial").iterdir()) == []
    with pytest.raises(StoreError, match="committed or dropped"):
        partial.put(0, first.chunks()[0])
    with pytest.raises(NotFoundError):
        store.partial(first.id)


def test_a_copy_put_aside_and_its_replacement_count_both(
    opened: Callable[..., ArtifactStore], examples: Examples
) -> None:
    first, second, third = examples(3)
    store = opened(budget=3 * size(first))
    for example in (first, second):
        example.received_by(store)
    store.quarantine(first.id, "tested")
    store.begin(first.encoded)
    assert disk(store) == 3 * size(first)
    third.received_by(store)
    assert disk(store) <= 3 * size(first)
    assert store.ids() == [third.id]
    first.received_by(store)
    assert disk(store) == 2 * size(first)


def test_what_was_put_aside_is_evicted_too(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    for example in (first, second):
        example.received_by(store)
    store.quarantine(first.id, "tested")
    third.received_by(store)
    assert store.quarantined() == {}
    assert store.ids() == ids(second, third)
    with pytest.raises(NotFoundError):
        store.get(first.id)


def test_making_the_same_again_in_a_full_store_needs_no_room(
    opened: Callable[..., ArtifactStore], examples: Examples
) -> None:
    first, second = examples(2)
    store = opened(budget=2 * size(first))
    for example in (first, second):
        make(store, example)
    make(store, second)
    assert second.id in store.ids()
    assert disk(store) <= 2 * size(first)
    second.check(store.get(second.id))


def test_files_removed_by_hand_are_no_obstacle(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    for example in (first, second):
        example.received_by(store)
    (store.root / "artifacts" / first.id.hex()).rename(store.root / "elsewhere")
    third.received_by(store)
    assert store.ids() == ids(second, third)
    assert store.evictions == 0


# A disk with less room than the budget


def allocated(store: ArtifactStore, example: Any) -> int:
    """Return what the disk has of an artifact, all copies of it."""
    copies = store.root.glob(f"*/{example.id.hex()}/*")
    return sum(path.stat().st_blocks * 512 for path in copies)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that says how much the disk has free."""
    usage = shutil.disk_usage("/")
    return lambda count: monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=count))


@pytest.mark.parametrize("arrive", ["received", "made"])
@pytest.mark.parametrize("room", [-1, 0])
def test_what_the_disk_has_no_room_for_evicts_nothing(
    opened: Callable[..., ArtifactStore],
    examples: Examples,
    text_example: Callable[..., Any],
    free: Callable[[int], None],
    arrive: str,
    room: int,
) -> None:
    """Of two artifacts the older one must go, and what it has on disk comes back."""
    first, second = examples(2)
    large = text_example(b"x" * 100_000)
    store = opened(budget=size(second) + size(large))
    for example in (first, second):
        example.received_by(store)
    act = (lambda: make(store, large)) if arrive == "made" else (lambda: store.begin(large.encoded))
    given_back = allocated(store, first)
    assert 0 < given_back < len(large.payload)
    free(len(large.payload) - given_back + room)
    if room < 0:
        with pytest.raises(StoreError, match=f"{given_back} more after evicting") as caught:
            act()
        assert caught.value.fields == {"value": len(large.payload), "limit": len(large.payload) - 1}
        assert store.ids() == ids(first, second)
        assert store.evictions == 0
        for example in (first, second):
            example.check(store.get(example.id))
        assert list((store.root / "partial").iterdir()) == []
        assert list((store.root / "aside").iterdir()) == []
    else:
        act()
        assert store.evictions == 1
        assert first.id not in store.ids()
        assert second.id in store.ids()


def test_an_assembly_gives_back_what_it_has_on_disk_not_what_it_declares(
    opened: Callable[..., ArtifactStore], text_example: Callable[..., Any], free: Callable[[int], None]
) -> None:
    first, second = (text_example(letter * 300_000) for letter in (b"x", b"y"))
    store = opened(budget=size(second))
    store.begin(first.encoded).put(0, first.chunks()[0])
    free(len(second.payload) - allocated(store, first) - 1)
    with pytest.raises(StoreError, match="are free"):
        store.begin(second.encoded)
    assert store.partial(first.id).missing() == [(1, len(first.chunks()))]
    free(len(second.payload) - allocated(store, first))
    store.begin(second.encoded)
    with pytest.raises(NotFoundError):
        store.partial(first.id)


def test_what_was_put_aside_gives_its_bytes_back_too(
    opened: Callable[..., ArtifactStore],
    examples: Examples,
    text_example: Callable[..., Any],
    free: Callable[[int], None],
) -> None:
    (first,) = examples(1)
    large = text_example(b"x" * 100_000)
    store = opened(budget=size(large))
    first.received_by(store)
    store.quarantine(first.id, "tested")
    free(len(large.payload) - allocated(store, first))
    store.begin(large.encoded)
    assert store.quarantined() == {}


# Quotas


def test_eviction_gives_the_owner_room(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    owner = token(max_artifacts=2, max_bytes=2 * size(first))
    for example in (first, second):
        example.put_into(store.begin(example.encoded, owner))
        store.commit(example.id, None)
    with pytest.raises(QuotaError, match="max_artifacts"):
        store.begin(third.encoded, owner)
    # Somebody else's artifact pushes the first one out.
    third.received_by(store)
    store.drop(third.id)
    third.put_into(store.begin(third.encoded, owner))
    assert store.commit(third.id, None).record.owner == "ada"
    with pytest.raises(QuotaError):
        store.begin(first.encoded, owner)


def test_a_refused_quota_evicts_nothing(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    first, second, third = examples(3)
    store = opened(budget=2 * size(first))
    for example in (first, second):
        example.received_by(store)
    with pytest.raises(QuotaError):
        store.begin(third.encoded, token(max_bytes=10))
    assert store.ids() == ids(first, second)


# Time to live


class Clock:
    now = 5000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr("kvferry.core.retention.time.monotonic", ticking)
    return ticking


@pytest.fixture
def mortal(opened: Callable[..., ArtifactStore], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """A store in which everything lives for a minute."""
    store = opened(ttl_seconds=60)
    monkeypatch.setattr(store._retention, "_clock", clock)
    return store


def test_what_nobody_asks_for_expires(mortal: ArtifactStore, clock: Clock, examples: Examples) -> None:
    first, second, third = examples(3)
    first.received_by(mortal)
    clock.now += 40
    second.received_by(mortal)
    third.put_into(mortal.begin(third.encoded))
    use(mortal, first)
    clock.now += 59
    assert mortal.ids() == ids(first, second)
    clock.now += 2
    assert mortal.ids() == []
    assert disk(mortal) == 0
    with pytest.raises(NotFoundError):
        mortal.commit(third.id, None)
    assert mortal.evictions == 3


def test_an_expired_artifact_is_not_found_although_nobody_looked(
    mortal: ArtifactStore, clock: Clock, examples: Examples
) -> None:
    (first,) = examples(1)
    first.received_by(mortal)
    clock.now += 61
    with pytest.raises(NotFoundError):
        mortal.get(first.id)


def test_a_long_transfer_is_in_use(mortal: ArtifactStore, clock: Clock, examples: Examples) -> None:
    (first,) = examples(1)
    mortal.begin(first.encoded)
    for index, chunk in enumerate(first.chunks()):
        clock.now += 45
        mortal.partial(first.id).put(index, chunk)
        assert mortal.ids() == []
    clock.now += 45
    first.check(mortal.commit(first.id, None))


def test_a_long_answer_is_in_use(mortal: ArtifactStore, clock: Clock, examples: Examples) -> None:
    (first,) = examples(1)
    first.received_by(mortal)
    with mortal.pinned(first.id):
        clock.now += 1000
        assert mortal.ids() == [first.id]
    assert mortal.ids() == []


# Restarts


def test_ages_survive_a_restart(opened: Callable[..., ArtifactStore], examples: Examples) -> None:
    oldest, used, other, late = examples(4)
    store = opened()
    for example in (used, oldest, other):
        example.received_by(store)
    for age, example in ((3000, oldest), (2000, used), (1000, other)):
        set_age(store, example, age)
    use(store, oldest)
    store = opened(budget=3 * size(oldest), ttl_seconds=1500)
    assert store.ids() == ids(oldest, other)
    store = opened(budget=2 * size(oldest))
    late.received_by(store)
    assert store.ids() == ids(oldest, late)


def test_a_smaller_budget_takes_effect_when_something_comes(
    opened: Callable[..., ArtifactStore], examples: Examples
) -> None:
    first, second, third = examples(3)
    store = opened()
    for age, example in ((30, first), (20, second)):
        example.received_by(store)
        set_age(store, example, age)
    store = opened(budget=size(first))
    assert store.ids() == ids(first, second)
    third.received_by(store)
    assert store.ids() == [third.id]


def test_an_abandoned_transfer_of_an_earlier_process_ages(
    opened: Callable[..., ArtifactStore], examples: Examples
) -> None:
    first, second = examples(2)
    store = opened()
    store.begin(first.encoded).put(0, first.chunks()[0])
    store.begin(second.encoded)
    set_age(store, second, 500, "partial")
    store = opened(ttl_seconds=400)
    store.sweep()
    assert [path.name for path in (store.root / "partial").iterdir()] == [first.id.hex()]
    assert store.partial(first.id).missing() == [(1, len(first.chunks()))]


def test_the_owner_of_what_was_put_aside_is_still_charged_after_a_restart(
    opened: Callable[..., ArtifactStore], examples: Examples
) -> None:
    first, second = examples(2)
    owner = token(max_artifacts=1)
    store = opened()
    first.put_into(store.begin(first.encoded, owner))
    store.commit(first.id, None)
    store.quarantine(first.id, "tested")
    for _ in range(2):
        with pytest.raises(QuotaError):
            store.begin(second.encoded, owner)
        store = opened()
    # What replaces it is the same artifact.
    first.put_into(store.begin(first.encoded, owner))
    assert store.commit(first.id, None).record.owner == "ada"
    with contextlib.suppress(NotFoundError):
        store.drop(first.id)
    store.begin(second.encoded, owner)
