"""A receiver with a plain TCP worker beside gRPC: sent over one, asked over the other, protected as the other is."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Client
from kvferry.core import authority
from kvferry.core.errors import AuthenticationError, ConfigError
from kvferry.core.tokens import digest_of

MODEL = {"heads": 2, "kv_heads": 1, "head_dim": 8, "layers": 2}
DOCUMENT = "The ferry leaves at dawn with eleven crates of paper. " * 8
QUESTION = "When does it leave?"
SECRET = "kvf_a-secret-of-the-sender"  # noqa: S105

pytestmark = pytest.mark.slow


def listening(process: Any) -> dict[str, str]:
    """Read the line that a daemon announces itself with."""
    record: dict[str, str] = json.loads(process.popen.stdout.readline())
    process.__dict__["address"] = record["address"]
    return record


@pytest.fixture
def model(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir(**MODEL)


def test_sent_over_tcp_and_asked_over_grpc(process: Callable[..., Any], model: Path) -> None:
    receiver = process("receiver", model, tcp="127.0.0.1:0")
    record = listening(receiver)
    other = process("receiver", model, store="other")
    sender = process("sender", model, receiver=f"tcp://{record['tcp']}", chunk_bytes=1024)
    with Client(sender=sender.address, receiver=record["address"], deliver_to=f"tcp://{record['tcp']}") as kv:
        report = kv.send(text=DOCUMENT, method="B1")
        answer = report.ask(QUESTION, max_tokens=6)
        again = kv.send(text=DOCUMENT, method="B1")
    with Client(sender=sender.address, receiver=other.address) as kv:
        by_grpc = kv.send(text=DOCUMENT, method="B1")
        expected = by_grpc.ask(QUESTION, max_tokens=6)
    # And without a word about the receiver, to the one that the sender's configuration names.
    with Client(sender=sender.address, receiver=record["address"], deliver_to="") as kv:
        configured = kv.send(text=DOCUMENT, method="A1")
        assert configured.ask(QUESTION, max_tokens=2).text is not None
    assert report.receiver == configured.receiver == f"tcp://{record['tcp']}"
    assert report.artifact_id == by_grpc.artifact_id
    assert answer.token_ids == expected.token_ids
    assert answer.ledger.wire_bytes == report.wire_bytes
    assert report.moved_bytes == by_grpc.moved_bytes == report.payload_bytes
    assert (again.moved_bytes, again.reused) == (0, True)
    assert (answer.ledger.resent_bytes, expected.ledger.resent_bytes) == (0, 0)
    assert receiver.end() == 0


def test_a_connection_that_is_idle_ends_with_the_daemon(process: Callable[..., Any], model: Path) -> None:
    receiver = process("receiver", model, tcp="127.0.0.1:0", grace_seconds=0.5)
    record = listening(receiver)
    host, _, port = record["tcp"].rpartition(":")
    with socket.create_connection((host, int(port))) as idle:
        start = time.monotonic()
        receiver.popen.send_signal(signal.SIGTERM)
        idle.settimeout(10)
        # A system resets one that the daemon had not taken yet.
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1) == b""
        assert receiver.popen.wait(20) == 0
        assert time.monotonic() - start < 10
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    own = authority.create()
    pair = authority.issue(own, "node", ("127.0.0.1",))
    contents = {
        "authority": own.certificate,
        "certificate": pair.certificate,
        "key": pair.key,
        "token_file": SECRET.encode(),
        "tokens": f'[[tokens]]\nname = "reader"\ndigest = "{digest_of(SECRET)}"\n'.encode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    return {name: tmp_path / name for name in contents}


def test_protected_as_grpc_is(process: Callable[..., Any], model: Path, files: dict[str, Path]) -> None:
    served = {name: files[name] for name in ("certificate", "key", "tokens", "authority")}
    receiver = process("receiver", model, tcp="127.0.0.1:0", **served)
    record = listening(receiver)
    address = f"tcp://{record['tcp']}"
    trusted = {name: files[name] for name in ("authority", "token_file")}
    good = process("sender", model, store="good", receiver=address, **trusted)
    stranger = process("sender", model, store="stranger", receiver=address, authority=files["authority"])
    with Client(sender=good.address, receiver=record["address"], deliver_to=address) as kv:
        report = kv.send(text=DOCUMENT, method="B1")
    with (
        Client(sender=stranger.address, receiver=record["address"], deliver_to=address) as kv,
        pytest.raises(AuthenticationError, match="the sender's own token_file"),
    ):
        kv.send(text=DOCUMENT, method="B1")
    with Client(receiver=record["address"], authority=files["authority"], token=SECRET) as kv:
        assert [artifact.artifact_id for artifact in kv.artifacts()] == [report.artifact_id]
        assert kv.ask(report.artifact_id, QUESTION, max_tokens=4).ledger.wire_bytes == report.wire_bytes
    assert receiver.end() == 0
    for daemon in (receiver, good, stranger):
        assert SECRET not in daemon.logged()
    assert "refused" in receiver.logged()


def test_an_open_address_without_protection_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    arguments = ["receiver", "--tcp", "0.0.0.0:0", "--model", str(model), "--store", str(tmp_path / "store")]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "tcp: 0.0.0.0:0 can be reached from other machines" in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_client_cannot_ask_over_tcp() -> None:
    with pytest.raises(ConfigError, match="receiver"):
        Client(receiver="tcp://127.0.0.1:7413")
