"""``kvferry inspect`` on stores that the product wrote, while they are open elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvferry.cli.inspect import flatten
from kvferry.core import container
from kvferry.core.digests import digest
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import (
    Document,
    Encoding,
    Manifest,
    Method,
    Payload,
    Prompt,
    Runtime,
    Section,
)
from kvferry.core.store import ArtifactStore, Stored

Run = Callable[..., Result]
TEXT = b"The code is 4417."
SYSTEM = b"Be brief."


def make(store: ArtifactStore, text: bytes = TEXT) -> Stored:
    """Write a text artifact."""
    contents = [
        container.raw_section(container.SYSTEM, "U8", (len(SYSTEM),), SYSTEM),
        container.raw_section(container.TEXT, "U8", (len(text),), text),
    ]

    def describe(sections: tuple[Section, ...], payload: Payload) -> Manifest:
        return Manifest(
            version=1,
            form="text",
            model=None,
            tokenizer=None,
            document=Document(digest(text), len(text), len(text)),
            prompt=Prompt(1, digest(SYSTEM)),
            prefix=None,
            positions=None,
            layout=None,
            method=Method("A1", "custom", aware=False, consume="prefill", params={}, seed=None, calibration=()),
            mapper=None,
            encoding=Encoding(None, None, None, None, None, None, None),
            sections=sections,
            payload=payload,
            parity=None,
            runtime=Runtime("0.1.0", "0.32", "0.32", "cpu"),
        )

    return store.create(contents, 1024, describe)


def chunk_count(stored: Stored) -> int:
    return len(stored.manifest.payload.chunks) // 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArtifactStore]:
    opened = ArtifactStore(tmp_path / "store")
    yield opened
    opened.close()


def state_of(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def test_an_open_store_is_read_and_left_alone(kvferry: Run, store: ArtifactStore) -> None:
    stored = make(store)
    before = state_of(store.root)
    shown = kvferry("inspect", stored.artifact_id.hex(), "--store", str(store.root), "--json")
    assert shown.exit_code == 0
    assert state_of(store.root) == before

    (line,) = shown.stdout.splitlines()
    found = json.loads(line)
    folder = store.root / "artifacts" / stored.artifact_id.hex()
    assert found["artifact_id"] == digest((folder / "manifest.msgpack").read_bytes()).hex()
    assert (found["state"], found["path"]) == ("committed", str(folder / "manifest.msgpack"))
    assert found["manifest_bytes"] == (folder / "manifest.msgpack").stat().st_size
    size = (folder / "payload.safetensors").stat().st_size
    assert (found["payload_bytes"], found["payload_bytes_on_disk"]) == (size, size)
    assert found["problems"] == found["also_in"] == []
    assert found["record"]["account"] is None
    assert found["manifest"]["document"] == {
        "digest": digest(TEXT).hex(),
        "bytes": len(TEXT),
        "characters": len(TEXT),
    }
    assert [section["name"] for section in found["manifest"]["sections"]] == ["prompt.system", "document.text"]


def test_people_get_lines_and_a_table(kvferry: Run, store: ArtifactStore) -> None:
    stored = make(store)
    shown = kvferry("inspect", stored.artifact_id.hex()[:10], "--store", str(store.root)).stdout.splitlines()
    assert f"artifact_id: {stored.artifact_id.hex()}" in shown
    assert "state: committed" in shown
    assert "method.id: A1" in shown
    assert f"payload.chunks: {chunk_count(stored)}" in shown
    assert "model: -" in shown
    assert shown[-3].split() == ["SECTION", "DTYPE", "SHAPE", "ENCODING", "BYTES", "DIGEST"]
    section = stored.manifest.sections[-1].digest.hex()
    assert shown[-1].split() == ["document.text", "U8", "17", "raw", "17", section[:16] + "…"]


@pytest.mark.parametrize("name", ["", "manifest.msgpack"])
def test_a_path_will_do(kvferry: Run, store: ArtifactStore, name: str) -> None:
    stored = make(store)
    path = store.root / "artifacts" / stored.artifact_id.hex() / name
    assert json.loads(kvferry("inspect", str(path), "--json").stdout)["artifact_id"] == stored.artifact_id.hex()


def test_a_manifest_alone_will_do(kvferry: Run, store: ArtifactStore, tmp_path: Path) -> None:
    stored = make(store)
    (tmp_path / "alone.msgpack").write_bytes(stored.encoded)
    found = json.loads(kvferry("inspect", str(tmp_path / "alone.msgpack"), "--json").stdout)
    assert (found["state"], found["payload_bytes_on_disk"], found["record"]) == ("outside a store", None, None)
    assert found["problems"] == []


def test_the_default_stores_are_those_of_the_daemons(
    kvferry: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_SENDER_STORE", str(tmp_path / "s"))
    monkeypatch.setenv("KVFERRY_RECEIVER_STORE", str(tmp_path / "r"))
    shown = kvferry("inspect", "0" * 64)
    assert shown.exit_code == 1
    assert shown.stderr == f"error: artifact {'0' * 64}: not in {tmp_path / 's'}, {tmp_path / 'r'}\n"

    sender, receiver = ArtifactStore(tmp_path / "s"), ArtifactStore(tmp_path / "r")
    stored = make(sender)
    incoming = receiver.begin(stored.encoded)
    found = json.loads(kvferry("inspect", stored.artifact_id.hex(), "--json").stdout)
    partial = tmp_path / "r" / "partial" / stored.artifact_id.hex() / "manifest.msgpack"
    assert (found["state"], found["also_in"]) == ("committed", [str(partial)])
    assert json.loads(kvferry("inspect", str(partial), "--json").stdout)["state"] == "on its way in"

    for index in range(chunk_count(stored)):
        incoming.put(index, stored.read_chunk(index))
    receiver.commit(stored.artifact_id, SenderAccount(0, 99, 0.0, 0.0, 0.0, 1.0))
    found = json.loads(kvferry("inspect", stored.artifact_id.hex(), "--store", str(tmp_path / "r"), "--json").stdout)
    assert found["state"] == "committed"
    assert found["record"]["account"]["dense_bf16_bytes"] == 99
    sender.close()
    receiver.close()


def test_what_was_put_aside_is_found_with_the_reason(kvferry: Run, store: ArtifactStore) -> None:
    stored = make(store)
    store.quarantine(stored.artifact_id, "0.25 nats")
    found = json.loads(kvferry("inspect", stored.artifact_id.hex(), "--store", str(store.root), "--json").stdout)
    assert (found["state"], found["problems"]) == ("put aside", ["put aside: 0.25 nats"])
    other = ArtifactStore(store.root.with_name("other"))
    made = make(other)
    other.close()
    words = ["--store", str(store.root), "--store", str(other.root), "--json"]
    found = json.loads(kvferry("inspect", stored.artifact_id.hex(), *words).stdout)
    assert (found["state"], found["path"]) == ("committed", str(made.path / "manifest.msgpack"))
    assert found["also_in"] == [str(store.root / "quarantine" / made.path.name / "manifest.msgpack")]


def test_an_ambiguous_prefix_is_refused(kvferry: Run, store: ArtifactStore) -> None:
    stored = make(store)
    twin = store.root / "artifacts" / (stored.artifact_id.hex()[:20] + "0" * 44)
    twin.mkdir()
    (twin / "manifest.msgpack").write_bytes(stored.encoded)
    shown = kvferry("inspect", stored.artifact_id.hex()[:20], "--store", str(store.root))
    assert shown.exit_code == 1
    assert "begins 2 ids" in shown.stderr

    problems = json.loads(kvferry("inspect", str(twin), "--json").stdout)["problems"]
    assert problems[0] == "the manifest is not that of the artifact that its directory is named for"
    assert problems[1].startswith("the payload is missing, the manifest says ")
    assert problems[2] == "record.json: No such file or directory"


def test_a_payload_cut_short_is_a_problem(kvferry: Run, store: ArtifactStore) -> None:
    stored = make(store)
    with stored.payload_path.open("r+b") as file:
        file.truncate(10)
    found = json.loads(kvferry("inspect", str(stored.payload_path.parent), "--json").stdout)
    size = stored.manifest.payload.length
    assert found["problems"] == [f"the payload is 10 bytes long, the manifest says {size} bytes"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("abc", "'abc' is neither a path here nor an artifact id"),
        ("no/such/file", "'no/such/file' is neither a path here nor an artifact id"),
    ],
)
def test_nonsense_is_refused(kvferry: Run, target: str, message: str) -> None:
    shown = kvferry("inspect", target)
    assert shown.exit_code == 1
    assert message in shown.stderr


def test_a_directory_without_a_manifest(kvferry: Run, tmp_path: Path) -> None:
    shown = kvferry("inspect", str(tmp_path))
    assert (shown.exit_code, shown.stderr) == (1, f"error: {tmp_path}: holds no manifest.msgpack\n")


def test_a_file_that_is_no_manifest(kvferry: Run, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"\xc1")
    shown = kvferry("inspect", str(path), "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["error"]["code"] == "MANIFEST"


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({"a": {"b": 1, "c": None}, "d": "x"}, ["a.b: 1", "a.c: -", "d: x"]),
        ({"a": [], "b": {}, "c": [1, 2], "d": False, "e": 0}, ["a: -", "b: -", "c: 1, 2", "d: False", "e: 0"]),
        ({"l": [{"r": 1}, {"r": 1}, {"r": 2}]}, ["l[0..1].r: 1", "l[2].r: 2"]),
        ({"l": [{"r": 1}, {"r": 2}, {"r": 1}]}, ["l[0].r: 1", "l[1].r: 2", "l[2].r: 1"]),
        ({"l": [{"r": 1, "s": 2}] * 30}, ["l[0..29].r: 1", "l[0..29].s: 2"]),
    ],
)
def test_equal_neighbours_share_their_lines(value: Any, lines: list[str]) -> None:
    assert flatten(value) == lines
