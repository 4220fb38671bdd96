"""``kvferry artifacts`` on stores that are open elsewhere, and its files on their way to a receiver."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from click.testing import Result

from kvferry.core import artifact_file, channel, container
from kvferry.core.compat import Profile
from kvferry.core.digests import digest
from kvferry.core.ledger import SenderAccount
from kvferry.core.manifest import (
    Document,
    Encoding,
    Manifest,
    Method,
    Model,
    Payload,
    Prompt,
    Runtime,
    Section,
    Tokenizer,
)
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.receiver import intake_service
from kvferry.receiver.intake import Intake
from kvferry.receiver.intake_service import IntakeServicer

Run = Callable[..., Result]
SYSTEM = b"Be brief."
ACCOUNT = SenderAccount(12, 3400, 1.0, 2.0, 3.0, 4.0, "the cache was refused")
HEAD = ["ID", "METHOD", "FORM", "BYTES", "TOKENS", "LAST", "USED", "NOTE"]
VIEW = str(Path(__file__).resolve().parents[2] / ".dev")


def make(store: ArtifactStore, text: bytes = b"The code is 4417. " * 150, version: int = 1) -> Stored:
    """Write a text artifact of several chunks."""
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
            prompt=Prompt(version, digest(SYSTEM)),
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


def receive(store: ArtifactStore, made: Stored, account: SenderAccount | None = ACCOUNT) -> Stored:
    partial = store.begin(made.encoded)
    for index in range(made.plan.count):
        partial.put(index, made.read_chunk(index))
    return store.commit(made.artifact_id, account)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArtifactStore]:
    opened = ArtifactStore(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ArtifactStore]:
    opened = ArtifactStore(tmp_path / "other")
    yield opened
    opened.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def state_of(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


def set_used(stored: Stored, at: float) -> None:
    os.utime(stored.path / "record.json", (at, at))


# list


def test_a_list_shows_what_is_there_the_last_used_first(kvferry: Run, store: ArtifactStore) -> None:
    old, new, aside = (make(store, name * 2000) for name in (b"a", b"b", b"c"))
    store.begin(make_elsewhere(store).encoded)
    set_used(old, 1_700_000_000)
    set_used(new, 1_800_000_000)
    set_used(aside, 1_750_000_000)
    store.quarantine(aside.artifact_id, "two\nlines")
    before = state_of(store.root)
    shown = kvferry("artifacts", "list", "--store", str(store.root), "--json")
    assert (shown.exit_code, shown.stderr) == (0, "")
    listed = json.loads(shown.stdout)["artifacts"]
    assert [item["artifact_id"] for item in listed] == [one.artifact_id.hex() for one in (new, aside, old)]
    assert listed[0] == {
        "artifact_id": new.artifact_id.hex(),
        "method": "A1",
        "form": "text",
        "payload_bytes": new.manifest.payload.length,
        "prefix_tokens": 0,
        "used_at": 1_800_000_000,
        "quarantined": None,
        "problem": None,
        "where": str(store.root),
    }
    assert listed[1]["quarantined"] == "two\nlines"
    table = kvferry("artifacts", "list", "--store", str(store.root)).stdout.splitlines()
    assert table[0].split() == HEAD
    assert [line.split()[0] for line in table[1:]] == [item["artifact_id"][:16] for item in listed]
    assert table[2].endswith("put aside: two lines")
    assert state_of(store.root) == before


def make_elsewhere(store: ArtifactStore) -> Stored:
    """An artifact that this store does not hold."""
    made = make(store, b"z" * 2000)
    elsewhere = Stored(made.artifact_id, made.manifest, made.encoded, made.record, made.path)
    store.drop(made.artifact_id)
    return elsewhere


def test_several_stores_are_told_apart(kvferry: Run, store: ArtifactStore, other: ArtifactStore) -> None:
    made = make(store)
    receive(other, made)
    words = ["--store", str(store.root), "--store", str(other.root)]
    table = kvferry("artifacts", "list", *words).stdout.splitlines()
    assert table[0].split() == [*HEAD, "WHERE"]
    assert {line.split()[-1] for line in table[1:]} == {str(store.root), str(other.root)}


def test_the_daemons_stores_are_the_default(kvferry: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SENDER_STORE", str(tmp_path / "s"))
    monkeypatch.setenv("KVFERRY_RECEIVER_STORE", str(tmp_path / "r"))
    shown = kvferry("artifacts", "list")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", "no artifacts\n")
    assert json.loads(kvferry("artifacts", "list", "--json").stdout) == {"artifacts": []}
    receiver = ArtifactStore(tmp_path / "r")
    made = make(receiver)
    receiver.close()
    (item,) = json.loads(kvferry("artifacts", "list", "--json").stdout)["artifacts"]
    assert (item["artifact_id"], item["where"]) == (made.artifact_id.hex(), str(tmp_path / "r"))


def test_what_cannot_be_read_is_listed_with_the_problem(kvferry: Run, store: ArtifactStore) -> None:
    broken, cut, whole = (make(store, name * 2000) for name in (b"a", b"b", b"c"))
    (broken.path / "manifest.msgpack").write_bytes(b"\xc1")
    os.truncate(cut.payload_path, 10)
    listed = json.loads(kvferry("artifacts", "list", "--store", str(store.root), "--json").stdout)["artifacts"]
    problems = {item["artifact_id"]: item["problem"] for item in listed}
    assert problems[whole.artifact_id.hex()] is None
    assert problems[broken.artifact_id.hex()].startswith("manifest: ")
    assert problems[cut.artifact_id.hex()].startswith("the payload is 10 bytes long")


def test_a_receiver_can_be_asked(kvferry: Run, daemons: Any, fakes: Any) -> None:
    daemons.receiver.put_aside[fakes.OTHER] = "0.25 nats"
    shown = kvferry("artifacts", "list", "--receiver", daemons.address, "--json")
    listed = {item["artifact_id"]: item for item in json.loads(shown.stdout)["artifacts"]}
    first = listed[fakes.ARTIFACT.hex()]
    assert (first["method"], first["form"], first["payload_bytes"], first["prefix_tokens"]) == ("B1", "kv", 1000, 40)
    assert (first["used_at"], first["quarantined"], first["where"]) == (2.5, None, daemons.address)
    assert listed[fakes.OTHER.hex()]["quarantined"] == "0.25 nats"
    assert "put aside: 0.25 nats" in kvferry("artifacts", "list", "--receiver", daemons.address).stdout


def test_a_store_and_a_receiver_exclude_each_other(kvferry: Run, store: ArtifactStore) -> None:
    shown = kvferry("artifacts", "list", "--store", str(store.root), "--receiver", "localhost:1")
    assert shown.exit_code == 2
    assert "exclude each other" in shown.stderr


# verify


def test_what_is_whole_is_whole(kvferry: Run, store: ArtifactStore) -> None:
    made = [make(store, name * 2000) for name in (b"a", b"b")]
    store.quarantine(make(store, b"c" * 2000).artifact_id, "tested")
    before = state_of(store.root)
    shown = kvferry("artifacts", "verify", "--store", str(store.root))
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", "2 read, 0 damaged\n")
    record = json.loads(kvferry("artifacts", "verify", "--store", str(store.root), "--json").stdout)
    assert record["damaged"] == 0
    assert {item["artifact_id"] for item in record["artifacts"]} == {one.artifact_id.hex() for one in made}
    assert all(item["problems"] == [] for item in record["artifacts"])
    assert state_of(store.root) == before


def changed_runtime(made: Stored) -> None:
    path = made.path / "manifest.msgpack"
    path.write_bytes(path.read_bytes().replace(b"0.1.0", b"0.1.1"))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda made: flip(made.payload_path, 0), "header: chunk 0: digest "),
        (lambda made: flip(made.payload_path, 9), "header: chunk 0: digest "),
        (lambda made: flip(made.payload_path, 145), "section prompt.system: chunk 1: digest "),
        (lambda made: flip(made.payload_path, -1), "section document.text: chunk 3: digest "),
        (lambda made: os.truncate(made.payload_path, 1000), "the payload is 1000 bytes long, the manifest says "),
        (lambda made: made.payload_path.unlink(), "the payload is missing, the manifest says "),
        (changed_runtime, "the manifest is not that of the artifact that its directory is named for"),
        (lambda made: (made.path / "manifest.msgpack").write_bytes(b""), "manifest: "),
        (lambda made: (made.path / "manifest.msgpack").unlink(), ""),
        (lambda made: (made.path / "record.json").write_bytes(b"{"), "record.json: "),
    ],
)
def test_damage_is_one_line_that_names_the_place(
    kvferry: Run, store: ArtifactStore, damage: Callable[[Stored], object], line: str
) -> None:
    bad, good = make(store, b"a" * 2000), make(store, b"b" * 2000)
    damage(bad)
    shown = kvferry("artifacts", "verify", "--store", str(store.root))
    assert shown.exit_code == 1
    (only,) = shown.stdout.splitlines()
    assert only.startswith(f"{bad.path}: {line}")
    assert shown.stderr == "2 read, 1 damaged\n"
    record = json.loads(kvferry("artifacts", "verify", "--store", str(store.root), "--json").stdout)
    problems = {item["artifact_id"]: item["problems"] for item in record["artifacts"]}
    assert problems[good.artifact_id.hex()] == []
    assert problems[bad.artifact_id.hex()]
    assert record["damaged"] == 1
    # The other one alone is whole.
    assert kvferry("artifacts", "verify", good.artifact_id.hex(), "--store", str(store.root)).exit_code == 0


def test_much_damage_is_still_one_line(kvferry: Run, store: ArtifactStore) -> None:
    made = make(store, b"a" * 20_000)
    made.payload_path.write_bytes(bytes(made.manifest.payload.length))
    (line,) = kvferry("artifacts", "verify", "--store", str(store.root)).stdout.splitlines()
    assert line.endswith(f"; and {made.plan.count - 2} more")


def test_every_copy_of_an_id_is_read(kvferry: Run, store: ArtifactStore, other: ArtifactStore) -> None:
    made = make(store)
    copy = receive(other, made)
    flip(copy.payload_path, -1)
    words = ["--store", str(store.root), "--store", str(other.root)]
    shown = kvferry("artifacts", "verify", made.artifact_id.hex()[:8], *words)
    assert (shown.exit_code, shown.stderr) == (1, "2 read, 1 damaged\n")
    assert shown.stdout.startswith(f"{copy.path}: ")
    other.quarantine(made.artifact_id, "tested")
    shown = kvferry("artifacts", "verify", made.artifact_id.hex(), *words)
    assert shown.stdout.startswith(str(other.root / "quarantine"))


@pytest.mark.parametrize(
    ("given", "message"), [("0" * 64, "not in"), ("abc", "neither a path here nor an artifact id")]
)
def test_an_id_that_is_not_there(kvferry: Run, store: ArtifactStore, given: str, message: str) -> None:
    shown = kvferry("artifacts", "verify", given, "--store", str(store.root))
    assert shown.exit_code == 1
    assert message in shown.stderr


# export


def test_an_export_is_the_file_of_the_document(kvferry: Run, store: ArtifactStore, tmp_path: Path) -> None:
    made = receive(store, make_elsewhere_made(store))
    target = tmp_path / "out.kvf"
    shown = kvferry("artifacts", "export", made.artifact_id.hex()[:8], str(target), "--store", str(store.root))
    assert shown.exit_code == 0
    assert shown.stdout == f"{target}\n"
    assert shown.stderr.startswith(made.artifact_id.hex())
    found = artifact_file.read(target)
    found.verify()
    assert (found.artifact_id, found.account) == (made.artifact_id, ACCOUNT)
    assert [found.read_chunk(index) for index in range(found.plan.count)] == [
        made.read_chunk(index) for index in range(made.plan.count)
    ]


def make_elsewhere_made(store: ArtifactStore) -> Stored:
    """An artifact in a store of its own, beside this one."""
    elsewhere = ArtifactStore(store.root.with_name("maker"))
    made = make(elsewhere)
    elsewhere.close()
    return made


def test_the_sender_knows_the_account_beside_its_store(kvferry: Run, store: ArtifactStore, tmp_path: Path) -> None:
    made, unknown = make(store), make(store, b"b" * 2000)
    notes = store.root / "made"
    notes.mkdir()
    for name, content in {
        "aa": b"{",
        "bb": b"{}",
        "cc": b'{"artifact": "' + b"0" * 64 + b'", "account": null}',
    }.items():
        (notes / name).write_bytes(content)
    (notes / "dd").write_bytes(msgspec.json.encode({"artifact": made.artifact_id.hex(), "account": ACCOUNT}))
    shown = kvferry("artifacts", "export", made.artifact_id.hex(), str(tmp_path / "a"), "--store", str(store.root))
    assert "not known" not in shown.stderr
    assert artifact_file.read(tmp_path / "a").account == ACCOUNT
    shown = kvferry("artifacts", "export", unknown.artifact_id.hex(), str(tmp_path / "b"), "--store", str(store.root))
    assert "what the artifact cost its sender is not known here" in shown.stderr
    assert artifact_file.read(tmp_path / "b").account is None


def test_an_export_overwrites_nothing_without_force(kvferry: Run, store: ArtifactStore, tmp_path: Path) -> None:
    made = make(store)
    target = tmp_path / "out.kvf"
    target.write_bytes(b"mine")
    words = ["artifacts", "export", made.artifact_id.hex(), str(target), "--store", str(store.root), "--json"]
    shown = kvferry(*words)
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["error"]["message"] == f"{target}: is there already"
    assert target.read_bytes() == b"mine"
    shown = kvferry(*words, "--force")
    assert json.loads(shown.stdout) == {
        "artifact_id": made.artifact_id.hex(),
        "file": str(target),
        "bytes": target.stat().st_size,
    }
    artifact_file.read(target).verify()


def test_damage_is_never_exported(kvferry: Run, store: ArtifactStore, tmp_path: Path) -> None:
    made = make(store)
    flip(made.payload_path, -1)
    shown = kvferry("artifacts", "export", made.artifact_id.hex(), str(tmp_path / "out"), "--store", str(store.root))
    assert shown.exit_code == 1
    assert shown.stderr.startswith("error: chunk ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("state", ["on its way in", "put aside"])
def test_only_what_is_published_is_exported(kvferry: Run, store: ArtifactStore, tmp_path: Path, state: str) -> None:
    made = make_elsewhere_made(store)
    if state == "put aside":
        receive(store, made)
        store.quarantine(made.artifact_id, "tested")
    else:
        store.begin(made.encoded)
    shown = kvferry("artifacts", "export", made.artifact_id.hex(), str(tmp_path / "out"), "--store", str(store.root))
    assert shown.exit_code == 1
    assert f"is {state} in {store.root}" in shown.stderr
    assert not (tmp_path / "out").exists()


# import


def last_line(shown: Result) -> str:
    """What the command printed; before it stands the log of the receiver, which runs in this process."""
    return shown.stdout.splitlines()[-1]


class Receiver(IntakeServicer):
    """The receiving half of a daemon, without a model."""

    def __init__(self, intake: Intake, metrics: ReceiverMetrics) -> None:
        super().__init__(intake, metrics)
        self.calls: list[str] = []
        self.authorizations: list[str] = []

    async def Offer(self, request: Any, context: Any) -> Any:
        self.calls.append("offer")
        metadata = dict(context.invocation_metadata())
        self.authorizations.append(str(metadata.get("authorization", "")))
        return await super().Offer(request, context)

    async def Put(self, request_iterator: Any, context: Any) -> Any:
        self.calls.append("put")
        async for response in super().Put(request_iterator, context):
            yield response


@pytest.fixture
def receiver(other: ArtifactStore) -> Iterator[tuple[Receiver, str]]:
    """A running receiver on the store ``other``, and its address."""
    versions = {"kvferry": "0", "device": "cpu"}
    metrics = ReceiverMetrics("none", versions)
    nothing = bytes(32)
    profile = Profile(
        model=Model("none", "", "none", nothing, nothing, None, None),
        tokenizer=Tokenizer(nothing, nothing),
        prompt_version=1,
        rope=(),
        layers=(),
        probe_error=0.0,
        context_length=1,
        max_payload_bytes=2**30,
    )
    servicer = Receiver(Intake(other, profile, metrics), metrics)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Any, int]:
        server = grpc.aio.server(options=channel.server_options())
        intake_service.register(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    yield servicer, f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def exported(store: ArtifactStore, tmp_path: Path) -> tuple[Stored, Path]:
    """An artifact and its file."""
    made = make(store)
    artifact_file.write(tmp_path / "out.kvf", made, ACCOUNT)
    return made, tmp_path / "out.kvf"


def test_an_import_publishes_the_same_artifact(
    kvferry: Run, exported: tuple[Stored, Path], receiver: tuple[Receiver, str], other: ArtifactStore
) -> None:
    made, path = exported
    shown = kvferry("artifacts", "import", str(path), "--receiver", receiver[1])
    assert shown.exit_code == 0
    assert last_line(shown) == made.artifact_id.hex()
    assert shown.stderr.startswith(f"A1 (text) at {receiver[1]} · artifact ")
    taken = other.get(made.artifact_id)
    assert (taken.encoded, taken.payload_path.read_bytes()) == (made.encoded, made.payload_path.read_bytes())
    assert taken.record.account is not None
    assert msgspec.structs.replace(taken.record.account, transfer_ms=4.0) == ACCOUNT
    assert taken.record.account.transfer_ms not in (0.0, 4.0)
    record = json.loads(last_line(kvferry("artifacts", "import", str(path), "--receiver", receiver[1], "--json")))
    assert record == {
        "artifact_id": made.artifact_id.hex(),
        "method": "A1",
        "form": "text",
        "receiver": receiver[1],
        "manifest_bytes": len(made.encoded),
        "payload_bytes": made.manifest.payload.length,
        "moved_bytes": 0,
        "wire_bytes": 0,
    }


def test_an_import_goes_on_where_it_stopped(
    kvferry: Run, exported: tuple[Stored, Path], receiver: tuple[Receiver, str], other: ArtifactStore
) -> None:
    made, path = exported
    partial = other.begin(made.encoded)
    for index in (0, 2):
        partial.put(index, made.read_chunk(index))
    there = sum(len(made.read_chunk(index)) for index in (0, 2))
    record = json.loads(last_line(kvferry("artifacts", "import", str(path), "--receiver", receiver[1], "--json")))
    assert record["moved_bytes"] == made.manifest.payload.length - there
    assert record["wire_bytes"] > record["moved_bytes"]
    assert other.get(made.artifact_id).payload_path.read_bytes() == made.payload_path.read_bytes()


def test_a_file_without_an_account_is_delivered_with_zeros(
    kvferry: Run, store: ArtifactStore, tmp_path: Path, receiver: tuple[Receiver, str], other: ArtifactStore
) -> None:
    made = make(store)
    artifact_file.write(tmp_path / "out.kvf", made, None)
    shown = kvferry("artifacts", "import", str(tmp_path / "out.kvf"), "--receiver", receiver[1])
    assert "does not say what the artifact cost" in shown.stderr
    account = other.get(made.artifact_id).record.account
    assert account is not None
    assert (account.prefill_tokens, account.dense_bf16_bytes, account.fallback_reason) == (0, 0, None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-1], "is cut short"),
        (lambda data: data[:40], "is cut short"),
        (lambda data: b"", "is cut short"),
        (lambda data: data + b"\x00", "has 1 bytes too many"),
        (lambda data: b"PK" + data[2:], "magic"),
        (lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:], "head: digest"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 4]), "section document.text: chunk 4: digest"),
    ],
)
def test_a_spoilt_file_is_refused_before_anybody_is_asked(
    kvferry: Run,
    exported: tuple[Stored, Path],
    receiver: tuple[Receiver, str],
    spoil: Callable[[bytes], bytes],
    message: str,
) -> None:
    _, path = exported
    path.write_bytes(spoil(path.read_bytes()))
    shown = kvferry("artifacts", "import", str(path), "--receiver", receiver[1])
    assert shown.exit_code == 1
    assert shown.stderr.startswith(f"error: {path}: ")
    assert message in shown.stderr
    assert receiver[0].calls == []


def test_a_refused_import_says_why_and_moves_nothing(
    kvferry: Run, store: ArtifactStore, tmp_path: Path, receiver: tuple[Receiver, str], other: ArtifactStore
) -> None:
    made = make(store, version=2)
    artifact_file.write(tmp_path / "out.kvf", made, ACCOUNT)
    shown = kvferry("artifacts", "import", str(tmp_path / "out.kvf"), "--receiver", receiver[1], "--json")
    assert shown.exit_code == 1
    assert json.loads(last_line(shown))["error"]["code"] == "REFUSED"
    assert "PROMPT_MISMATCH prompt.version: artifact 2, receiver 1" in shown.stderr
    assert receiver[0].calls == ["offer"]
    assert list((other.root / "partial").iterdir()) == []


def test_a_token_is_shown(
    kvferry: Run, exported: tuple[Stored, Path], receiver: tuple[Receiver, str], tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_text("kvf_" + "s" * 43 + "\n")
    secret.chmod(0o600)
    words = ["--receiver", receiver[1], "--token-file", str(secret)]
    assert kvferry("artifacts", "import", str(exported[1]), *words).exit_code == 0
    assert receiver[0].authorizations == ["Bearer kvf_" + "s" * 43]


def test_neither_needs_model_code(exported: tuple[Stored, Path]) -> None:
    made, path = exported
    code = (
        "import sys\nfrom kvferry.cli.main import main\n"
        "store, file, artifact = sys.argv[1:]\n"
        "for words in (['list'], ['verify'], ['export', artifact, file + '2']):\n"
        "    main(['artifacts', *words, '--store', store, '--json'], standalone_mode=False)\n"
        "main(['artifacts', 'import', file, '--receiver', '127.0.0.1:9', '--json'], standalone_mode=False)\n"
        "print(sorted({'mlx', 'mlx_lm', 'transformers', 'kvferry.engine'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(made.path.parents[1]), str(path), made.artifact_id.hex()],
        env=os.environ | {"PYTHONPATH": VIEW},
        capture_output=True,
        text=True,
        check=True,
    )
    listed, verified, written, refused, modules = done.stdout.splitlines()
    assert len(json.loads(listed)["artifacts"]) == 1
    assert json.loads(verified)["damaged"] == 0
    assert Path(json.loads(written)["file"]).read_bytes()[:4] == b"\x89KVF"
    assert json.loads(refused)["error"]["code"] == "UNAVAILABLE"
    assert modules == "[]"
