"""Files beside the artifacts: one budget, one order of use and one time to live for both."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import store_files
from kvferry.core.digests import digest
from kvferry.core.errors import StoreError, TooLargeError
from kvferry.core.store import ArtifactStore
from kvferry.core.store_files import StoreFiles

A, B, C, D = (letter * 100 for letter in (b"a", b"b", b"c", b"d"))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., ArtifactStore]]:
    """Return a factory of stores on one directory; opening it again closes it first."""
    with contextlib.ExitStack() as stack:

        def build(**options: Any) -> ArtifactStore:
            stack.close()
            return stack.enter_context(contextlib.closing(ArtifactStore(tmp_path / "store", **options)))

        yield build


def keep(files: StoreFiles, *texts: bytes) -> None:
    for text in texts:
        files.write(digest(text), text)


def use(files: StoreFiles, text: bytes) -> None:
    with files.in_use(digest(text)):
        pass


def kept(files: StoreFiles) -> set[bytes]:
    return {files.path(key).read_bytes() for key in files.digests()}


def names(store: ArtifactStore) -> list[str]:
    return sorted(path.name for path in (store.root / "texts").iterdir())


def test_the_least_recently_used_goes_and_no_more_than_must(opened: Callable[..., ArtifactStore]) -> None:
    store = opened(budget=350)
    files = store.files("texts", ".txt")
    keep(files, A, B, C)
    use(files, A)
    keep(files, D)
    assert kept(files) == {A, C, D}
    assert names(store) == sorted(f"{digest(text).hex()}.txt" for text in (A, C, D))
    # No artifact went.
    assert store.evictions == 0


def test_any_number_of_them_stays_within_the_budget(opened: Callable[..., ArtifactStore], tmp_path: Path) -> None:
    files = opened(budget=1000).files("texts")
    for number in range(100):
        keep(files, f"{number}".encode() * 50)
        assert sum(path.stat().st_size for path in (tmp_path / "store" / "texts").iterdir()) <= 1000
    assert f"{99}".encode() * 50 in kept(files)


def test_artifacts_and_files_make_room_for_each_other(
    opened: Callable[..., ArtifactStore], text_example: Callable[..., Any]
) -> None:
    first, second = text_example(b"1" * 500), text_example(b"2" * 500)
    size = len(first.encoded) + len(first.payload)
    store = opened(budget=size + 250)
    files = store.files("texts")
    keep(files, A)
    first.received_by(store)
    keep(files, B)
    use(files, A)
    # B is older than A, and the artifact than both.
    keep(files, C)
    assert (store.ids(), kept(files), store.evictions) == ([], {A, B, C}, 1)
    second.received_by(store)
    assert (store.ids(), kept(files)) == ([second.id], {A, C})
    assert store.evictions == 1


def test_what_does_not_fit_is_refused_and_evicts_nothing(opened: Callable[..., ArtifactStore]) -> None:
    store = opened(budget=250)
    files = store.files("texts")
    keep(files, A, B)
    with pytest.raises(
        TooLargeError, match="^store: 251 bytes do not fit: 0 are in use and the budget is 250$"
    ) as error:
        keep(files, b"x" * 251)
    assert error.value.fields["field"] == "max_store_bytes"
    with files.in_use(digest(A)), files.in_use(digest(B)), pytest.raises(TooLargeError, match="200 are in use"):
        keep(files, C)
    assert kept(files) == {A, B}
    keep(files, C)
    assert kept(files) == {B, C}


def test_what_is_in_use_stays_for_every_user_of_it(opened: Callable[..., ArtifactStore]) -> None:
    files = opened(budget=200).files("texts")
    keep(files, A, B)
    with files.in_use(digest(A)):
        with files.in_use(digest(A)):
            use(files, B)
        keep(files, C)
        assert kept(files) == {A, C}
    use(files, C)
    keep(files, D)
    assert kept(files) == {C, D}


def test_what_is_replaced_needs_no_room_of_its_own(opened: Callable[..., ArtifactStore]) -> None:
    files = opened(budget=250).files("texts")
    key = digest(A)
    files.write(key, b"x" * 200)
    with files.in_use(key):
        files.write(key, b"y" * 240)
    assert files.path(key).read_bytes() == b"y" * 240
    files.write(key, A)
    # What it gave back is free.
    keep(files, B)
    assert kept(files) == {A, B}


def test_what_was_removed_gives_its_room_back(opened: Callable[..., ArtifactStore]) -> None:
    files = opened(budget=200).files("texts")
    keep(files, A, B)
    for _ in range(2):
        files.remove(digest(B))
    keep(files, C)
    assert kept(files) == {A, C}
    # By hand: there is nothing to remove when its turn comes.
    files.path(digest(A)).unlink()
    keep(files, D, B)
    assert kept(files) == {D, B}


def test_a_restart_counts_what_is_there_and_remembers_its_use(opened: Callable[..., ArtifactStore]) -> None:
    files = opened(budget=300).files("texts")
    keep(files, A, B, C)
    for age, text in ((500, A), (900, B), (700, C)):
        path = files.path(digest(text))
        os.utime(path, (path.stat().st_mtime - age, path.stat().st_mtime - age))
    changed = files.path(digest(B)).stat().st_mtime_ns
    use(files, B)
    # A use is no change.
    assert files.path(digest(B)).stat().st_mtime_ns == changed
    files = opened(budget=300).files("texts")
    keep(files, D)
    assert kept(files) == {A, B, D}


def test_a_store_that_was_fuller_than_its_budget_is_brought_down(opened: Callable[..., ArtifactStore]) -> None:
    keep(opened().files("texts"), A, B, C, D)
    files = opened(budget=150).files("texts")
    keep(files, A)
    assert kept(files) == {A}


def test_what_nobody_uses_expires(opened: Callable[..., ArtifactStore], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    store = opened(ttl_seconds=60)
    monkeypatch.setattr(store._retention, "_clock", lambda: now[0])
    files = store.files("texts")
    keep(files, A, B, C)
    now[0] += 50
    use(files, A)
    with files.in_use(digest(B)):
        now[0] += 50
        store.sweep()
        assert kept(files) == {A, B}
    now[0] += 1
    # It is gone also for who asks for it, so that what expires does not depend on when somebody looked.
    with files.in_use(digest(B)) as path:
        assert path.exists()
    now[0] += 61
    with files.in_use(digest(A)) as path:
        assert not path.exists()
    assert kept(files) == set()


def test_a_time_to_live_goes_on_after_a_restart(opened: Callable[..., ArtifactStore]) -> None:
    files = opened().files("texts")
    keep(files, A, B)
    path = files.path(digest(A))
    os.utime(path, (path.stat().st_mtime - 100, path.stat().st_mtime - 100))
    store = opened(ttl_seconds=60)
    files = store.files("texts")
    store.sweep()
    assert kept(files) == {B}


def test_only_their_owner_can_read_them(opened: Callable[..., ArtifactStore], tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = opened()
        (tmp_path / "store" / "older").mkdir(mode=0o755)
        for name in ("new", "older"):
            files = store.files(name)
            keep(files, A)
            assert stat.S_IMODE((tmp_path / "store" / name).stat().st_mode) == 0o700
            assert stat.S_IMODE(files.path(digest(A)).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_what_a_process_did_not_finish_is_removed_and_foreign_files_are_left_alone(
    opened: Callable[..., ArtifactStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    files = store.files("texts", ".txt")
    with monkeypatch.context() as patch:
        # As if the process had ended before the rename.
        patch.setattr(Path, "replace", lambda *_: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        keep(files, A)
    (left,) = names(store)
    assert left.startswith(".")
    for foreign in (".DS_Store", "notes.txt", f"{digest(B).hex()}"):
        (store.root / "texts" / foreign).write_bytes(B)
    files = opened(budget=150).files("texts", ".txt")
    assert files.digests() == []
    keep(files, C)
    assert names(store) == sorted([".DS_Store", "notes.txt", digest(B).hex(), f"{digest(C).hex()}.txt"])


def test_a_disk_that_refuses_leaves_the_count_right(
    opened: Callable[..., ArtifactStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = opened(budget=200)
    files = store.files("texts")
    keep(files, A)
    with monkeypatch.context() as patch:
        patch.setattr(store_files, "write_atomic", refuse)
        with pytest.raises(StoreError, match="texts: No space left on device"):
            keep(files, B)
        with pytest.raises(StoreError, match="No space left"):
            keep(files, A)
    # A's old copy is there and counts; B does not.
    keep(files, C)
    assert kept(files) == {A, C}
    keep(files, D)
    assert kept(files) == {C, D}


def test_a_file_that_the_disk_keeps_stops_neither_sweeps_nor_uses(
    opened: Callable[..., ArtifactStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    files = opened().files("texts")
    keep(files, A)
    os.utime(files.path(digest(A)), (1.0, 1.0))
    store = opened(ttl_seconds=60)
    files = store.files("texts")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        store.sweep()
        with pytest.raises(StoreError, match="texts: Permission denied"):
            files.remove(digest(A))
    assert kept(files) == {A}
    store.sweep()
    assert kept(files) == set()


def test_a_folder_that_cannot_be_made_is_one_clear_error(opened: Callable[..., ArtifactStore]) -> None:
    store = opened()
    (store.root / "texts").write_text("")
    with pytest.raises(StoreError, match="store/texts"):
        store.files("texts")


def test_many_threads_keep_the_count_right(opened: Callable[..., ArtifactStore], tmp_path: Path) -> None:
    files = opened(budget=1000, durable=False).files("texts")

    def work(first: int) -> None:
        for number in range(10):
            text = b"%d" % ((first + number) % 7) * 200
            with files.in_use(digest(text)) as path:
                keep(files, text)
                assert path.read_bytes() == text

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(path.stat().st_size for path in (tmp_path / "store" / "texts").iterdir()) <= 1000
