"""More artifacts on their way in than may have their files open: idle ones are closed, and nothing of them is lost."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.core import limits
from kvferry.core.errors import BusyError, IntegrityError, NotFoundError, StoreError, TransferError
from kvferry.core.partial import Partial
from kvferry.core.store import ArtifactStore
from kvferry.core.tokens import Token

ADA = msgspec.convert({"name": "ada", "digest": "0" * 64, "max_artifacts": 3}, Token)


class Files:
    """Which assemblies have files open, and how many were open at once at most."""

    def __init__(self) -> None:
        self.now: set[Partial] = set()
        self.most = 0

    def opened(self, partial: Partial) -> None:
        self.now.add(partial)
        self.most = max(self.most, len(self.now))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    watched, start, close = Files(), Partial.__init__, Partial.close

    def opening(self: Partial, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        watched.opened(self)

    def closing(self: Partial) -> None:
        close(self)
        watched.now.discard(self)

    monkeypatch.setattr(Partial, "__init__", opening)
    monkeypatch.setattr(Partial, "close", closing)
    return watched


@pytest.fixture
def examples(kv_example: Callable[..., Any]) -> list[Any]:
    return [kv_example(tokens=tokens) for tokens in range(40, 48)]


@pytest.fixture
def at_most(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(limits, "MAX_PARTIALS", count)


@pytest.fixture
def store(tmp_path: Path, files: Files) -> Iterator[ArtifactStore]:
    with contextlib.closing(ArtifactStore(tmp_path / "store", durable=False)) as opened:
        yield opened
    assert not files.now


def receive(store: ArtifactStore, example: Any, index: int) -> None:
    """Take one chunk in, as a receiver does."""
    data = example.chunks()[index]
    with store.assembly(example.id) as partial:
        partial.count(len(data), 1)
        partial.put(index, data)


def test_abandoned_transfers_keep_nobody_out_and_lose_nothing(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], files: Files
) -> None:
    at_most(2)
    for number, example in enumerate(examples):
        store.begin(example.encoded)
        receive(store, example, number)
    assert files.most == 2
    # Their senders come back, in turn for every chunk.
    for number, example in enumerate(examples):
        runs = [(0, number), (number + 1, len(example.chunks()))]
        assert store.begin(example.encoded).missing() == [run for run in runs if run[0] < run[1]]
    for index in range(len(examples[0].chunks())):
        for number, example in enumerate(examples):
            if index != number:
                receive(store, example, index)
    for example in examples:
        record = store.commit(example.id, None).record
        example.check(store.get(example.id))
        assert record.traffic is not None
        assert record.traffic.received_bytes == len(example.payload)
        assert record.traffic.control_bytes == len(example.chunks())
    assert files.most == 2


def test_the_least_recently_used_is_closed(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], files: Files
) -> None:
    at_most(3)
    first, second, third = (store.begin(example.encoded) for example in examples[:3])
    store.partial(examples[0].id)
    receive(store, examples[1], 0)
    fourth = store.begin(examples[3].encoded)
    assert files.now == {first, second, fourth}
    store.begin(examples[1].encoded)
    assert third not in files.now
    with pytest.raises(StoreError):
        third.put(0, examples[2].chunks()[0])
    reopened = store.partial(examples[2].id)
    assert files.now == {second, fourth, reopened}


def test_what_a_call_is_using_is_not_closed_however_old(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], files: Files
) -> None:
    at_most(2)
    store.begin(examples[0].encoded)
    with store.assembly(examples[0].id) as held, store.assembly(examples[0].id):
        for example in examples[1:]:
            idle = store.begin(example.encoded)
            assert files.now == {held, idle}
        receive(store, examples[2], 0)
        held.put(0, examples[0].chunks()[0])
        assert store.partial(examples[0].id) is held
    receive(store, examples[3], 0)
    receive(store, examples[4], 0)
    assert held not in files.now
    assert store.partial(examples[0].id).missing() == [(1, 12)]


def test_while_calls_use_all_of_them_one_more_is_told_to_come_again(
    tmp_path: Path, examples: list[Any], at_most: Callable[[int], None]
) -> None:
    sizes = [len(example.encoded) + len(example.payload) for example in examples]
    with contextlib.closing(ArtifactStore(tmp_path / "small", budget=sum(sizes[:3]))) as store:
        examples[0].received_by(store)
        at_most(2)
        for example in examples[1:3]:
            store.begin(example.encoded)
        with store.assembly(examples[1].id), store.assembly(examples[2].id):
            with pytest.raises(BusyError, match="2 artifacts are being received") as caught:
                store.offer(examples[3].encoded)
            assert caught.value.retryable
            assert caught.value.fields["retry_after_ms"]
            # It would have needed the room of the one that is published.
            assert store.ids() == [examples[0].id]
            assert len(list((store.root / "partial").iterdir())) == 2
            # Those that are being received go on.
            receive(store, examples[1], 0)
            assert store.begin(examples[2].encoded).missing() == [(0, 12)]
        assert store.offer(examples[3].encoded) is not None


def test_a_commit_keeps_its_files_open(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = examples[:2]
    at_most(1)
    first.put_into(store.begin(first.encoded))
    verify = Partial.verify

    def meanwhile(self: Partial) -> None:
        with pytest.raises(BusyError):
            store.begin(second.encoded)
        verify(self)

    monkeypatch.setattr(Partial, "verify", meanwhile)
    first.check(store.commit(first.id, None))
    store.begin(second.encoded)


def test_a_call_that_failed_uses_nothing_any_more(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], files: Files
) -> None:
    at_most(1)
    first, second = examples[:2]
    held = store.begin(first.encoded)
    with pytest.raises(TransferError):
        store.commit(first.id, None)
    with contextlib.suppress(ValueError), store.assembly(first.id):
        raise ValueError
    store.begin(second.encoded)
    assert held not in files.now
    with store.assembly(second.id) as dropped:
        store.drop(second.id)
        with pytest.raises(StoreError, match="committed or dropped"):
            dropped.put(0, second.chunks()[0])
    store.begin(second.encoded)
    store.begin(first.encoded)


def test_a_closed_one_has_its_owner_and_can_be_dropped(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], files: Files
) -> None:
    at_most(1)
    first, second, third = examples[:3]
    store.begin(first.encoded, ADA)
    store.begin(second.encoded, ADA)
    store.begin(third.encoded)
    for index in range(12):
        receive(store, first, index)
    assert store.commit(first.id, None).record.owner == "ada"
    store.begin(third.encoded)
    store.drop(second.id)
    with pytest.raises(NotFoundError):
        store.partial(second.id)
    assert [path.name for path in (store.root / "partial").iterdir()] == [third.id.hex()]


def test_damage_while_it_was_closed_is_found_by_commit(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None]
) -> None:
    at_most(1)
    first, second = examples[:2]
    partial = store.begin(first.encoded)
    first.put_into(partial)
    store.begin(second.encoded)
    with (partial.path / "payload.safetensors").open("r+b") as file:
        file.seek(first.offset(4))
        file.write(bytes([first.chunks()[4][0] ^ 1]))
    with pytest.raises(IntegrityError, match=r"^chunk 4: "):
        store.commit(first.id, None)
    receive(store, first, 4)
    first.check(store.commit(first.id, None))


def test_many_threads_and_few_open_files(
    store: ArtifactStore, examples: list[Any], at_most: Callable[[int], None], files: Files
) -> None:
    """Every call either succeeds or says that it may be made again; each byte is written and counted once."""
    at_most(3)

    def again(call: Callable[[], Any]) -> Any:
        for _ in itertools.repeat(None, 10_000):
            try:
                return call()
            except BusyError:
                time.sleep(0.0005)
        raise TimeoutError

    def send(number: int) -> None:
        example = examples[number]
        for index in np.random.default_rng(number).permutation(12).tolist():
            again(lambda: store.offer(example.encoded))
            again(lambda index=index: receive(store, example, index))
        traffic = again(lambda: store.commit(example.id, None)).record.traffic
        example.check(store.get(example.id))
        assert (traffic.received_bytes, traffic.control_bytes) == (len(example.payload), 12)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    assert len(store.ids()) == 8
    assert files.most == 3
    assert not files.now
    assert list((store.root / "partial").iterdir()) == []
