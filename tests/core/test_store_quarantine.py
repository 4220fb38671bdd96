"""What is put aside and why, what a store finds at its start, and disks that refuse: nothing half is ever visible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import IntegrityError, NotFoundError, QuarantinedError, StoreError
from kvferry.core.manifest import Payload, Section
from kvferry.core.store import ArtifactStore
from kvferry.core.tokens import Token


def folder(store: ArtifactStore, example: Any, area: str = "artifacts") -> Path:
    return store.root / area / example.id.hex()


def make(store: ArtifactStore, example: Any) -> None:
    def describe(sections: tuple[Section, ...], payload: Payload) -> Any:
        return msgspec.structs.replace(example.manifest, sections=sections, payload=payload)

    store.create(example.contents, example.manifest.payload.chunk_size, describe)


@pytest.fixture
def reopened(tmp_path: Path, store: ArtifactStore) -> Iterator[Callable[[], ArtifactStore]]:
    """Return a function that closes the store and opens it again."""
    current = [store]

    def reopen() -> ArtifactStore:
        current[0].close()
        current[0] = ArtifactStore(tmp_path / "store")
        return current[0]

    yield reopen
    current[0].close()


# Putting aside


def test_what_is_put_aside_is_named_and_not_given_out(store: ArtifactStore, example: Any) -> None:
    example.received_by(store)
    store.quarantine(example.id, "layers.0.keys is 0.25 nats off: über")
    with pytest.raises(QuarantinedError, match="put aside: layers.0.keys is 0.25 nats off: über") as caught:
        store.get(example.id)
    assert caught.value.fields["reason"] == "layers.0.keys is 0.25 nats off: über"
    assert store.ids() == []
    assert store.quarantined() == {example.id: "layers.0.keys is 0.25 nats off: über"}
    assert store.quarantines == 1
    stored = store.get_quarantined(example.id)
    assert stored.sections.read("prefix.ids") == example.contents[0].data


def test_only_what_was_published_is_put_aside(store: ArtifactStore, example: Any) -> None:
    store.begin(example.encoded)
    store.quarantine(example.id, "never")
    assert store.quarantined() == {}
    assert store.quarantines == 0
    assert len(store.partial(example.id).missing()) == 1
    with pytest.raises(NotFoundError):
        store.get_quarantined(example.id)


def test_two_questions_may_find_the_same_damage(store: ArtifactStore, example: Any) -> None:
    example.received_by(store)
    store.quarantine(example.id, "first")
    store.quarantine(example.id, "second")
    assert store.quarantined() == {example.id: "first"}
    assert store.get_quarantined(example.id).payload_path.exists()


@pytest.mark.parametrize("arrive", ["received", "made"])
def test_a_new_copy_takes_its_place(store: ArtifactStore, example: Any, arrive: str) -> None:
    example.received_by(store)
    store.quarantine(example.id, "tested")
    if arrive == "made":
        make(store, example)
    else:
        partial = store.begin(example.encoded)
        with pytest.raises(QuarantinedError):
            store.get(example.id)
        example.put_into(partial)
        store.commit(example.id, None)
    example.check(store.get(example.id))
    assert store.quarantined() == {}
    assert list((store.root / "quarantine").iterdir()) == []
    # It can go bad again.
    store.quarantine(example.id, "again")
    assert store.quarantined() == {example.id: "again"}


def test_drop_removes_what_was_put_aside(store: ArtifactStore, example: Any) -> None:
    example.received_by(store)
    store.quarantine(example.id, "tested")
    store.begin(example.encoded)
    store.drop(example.id)
    with pytest.raises(NotFoundError):
        store.get(example.id)
    for area in ("artifacts", "partial", "quarantine", "aside"):
        assert list((store.root / area).iterdir()) == []


def test_a_reason_outlives_the_process(
    store: ArtifactStore, reopened: Callable[[], ArtifactStore], example: Any
) -> None:
    example.received_by(store)
    store.quarantine(example.id, "tested")
    again = reopened()
    assert again.quarantined() == {example.id: "tested"}
    with pytest.raises(QuarantinedError, match="tested"):
        again.get(example.id)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_lost_reason_is_no_obstacle(store: ArtifactStore, example: Any, content: bytes | None) -> None:
    example.received_by(store)
    store.quarantine(example.id, "tested")
    path = folder(store, example, "quarantine") / "reason.txt"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(QuarantinedError, match="the reason was not recorded"):
        store.get(example.id)


# What a store finds at its start


def truncated(path: Path) -> None:
    os.truncate(path / "payload.safetensors", (path / "payload.safetensors").stat().st_size - 1)


def longer(path: Path) -> None:
    with (path / "payload.safetensors").open("ab") as file:
        file.write(b"x")


def another_manifest(path: Path) -> None:
    manifest = path / "manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes().replace(b"0.32.4", b"0.32.5"))


def emptied_manifest(path: Path) -> None:
    (path / "manifest.msgpack").write_bytes(b"")


def unreadable_record(path: Path) -> None:
    (path / "record.json").write_bytes(b"{")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, r"payload.safetensors has \d+ bytes, the manifest says \d+"),
    "longer": (longer, r"payload.safetensors has \d+ bytes, the manifest says \d+"),
    "no payload": (lambda path: (path / "payload.safetensors").unlink(), "payload.safetensors is missing"),
    "no manifest": (lambda path: (path / "manifest.msgpack").unlink(), "manifest.msgpack is missing"),
    "no record": (lambda path: (path / "record.json").unlink(), "record.json is missing"),
    "another manifest": (another_manifest, "its manifest on disk has changed"),
    "empty manifest": (emptied_manifest, "its manifest on disk has changed"),
    "bad record": (unreadable_record, "truncated"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_put_aside_at_start(
    store: ArtifactStore,
    reopened: Callable[[], ArtifactStore],
    example: Any,
    text_example: Callable[..., Any],
    kind: str,
) -> None:
    whole = text_example()
    for one in (example, whole):
        one.received_by(store)
    damage, reason = DAMAGES[kind]
    damage(folder(store, example))
    for again in (reopened(), reopened()):
        assert again.ids() == [whole.id]
        whole.check(again.get(whole.id))
        with pytest.raises(QuarantinedError, match=f"found damaged at start: .*{reason}"):
            again.get(example.id)
        assert list(again.quarantined()) == [example.id]
    example.check(example.received_by(again))
    assert again.quarantined() == {}


def test_a_flipped_bit_is_not_seen_at_start(
    store: ArtifactStore, reopened: Callable[[], ArtifactStore], example: Any
) -> None:
    """The scan reads no payload: what is wrong inside is found when it is read."""
    path = example.received_by(store).payload_path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    stored = reopened().get(example.id)
    with pytest.raises(IntegrityError, match=r"^section layers\.1\.values: chunk"):
        stored.sections.read("layers.1.values")


def test_strangers_are_left_alone(store: ArtifactStore, reopened: Callable[[], ArtifactStore], example: Any) -> None:
    example.received_by(store)
    strangers = []
    for area in ("artifacts", "partial", "quarantine"):
        for name in ("notes", "ab" * 31, "AB" * 32, "ab" * 32 + ".bak"):
            strangers.append(store.root / area / name)
            strangers[-1].mkdir()
        # A file may have the name of an artifact.
        for name in (".DS_Store", "cd" * 32):
            strangers.append(store.root / area / name)
            strangers[-1].write_bytes(b"x")
    again = reopened()
    assert again.ids() == [example.id]
    assert again.quarantined() == {}
    assert all(path.exists() for path in strangers)
    with pytest.raises(NotFoundError):
        again.get(bytes.fromhex("ab" * 32))


def test_a_directory_without_anything_in_it_is_put_aside(
    store: ArtifactStore, reopened: Callable[[], ArtifactStore], example: Any
) -> None:
    folder(store, example).mkdir()
    assert list(reopened().quarantined()) == [example.id]


def test_of_two_copies_the_published_one_stays(
    store: ArtifactStore, reopened: Callable[[], ArtifactStore], example: Any
) -> None:
    """A process may end right after it published a new copy, before it cleared the old one."""
    example.received_by(store)
    shutil.copytree(folder(store, example), folder(store, example, "quarantine"))
    again = reopened()
    example.check(again.get(example.id))
    assert again.quarantined() == {}


def test_a_store_that_cannot_be_scanned_is_released(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            ArtifactStore(store.root)
    ArtifactStore(store.root).close()


# Disks that refuse

WRITES = ("mkdir", "rename", "replace", "ftruncate", "pwrite", "fsync", "open")
MOST_STEPS = 100


class Disk:
    """Lets a number of writing calls through and refuses the next one, once."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.number = number
        self.left = MOST_STEPS
        self.refused = ""
        for name in WRITES:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(io, "open", self._counted("open", io.open, 1))
        patch.setattr("builtins.open", self._counted("open", open, 1))

    def _counted(self, name: str, function: Callable[..., Any], mode_at: int | None = None) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            reading = name == "open" and not self._writes(mode_at, args, options)
            if not reading:
                self.left -= 1
                if self.left == -1:
                    self.refused = name
                    raise OSError(self.number, os.strerror(self.number))
            return function(*args, **options)

        return step

    @staticmethod
    def _writes(mode_at: int | None, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        mode = args[1] if len(args) > 1 else options.get("mode", "r")
        if mode_at is None:
            return bool(mode & (os.O_WRONLY | os.O_RDWR))
        return "r" not in mode


def receive(store: ArtifactStore, example: Any) -> None:
    partial = store.begin(example.encoded, OWNER)
    partial.count(len(example.payload), 7)
    for start, end in partial.missing():
        for index in range(start, end):
            partial.put(index, example.chunks()[index])
    store.commit(example.id, None)


OWNER = Token(name="ada", digest="0" * 64, max_artifacts=1)


def open_files() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = 0
    for handle in range(min(limit, 256)):
        try:
            fcntl.fcntl(handle, fcntl.F_GETFD)
        except OSError:
            continue
        found += 1
    return found


def failure(act: Callable[[ArtifactStore, Any], None], store: ArtifactStore, example: Any) -> StoreError | None:
    try:
        act(store, example)
    except StoreError as error:
        return error
    return None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("act", [receive, make])
def test_a_disk_that_refuses_any_one_write_leaves_nothing_half(
    tmp_path: Path, example: Any, act: Callable[[ArtifactStore, Any], None], number: int
) -> None:
    refused = set()
    for step in range(MOST_STEPS):
        with contextlib.closing(ArtifactStore(tmp_path / f"{step}")) as store, pytest.MonkeyPatch.context() as patch:
            before = open_files()
            disk = Disk(patch, number)
            disk.left = step
            error = failure(act, store, example)
            disk.left = MOST_STEPS
            if error is None:
                # Nothing was refused, or something that may fail.
                example.check(store.get(example.id))
            else:
                assert os.strerror(number) in error.message, disk.refused
            if not disk.refused:
                break
            refused.add(disk.refused)
            for artifact_id in store.ids():
                # Published, but not surely on the disk: it is whole, and the sender will ask again.
                (folder(store, example) / "owner").unlink(missing_ok=True)
                example.check(store.get(artifact_id))
            assert list((store.root / "aside").iterdir()) == []
            # What is on its way in holds two files open, and nothing else does.
            assert open_files() <= before + 2
            store.drop(example.id) if store.ids() else act(store, example)
            if store.ids():
                example.check(store.get(example.id))
                assert act is make or store.get(example.id).record.owner == "ada", disk.refused
    else:
        pytest.fail(f"{MOST_STEPS} steps were not enough")
    assert refused >= ({"mkdir", "pwrite", "fsync", "ftruncate"} if act is receive else {"mkdir", "fsync", "open"})


def test_a_full_disk_at_commit_costs_no_chunk(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.put_into(store.begin(example.encoded))
    real = os.open

    def full(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if "record.json" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, flags, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(StoreError, match="No space left"):
            store.commit(example.id, None)
    assert store.ids() == []
    assert store.begin(example.encoded).missing() == []
    example.check(store.commit(example.id, None))


def test_a_full_disk_does_not_keep_damage_visible(
    store: ArtifactStore, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.received_by(store)
    with monkeypatch.context() as patch:
        Disk(patch, errno.ENOSPC).left = 0
        store.quarantine(example.id, "tested")
    with pytest.raises(QuarantinedError, match="the reason was not recorded"):
        store.get(example.id)


def test_a_read_only_store_says_so_and_still_gives_out_what_it_has(
    store: ArtifactStore, example: Any, text_example: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    example.received_by(store)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "utime"):
            patch.setattr(os, name, refuse)
        for call in (
            lambda: store.begin(text_example().encoded),
            lambda: make(store, text_example()),
            lambda: store.quarantine(example.id, "tested"),
            lambda: store.drop(example.id),
        ):
            with pytest.raises(StoreError, match="Read-only file system"):
                call()
        with store.pinned(example.id):
            assert store.get(example.id).sections.read("prefix.ids") == example.contents[0].data
    assert store.ids() == [example.id]
