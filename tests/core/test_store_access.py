"""One store, one process, many threads; and files that are written whole."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import NotFoundError, StoreError, TransferError
from kvferry.core.files import write_atomic
from kvferry.core.store import ArtifactStore


def test_a_second_instance_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(StoreError, match="already open in another process"):
        ArtifactStore(store.root)
    store.close()
    ArtifactStore(store.root).close()


def test_a_second_process_is_refused(store: ArtifactStore) -> None:
    script = (
        "import sys, pathlib\n"
        "from kvferry.core.errors import StoreError\n"
        "from kvferry.core.store import ArtifactStore\n"
        "try:\n    ArtifactStore(pathlib.Path(sys.argv[1])).close()\n"
        "except StoreError as error:\n    print(error)\n"
        "else:\n    print('opened')\n"
    )
    command = [sys.executable, "-c", script, str(store.root)]
    assert "already open" in subprocess.run(command, capture_output=True, check=True, text=True).stdout
    store.close()
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "opened\n"


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError):
            ArtifactStore(root)


def test_eight_threads_put_the_same_chunks(store: ArtifactStore, example: Any) -> None:
    chunks = example.chunks()
    together = threading.Barrier(8)

    def send(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(12).tolist()
        together.wait()
        partial = store.begin(example.encoded)
        for index in order:
            partial.put(index, chunks[index])
            partial.count(len(chunks[index]), 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    assert store.partial(example.id).missing() == []
    stored = store.commit(example.id, None)
    example.check(stored)
    assert stored.record.traffic is not None
    assert stored.record.traffic.received_bytes == 8 * len(example.payload)
    assert stored.record.traffic.control_bytes == 96


def test_eight_threads_commit_and_one_artifact_comes_of_it(store: ArtifactStore, example: Any) -> None:
    example.put_into(store.begin(example.encoded))
    together = threading.Barrier(8)

    def commit(_: int) -> bool:
        together.wait()
        try:
            store.commit(example.id, None)
        except (StoreError, NotFoundError):
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(commit, range(8))) == 1
    example.check(store.get(example.id))


def test_threads_receive_different_artifacts(store: ArtifactStore, kv_example: Callable[..., Any]) -> None:
    examples = [kv_example(tokens=tokens) for tokens in range(30, 38)]
    with ThreadPoolExecutor(8) as pool:
        for stored, example in zip(pool.map(lambda one: one.received_by(store), examples), examples, strict=True):
            example.check(stored)
    assert len(store.ids()) == 8


class Between:
    """A lock; once, right after it is released, another call is made."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._calls = [call]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._calls:
            self._calls.pop()()


def test_what_a_disk_gave_up_at_one_commit_counts_for_no_other(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    failures = [OSError(errno.EIO, "no")]

    def says_so_once(_: int) -> None:
        if failures:
            raise failures.pop()

    def commit() -> None:
        with contextlib.suppress(StoreError, TransferError):
            store.commit(example.id, None)

    monkeypatch.setattr(os, "fsync", says_so_once)
    monkeypatch.setattr(partial, "_lock", Between(commit))
    commit()
    assert failures == []
    assert store.ids() == []
    assert partial.missing() == [(0, 12)]


def test_what_is_charged_is_in_the_record_or_refused(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = store.begin(example.encoded)
    example.put_into(partial)
    close = partial.close
    charged = 0

    def charge() -> None:
        nonlocal charged
        partial.count(0, 5)
        charged += 5

    def late() -> None:
        charge()
        close()

    monkeypatch.setattr(partial, "close", late)
    record = store.commit(example.id, None).record
    with pytest.raises(StoreError, match="committed or dropped"):
        charge()
    assert record.traffic is not None
    assert record.traffic.control_bytes == charged == 5


# Files


def test_an_atomic_write_replaces_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"first")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(OSError, match="no"):
                write_atomic(path, b"third")
        assert path.read_bytes() == b"second"
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
