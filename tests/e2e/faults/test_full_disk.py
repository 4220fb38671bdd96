"""A disk that is full, and one that takes nothing more: an error of ours, nothing half there, and answers go on.

The disk is a small one of its own, in memory, which takes root on Linux; elsewhere its tests are skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors, store_files
from kvferry.core.ledger import ledger_from_json
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import receiver_service_pb2 as pb

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 2
QUESTION = "What is the access code?"
DISK_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Disk:
    """A disk that can be filled to the last byte."""

    path: Path

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        (self.path / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if sys.platform != "linux" or os.geteuid() != 0 or mount is None or unmount is None:
        pytest.skip("mounting a disk takes root on Linux")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run([mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield Disk(path)
    subprocess.run([unmount, "-l", path], check=True)


class Receiver:
    """A receiver on a small disk, and what is carried to it."""

    def __init__(self, driver: Any, root: Path) -> None:
        self.driver, self.root = driver, root

    def chunks(self, stored: Stored, indices: range) -> Iterator[pb.PutRequest]:
        for index in indices:
            yield pb.PutRequest(artifact_id=stored.artifact_id, index=index, data=stored.read_chunk(index))

    def deliver(self, stored: Stored) -> None:
        for run in self.driver.offer(stored.encoded).missing:
            self.driver.put(self.chunks(stored, range(run.start, run.end)))
        self.driver.commit(stored.artifact_id)

    def answer(self, stored: Stored) -> tuple[int, ...]:
        ids: tuple[int, ...] = self.driver.ask(stored.artifact_id, QUESTION).ids
        return ids

    def ledger(self) -> int:
        """Read the ledger, every line of which is whole, and return how many there are."""
        lines = (self.root / "ledger.jsonl").read_text().splitlines(keepends=True)
        assert all(ledger_from_json(line) and line.endswith("\n") for line in lines)
        return len(lines)


@pytest.fixture
def receiver(
    disk: Disk, here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> Receiver:
    root = disk.path / "receiver"
    return Receiver(peers(receiver=here("receiver", tiny_model_dir(), store=str(root)).address), root)


@pytest.fixture
def carried(artifact: Callable[..., Stored], tiny_model: Callable[..., LoadedModel]) -> Callable[[str], Stored]:
    return lambda text: artifact(tiny_model(), "B1", text)


def test_what_was_committed_answers_on_a_full_disk(
    disk: Disk,
    receiver: Receiver,
    carried: Callable[[str], Stored],
    tiny_model: Callable[..., LoadedModel],
    local_answer: Callable[..., tuple[int, ...]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    stored, more = carried(DOCUMENT), carried(f"More. {DOCUMENT}")
    receiver.deliver(stored)
    disk.fill()
    with pytest.raises(errors.StoreError, match=r"^store .*: (the payload takes \d+ bytes, \d+ are|No space)"):
        receiver.driver.offer(more.encoded)
    assert receiver.driver.listed() == {stored.artifact_id}
    assert list((receiver.root / "partial").iterdir()) == []
    expected = local_answer(tiny_model(), DOCUMENT, QUESTION)
    assert [receiver.answer(stored) for _ in range(3)] == [expected] * 3
    # The bill is in the answer; the file that keeps it is short of the lines that did not fit, and of no half line.
    assert receiver.ledger() < 3
    assert "not in the ledger" in capfd.readouterr().out + capfd.readouterr().err
    disk.free()
    before = receiver.ledger()
    receiver.deliver(more)
    assert receiver.answer(more) == local_answer(tiny_model(), f"More. {DOCUMENT}", QUESTION)
    assert receiver.ledger() == before + 1


def test_a_disk_that_fills_while_chunks_come(disk: Disk, receiver: Receiver, carried: Callable[[str], Stored]) -> None:
    stored = carried(DOCUMENT)
    count, half = stored.plan.count, stored.plan.count // 2
    receiver.driver.offer(stored.encoded)
    receiver.driver.put(receiver.chunks(stored, range(half)))
    disk.fill()
    with pytest.raises(errors.StoreError, match=r"^chunk \d+: No space left on device") as caught:
        receiver.driver.put(receiver.chunks(stored, range(half, count)))
    at = caught.value.fields["chunk"]
    with pytest.raises(errors.TransferError, match=f"^chunk {at}: missing, {count - int(at or 0)} chunks in all"):
        receiver.driver.commit(stored.artifact_id)
    with pytest.raises(errors.NotFoundError):
        receiver.answer(stored)
    assert receiver.driver.listed() == set()
    disk.free()
    missing = [(run.start, run.end) for run in receiver.driver.offer(stored.encoded).missing]
    assert missing == [(at, count)]
    receiver.deliver(stored)
    assert receiver.answer(stored)


def test_a_disk_that_fills_before_commit(disk: Disk, receiver: Receiver, carried: Callable[[str], Stored]) -> None:
    stored = carried(DOCUMENT)
    receiver.driver.offer(stored.encoded)
    receiver.driver.put(receiver.chunks(stored, range(stored.plan.count)))
    disk.fill()
    with pytest.raises(errors.StoreError, match=r"^store .*: No space left on device"):
        receiver.driver.commit(stored.artifact_id)
    assert receiver.driver.listed() == set()
    disk.free()
    # Everything had arrived, and none of it comes again.
    assert list(receiver.driver.offer(stored.encoded).missing) == []
    receipt = receiver.driver.commit(stored.artifact_id)
    assert receipt.received_bytes == stored.manifest.payload.length
    assert receiver.answer(stored)


def test_a_receiver_that_starts_on_a_full_disk(
    disk: Disk,
    here: Callable[..., Any],
    peers: Callable[..., Any],
    carried: Callable[[str], Stored],
    tiny_model_dir: Callable[..., Path],
) -> None:
    stored, root = carried(DOCUMENT), disk.path / "receiver"
    first = here("receiver", tiny_model_dir(), store=str(root))
    Receiver(peers(receiver=first.address), root).deliver(stored)
    first.stop()
    disk.fill()
    again = Receiver(peers(receiver=here("receiver", tiny_model_dir(), store=str(root)).address), root)
    assert again.driver.listed() == {stored.artifact_id}
    assert again.answer(stored)


def test_a_sender_whose_disk_is_full(
    disk: Disk, here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    sender = here("sender", tiny_model_dir(), store=str(disk.path / "sender"))
    driver = peers(sender.address, here("receiver", tiny_model_dir()).address)
    disk.fill()
    for method in ("A1", "B1"):
        with pytest.raises(errors.StoreError, match="No space left on device"):
            driver.send(DOCUMENT, method)
    assert driver.listed() == set()
    assert list((disk.path / "sender" / "artifacts").iterdir()) == []
    disk.free()
    assert driver.ask(driver.send(DOCUMENT).artifact_id, QUESTION).ids


def test_a_sender_that_cannot_note_what_it_made_sends_it_all_the_same(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = store_files.write_atomic

    def refuse_notes(path: Path, *given: Any) -> None:
        if path.parent.name == "made":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *given)

    monkeypatch.setattr(store_files, "write_atomic", refuse_notes)
    driver = peers(here("sender", tiny_model_dir()).address, here("receiver", tiny_model_dir()).address)
    first, second = driver.send(DOCUMENT), driver.send(DOCUMENT)
    # Made twice, and the same both times.
    assert (first.end.reused, second.end.reused) == (False, False)
    assert first.artifact_id == second.artifact_id
    assert second.end.moved_bytes == 0
