"""The power goes between any two steps on disk: nothing half made is ever seen, and everything can be done again.

Every function of the operating system that changes a directory or a file is counted. At the chosen step, and at all
that follow, it raises instead of acting, so that no clean-up reaches the disk either. Then the store is opened anew.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import IntegrityError, NotFoundError
from kvferry.core.store import ArtifactStore

STEPS = ("mkdir", "rename", "replace", "unlink", "rmdir", "truncate", "ftruncate", "pwrite", "open", "fsync")
MOST_STEPS = 200


class PowerCut(BaseException):
    """No Exception: nothing in the store may catch it."""


class Disk:
    """Counts the steps of the functions it replaces and fails from ``last`` on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self.last = MOST_STEPS
        for name in STEPS:
            patch.setattr(os, name, self._counted(getattr(os, name) if name != "fsync" else lambda _: None))
        opened = self._counted(builtins.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if self.done >= self.last:
                raise PowerCut
            self.done += 1
            return function(*args, **options)

        return step


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@contextlib.contextmanager
def opened(root: Path) -> Iterator[ArtifactStore]:
    store = ArtifactStore(root)
    try:
        yield store
    finally:
        store.close()


def receive(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded)
    chunks = example.chunks()
    for start, end in partial.missing():
        for index in range(start, end):
            partial.put(index, chunks[index])
    store.commit(example.id, None)


def make(store: ArtifactStore, example: Any) -> None:
    store.create(
        example.contents,
        example.manifest.payload.chunk_size,
        lambda sections, payload: msgspec.structs.replace(example.manifest, sections=sections, payload=payload),
    )


def receive_and_drop(store: ArtifactStore, example: Any) -> None:
    receive(store, example)
    store.drop(example.id)


def begin_and_drop(store: ArtifactStore, example: Any) -> None:
    store.begin(example.encoded).put(0, example.chunks()[0])
    store.drop(example.id)


def receive_again(store: ArtifactStore, example: Any) -> None:
    make(store, example)
    receive(store, example)


def check_all_or_nothing(store: ArtifactStore, example: Any) -> bool:
    """Every id listed can be read whole; what is not listed is not found."""
    assert store.ids() in ([], [example.id])
    assert not list((store.root / "aside").iterdir())
    if not store.ids():
        with pytest.raises(NotFoundError):
            store.get(example.id)
        return False
    sections = store.get(example.id).sections
    assert all(sections.read(content.name) == content.data for content in example.contents)
    return True


@pytest.mark.parametrize("action", [make, receive, receive_again, receive_and_drop, begin_and_drop])
def test_a_crash_at_any_step(disk: Disk, tmp_path: Path, text_example: Callable[..., Any], action: Any) -> None:
    example = text_example()
    assert len(example.chunks()) == 5
    outcomes = []
    for step in range(MOST_STEPS):
        root = tmp_path / str(step)
        with opened(root) as store:
            disk.last = disk.done + step
            try:
                action(store, example)
            except PowerCut:
                crashed = True
            else:
                crashed = False
            disk.last, disk.done = MOST_STEPS * 100, 0
        with opened(root) as store:
            outcomes.append(check_all_or_nothing(store, example))
            if not outcomes[-1]:
                receive(store, example)
            assert check_all_or_nothing(store, example)
            assert not list((root / "partial").iterdir()) or action is receive_again
        if not crashed:
            break
    # It did crash, everywhere up to the end, and there is one step before which nothing and after which all is seen.
    assert not crashed
    assert step > 5
    if action in (make, receive):
        assert outcomes == sorted(outcomes)
        assert outcomes[-1]


def test_what_arrived_before_the_crash_is_not_sent_again(
    disk: Disk, tmp_path: Path, kv_example: Callable[..., Any]
) -> None:
    example = kv_example()
    chunks = example.chunks()
    with opened(tmp_path) as store:
        partial = store.begin(example.encoded)
        partial.put(0, chunks[0])
        partial.put(5, chunks[5])
        disk.last = disk.done + 1
        with pytest.raises(PowerCut):
            partial.put(7, chunks[7])
        disk.last = MOST_STEPS * 100
    with opened(tmp_path) as store:
        # The bytes of chunk 7 are there, the note that they are is not: it counts as missing.
        assert store.partial(example.id).missing() == [(1, 5), (6, 12)]


def test_an_assembly_whose_manifest_was_lost_or_damaged_is_mended_by_offering_it_again(
    tmp_path: Path, kv_example: Callable[..., Any]
) -> None:
    example = kv_example()
    path = tmp_path / "partial" / example.id.hex() / "manifest.msgpack"
    damages: list[Callable[[], object]] = [
        path.unlink,
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(example.encoded.replace(b"0.32.4", b"0.32.5")),
    ]
    for damage in damages:
        with opened(tmp_path) as store:
            store.begin(example.encoded).put(3, example.chunks()[3])
        damage()
        with opened(tmp_path) as store:
            assert store.begin(example.encoded).missing() == [(0, 3), (4, 12)]
            receive(store, example)
            assert check_all_or_nothing(store, example)
            store.drop(example.id)


def test_a_damaged_manifest_never_stands_for_its_artifact(tmp_path: Path, kv_example: Callable[..., Any]) -> None:
    example = kv_example()
    with opened(tmp_path) as store:
        store.begin(example.encoded)
    path = tmp_path / "partial" / example.id.hex() / "manifest.msgpack"
    path.write_bytes(example.encoded.replace(b"0.32.4", b"0.32.5"))
    with opened(tmp_path) as store:
        for call in (store.partial, lambda artifact_id: store.commit(artifact_id, None)):
            with pytest.raises(IntegrityError, match="manifest on disk has changed"):
                call(example.id)
        assert len(list((tmp_path / "partial").iterdir())) == 1


def test_leftovers_are_cleared_at_start(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / "aside" / "half").mkdir()
    (tmp_path / "aside" / "half" / "payload.safetensors").write_bytes(b"half")
    (tmp_path / "aside" / "file").touch()
    with opened(tmp_path):
        assert not list((tmp_path / "aside").iterdir())


def test_a_crash_while_clearing_leftovers_does_no_harm(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / "aside").rmdir()
    with opened(tmp_path) as store:
        assert store.ids() == []
        assert (tmp_path / "aside").is_dir()
