"""The plain TCP worker over real sockets, driven by frames that another MessagePack library writes."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
from structlog.testing import capture_logs

from kvferry.core import authority, tls
from kvferry.core.addresses import Address
from kvferry.core.admission import Admission
from kvferry.core.errors import ConfigError, NotFoundError
from kvferry.core.store import Stored
from kvferry.core.tls import PeerSecurity
from kvferry.core.tokens import Token, TokenFile, digest_of
from kvferry.engine.model import LoadedModel
from kvferry.receiver import tcp_session, tcp_worker
from kvferry.receiver.tcp_worker import TcpWorker

DOCUMENT = "Every crate that arrives is weighed, counted and entered in the ledger before noon. " * 2
ACCOUNT = json.dumps(
    dict.fromkeys(("prefill_tokens", "dense_bf16_bytes"), 1)
    | dict.fromkeys(("prefill_ms", "method_ms", "encode_ms", "transfer_ms"), 1.0)
)
LOOPBACK = Address("127.0.0.1", 0)
SECRET = "kvf_a-secret-of-the-sender"  # noqa: S105
OFFERED, TAKEN, COMMITTED, FAILED = 2, 4, 6, 7


class Peer:
    """A sender that says exactly what a test tells it to."""

    def __init__(self, endpoint: socket.socket) -> None:
        self.endpoint = endpoint
        self.sent = 0
        self.got = 0

    def raw(self, data: bytes) -> None:
        self.sent += len(data)
        self.endpoint.sendall(data)

    def say(self, *body: Any) -> None:
        data: bytes = msgpack.packb(body)
        self.raw(struct.pack("<I", len(data)) + data)

    def hear(self) -> Any:
        """Return the next frame; None at the end of the stream."""
        head = self._exactly(4)
        if head is None:
            return None
        body = self._exactly(*struct.unpack("<I", head))
        assert body is not None
        return msgpack.unpackb(body)

    def ask(self, *body: Any) -> Any:
        self.say(*body)
        return self.hear()

    def failure(self) -> Any:
        """Return the next frame's code, message and fields; it must be the last. Then hang up."""
        kind, code, message, fields = self.hear()
        assert kind == FAILED
        assert self.hear() is None
        self.endpoint.close()
        return code, message, fields

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            piece = self.endpoint.recv(count - len(data))
            if not piece:
                assert not data
                return None
            data += piece
        self.got += count
        return data


@dataclass
class Running:
    """A worker, what stands behind it, and the peers that talk to it."""

    worker: TcpWorker
    bench: Any
    peers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def connect(self, hello: str | None = "", context: ssl.SSLContext | None = None) -> Peer:
        endpoint = socket.create_connection((self.worker.address.host, self.worker.address.port), timeout=10)
        self.peers.enter_context(endpoint)
        if context is not None:
            endpoint = self.peers.enter_context(context.wrap_socket(endpoint, server_hostname="127.0.0.1"))
        peer = Peer(endpoint)
        if hello is not None:
            peer.say(0, hello, 1, "")
        return peer

    def idle(self, seconds: float = 5.0) -> bool:
        """Wait until no connection is left."""
        until = time.monotonic() + seconds
        while self.worker._threads and time.monotonic() < until:
            time.sleep(0.005)
        return not self.worker._threads

    def metric(self, name: str, **labels: str) -> float:
        return self.bench.intake._metrics.registry.get_sample_value(name, labels) or 0.0

    def visible(self) -> list[bytes]:
        return list(self.bench.store.ids())


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def start(bench: Callable[..., Any], model: LoadedModel) -> Iterator[Start]:
    """Return a factory: ``start(tokens=TokenFile, max_calls=64, context=ssl.SSLContext)``."""
    with contextlib.ExitStack() as stack:

        def run(tokens: TokenFile | None = None, max_calls: int = 64, context: ssl.SSLContext | None = None) -> Running:
            made = bench(model)
            admission = Admission(tokens, max_calls)
            worker = TcpWorker(LOOPBACK, made.intake, made.intake._metrics, admission, context)
            running = Running(worker, made)
            stack.callback(worker.close)
            stack.enter_context(running.peers)
            return running

        yield run


@pytest.fixture
def running(start: Start) -> Running:
    return start()


@pytest.fixture
def kv(artifact: Callable[..., Stored], model: LoadedModel) -> Stored:
    return artifact(model, "B1", DOCUMENT)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


def offer(peer: Peer, kv: Stored) -> list[int]:
    """Offer an artifact and return the chunks that are missing."""
    kind, artifact_id, reasons, missing, committed = peer.ask(1, kv.encoded)
    assert (kind, artifact_id, reasons, committed) == (OFFERED, kv.artifact_id, [], False)
    return [index for first, end in missing for index in range(first, end)]


def put(peer: Peer, kv: Stored, *indices: int) -> None:
    for index in indices:
        assert peer.ask(3, kv.artifact_id, index, kv.read_chunk(index)) == [TAKEN, index]


class TestTransfers:
    def test_an_artifact_arrives_and_is_there_only_then(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        assert offer(peer, kv) == list(range(kv.plan.count))
        put(peer, kv, *range(kv.plan.count))
        assert running.visible() == []
        receipt = peer.ask(5, kv.artifact_id, ACCOUNT)
        payload = kv.manifest.payload
        assert receipt[:4] == [COMMITTED, kv.artifact_id, payload.digest, payload.length]
        stored = running.bench.store.get(kv.artifact_id)
        assert stored.payload_path.read_bytes() == kv.payload_path.read_bytes()
        assert stored.record.account.prefill_tokens == 1
        assert peer.ask(1, kv.encoded) == [OFFERED, kv.artifact_id, [], [], True]
        assert peer.ask(5, kv.artifact_id, ACCOUNT) == receipt

    def test_chunks_may_come_in_any_order_ahead_of_their_acknowledgements_and_twice(
        self, running: Running, kv: Stored
    ) -> None:
        peer = running.connect()
        order = [*reversed(offer(peer, kv)), 3, 3]
        for index in order:
            peer.say(3, kv.artifact_id, index, kv.read_chunk(index))
        assert [peer.hear() for _ in order] == [[TAKEN, index] for index in order]
        receipt = peer.ask(5, kv.artifact_id, ACCOUNT)
        assert receipt[3] == kv.manifest.payload.length + 2 * len(kv.read_chunk(3))
        assert running.metric("kvferry_received_bytes_total", kind="resent") == 2 * len(kv.read_chunk(3))

    def test_one_connection_may_carry_several_artifacts(
        self, running: Running, artifact: Callable[..., Stored], model: LoadedModel
    ) -> None:
        peer = running.connect()
        for number in range(3):
            kv = artifact(model, "B1", f"{number}. {DOCUMENT}")
            put(peer, kv, *offer(peer, kv))
            assert peer.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED
        assert len(running.visible()) == 3

    def test_two_connections_may_share_one_artifact(self, running: Running, kv: Stored) -> None:
        one, two = running.connect(), running.connect()
        half = kv.plan.count // 2
        assert offer(one, kv) == offer(two, kv) == list(range(kv.plan.count))
        put(two, kv, *range(half, kv.plan.count))
        put(one, kv, *range(half))
        assert two.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED
        assert running.visible() == [kv.artifact_id]

    def test_a_refused_artifact_leaves_no_trace_and_the_connection_whole(
        self, start: Start, artifact: Callable[..., Stored], tiny_model: Callable[..., LoadedModel], kv: Stored
    ) -> None:
        running = start()
        foreign = artifact(tiny_model("llama", seed=1), "B1", DOCUMENT)
        peer = running.connect()
        kind, artifact_id, reasons, missing, committed = peer.ask(1, foreign.encoded)
        assert (kind, artifact_id, missing, committed) == (OFFERED, foreign.artifact_id, [], False)
        assert [reason[:2] for reason in reasons] == [["WEIGHTS_MISMATCH", "model.weights"]]
        assert reasons[0][2] != reasons[0][3]
        assert offer(peer, kv)
        assert [path.name for path in (running.bench.store.root / "partial").iterdir()] == [kv.artifact_id.hex()]

    def test_a_commit_with_chunks_missing_names_the_first(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        put(peer, kv, *(index for index in offer(peer, kv) if index not in (3, 7)))
        peer.say(5, kv.artifact_id, ACCOUNT)
        code, message, fields = peer.failure()
        assert (code, fields) == ("TRANSFER", {"chunk": 3, "missing": 2})
        assert message.startswith("chunk 3: missing, 2 chunks in all")
        assert running.visible() == []
        assert offer(running.connect(), kv) == [3, 7]


class TestBrokenConnections:
    @pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 30, 50, -200, -1])
    def test_what_was_acknowledged_stays_wherever_the_connection_is_cut(
        self, running: Running, kv: Stored, cut: int, logs: list[Any]
    ) -> None:
        peer = running.connect()
        offer(peer, kv)
        put(peer, kv, 0, 1, 2, 3, 4)
        body = msgpack.packb([3, kv.artifact_id, 5, kv.read_chunk(5)])
        frame = struct.pack("<I", len(body)) + body
        peer.raw(frame[: cut % len(frame)])
        peer.endpoint.close()
        assert running.idle()
        assert running.visible() == []
        assert offer(running.connect(), kv) == list(range(5, kv.plan.count))
        lines = [line for line in logs if line["event"] == "connection failed"]
        assert [line["code"] for line in lines] == ["TRANSFER"] * (cut != 0)

    def test_a_whole_frame_before_the_cut_counts(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        offer(peer, kv)
        peer.say(3, kv.artifact_id, 0, kv.read_chunk(0))
        peer.raw(b"\xff")
        peer.endpoint.shutdown(socket.SHUT_WR)
        assert peer.hear() == [TAKEN, 0]
        assert peer.failure()[0] == "TRANSFER"
        assert offer(running.connect(), kv)[0] == 1

    def test_a_reset_in_the_middle_of_everything_frees_the_place(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        offer(peer, kv)
        for index in range(4):
            peer.say(3, kv.artifact_id, index, kv.read_chunk(index))
        peer.raw(struct.pack("<I", 5000) + b"\x94\x03")
        peer.endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.endpoint.close()
        assert running.idle()
        assert running.visible() == []
        assert set(offer(running.connect(), kv)) >= set(range(4, kv.plan.count))

    def test_a_port_probe_is_not_worth_a_line(self, running: Running, logs: list[Any]) -> None:
        running.connect(hello=None).endpoint.close()
        assert running.idle()
        assert logs == []


class TestDamage:
    @pytest.mark.parametrize(
        ("change", "code", "words"),
        [
            ("flipped", "INTEGRITY", "chunk 6: digest"),
            ("another chunk's", "INTEGRITY", "chunk 6: digest"),
            ("another artifact's", "INTEGRITY", "chunk 6: digest"),
            ("short", "CONTAINER", "chunk 6: 1023 bytes, expected 1024"),
            ("long", "CONTAINER", "chunk 6: 1025 bytes, expected 1024"),
            ("empty", "CONTAINER", "chunk 6: 0 bytes, expected 1024"),
        ],
    )
    def test_a_chunk_that_is_not_its_own_is_refused_by_name(
        self,
        running: Running,
        kv: Stored,
        change: str,
        code: str,
        words: str,
        artifact: Callable[..., Stored],
        model: LoadedModel,
        logs: list[Any],
    ) -> None:
        index = 6
        good = kv.read_chunk(index)
        assert len(good) == 1024
        other = next(i for i in range(index) if len(kv.read_chunk(i)) == 1024)
        data = {
            "flipped": bytes([good[0] ^ 1]) + good[1:],
            "another chunk's": kv.read_chunk(other),
            "another artifact's": artifact(model, "B1", f"Other. {DOCUMENT}").read_chunk(index),
            "short": good[:-1],
            "long": good + b"\x00",
            "empty": b"",
        }[change]
        peer = running.connect()
        missing = offer(peer, kv)
        peer.say(3, kv.artifact_id, index, data)
        for later in missing[10:30]:
            peer.say(3, kv.artifact_id, later, kv.read_chunk(later))
        got, message, fields = peer.failure()
        assert (got, fields["chunk"]) == (code, index)
        assert message.startswith(words)
        assert running.idle()
        assert running.visible() == []
        assert index in offer(running.connect(), kv)
        assert running.metric("kvferry_integrity_failures_total", stage="chunk") == 1
        assert [line["code"] for line in logs if line["event"] == "connection failed"] == [code]
        # And the rest of the way is open.
        peer = running.connect()
        put(peer, kv, *offer(peer, kv))
        assert peer.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED

    def test_a_chunk_that_does_not_exist(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        offer(peer, kv)
        peer.say(3, kv.artifact_id, kv.plan.count, b"data")
        code, message, _ = peer.failure()
        assert (code, message) == (
            "CONTAINER",
            f"chunk {kv.plan.count}: the payload has {kv.plan.count} chunks",
        )

    @pytest.mark.parametrize("offered", [True, False])
    def test_a_chunk_of_an_artifact_that_was_not_offered(self, running: Running, kv: Stored, *, offered: bool) -> None:
        peer = running.connect()
        if offered:
            offer(peer, kv)
        peer.say(3, b"\x01" * 32, 0, b"data")
        assert peer.failure()[0] == "NOT_FOUND"
        with pytest.raises(NotFoundError):
            running.bench.store.get(b"\x01" * 32)

    @pytest.mark.parametrize(
        ("body", "code", "words"),
        [
            ([3, b"short", 0, b"data"], "INVALID_REQUEST", "artifact_id: 5 bytes, a digest has 32"),
            ([5, b"short", ACCOUNT], "INVALID_REQUEST", "artifact_id: 5 bytes"),
            ([5, b"\x01" * 32, ACCOUNT], "NOT_FOUND", "not offered here"),
            ([5, b"\x01" * 32, "no json"], "INVALID_REQUEST", "account_json"),
            ([1, b""], "MANIFEST", ""),
            ([1, bytes(2**21 + 1)], "TOO_LARGE", "manifest"),
            ([0, "", 1, ""], "INVALID_REQUEST", "frame: Hello is not a request"),
            ([4, 0], "INVALID_REQUEST", "frame: Taken is not a request"),
            ([7, "BUSY", "later", {}], "INVALID_REQUEST", "frame: Failed is not a request"),
            ([8, 1], "TRANSFER", "frame: "),
            ([3, b"\x01" * 32, -1, b"data"], "TRANSFER", "frame: "),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_an_impossible_request_ends_the_connection_with_its_reason(
        self, running: Running, body: list[Any], code: str, words: str
    ) -> None:
        peer = running.connect()
        peer.say(*body)
        got, message, _ = peer.failure()
        assert got == code
        assert words in message
        assert running.idle()
        assert running.connect().ask(1, b"x")[0] == FAILED

    def test_a_fault_of_our_own_ends_one_connection_and_not_the_worker(
        self, running: Running, kv: Stored, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = running.connect()
        offer(peer, kv)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        reported: list[Any] = []
        monkeypatch.setattr(threading, "excepthook", reported.append)
        with monkeypatch.context() as patch:
            patch.setattr(running.bench.intake, "put", fail)
            for index in range(8):
                peer.say(3, kv.artifact_id, index, kv.read_chunk(index))
            assert peer.failure()[0] == "ERROR"
            assert running.idle()
        assert [report.exc_type for report in reported] == [ZeroDivisionError]
        peer = running.connect()
        put(peer, kv, *offer(peer, kv))
        assert peer.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED


class TestGreeting:
    @pytest.mark.parametrize(
        ("data", "code", "words"),
        [
            (msgpack.packb([3, b"\x01" * 32, 0, b"data"]), "INVALID_REQUEST", "hello: must come first, not Put"),
            (msgpack.packb([1, b"manifest"]), "INVALID_REQUEST", "hello: must come first, not Offer"),
            (msgpack.packb([0, "", 2, ""]), "INVALID_REQUEST", "hello: version 2, this receiver speaks 1"),
            (msgpack.packb([0, b"", 1, ""]), "TRANSFER", "frame: "),
            (b"\xc1", "TRANSFER", "frame: "),
            (msgpack.packb([0, "x" * 5000, 1, ""]), "TOO_LARGE", "the limit is 4096"),
        ],
        ids=["put", "offer", "version", "types", "garbage", "large"],
    )
    def test_the_first_frame_must_be_hello(
        self, running: Running, data: bytes, code: str, words: str, logs: list[Any]
    ) -> None:
        peer = running.connect(hello=None)
        peer.raw(struct.pack("<I", len(data)) + data)
        got, message, _ = peer.failure()
        assert got == code
        assert words in message
        assert running.idle()
        (line,) = logs
        assert (line["event"], line["method"], words in line["reason"]) == ("refused", "tcp", True)
        assert line["peer"].startswith("127.0.0.1:")

    def test_another_protocol_is_turned_away(self, running: Running) -> None:
        peer = running.connect(hello=None)
        peer.raw(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peer.failure()[0] == "TOO_LARGE"

    @pytest.mark.parametrize("first", [b"", b"\x0f\x00"])
    def test_who_says_nothing_is_not_waited_for(
        self, start: Start, first: bytes, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
    ) -> None:
        monkeypatch.setattr(tcp_worker, "GREETING_SECONDS", 0.1)
        running = start()
        peer = running.connect(hello=None)
        peer.raw(first)
        begin = time.monotonic()
        assert peer.failure()[0] == "DEADLINE"
        assert time.monotonic() - begin < 3
        assert running.idle()
        assert [line["event"] for line in logs] == ["refused"]

    def test_who_falls_silent_is_not_waited_for(
        self, running: Running, kv: Stored, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_session, "IDLE_SECONDS", 0.15)
        peer = running.connect()
        offer(peer, kv)
        put(peer, kv, 0, 1)
        peer.raw(b"\x00\x04\x00\x00half")
        assert peer.failure()[0] == "DEADLINE"
        assert offer(running.connect(), kv)[0] == 2

    def test_who_does_not_hang_up_after_an_error_is_hung_up_on(
        self, running: Running, kv: Stored, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_session, "_LAST_WORDS_SECONDS", 0.1)
        peer = running.connect()
        offer(peer, kv)
        peer.say(3, kv.artifact_id, 0, b"damaged")
        assert peer.hear()[:2] == [FAILED, "CONTAINER"]
        assert running.idle(2.0)

    def test_the_request_id_of_hello_is_in_the_log(self, running: Running, kv: Stored) -> None:
        seen: list[dict[str, Any]] = []

        class Log:
            def info(self, event: str, **_: Any) -> None:
                import structlog

                seen.append({"event": event, **structlog.contextvars.get_contextvars()})

        running.bench.intake._log = Log()
        peer = running.connect(hello=None)
        peer.say(0, "", 1, "send-17")
        put(peer, kv, *offer(peer, kv))
        peer.ask(5, kv.artifact_id, ACCOUNT)
        assert seen == [{"event": "committed", "request_id": "send-17"}]


def tokens(tmp_path: Path, **limits: Any) -> TokenFile:
    lines = ["[[tokens]]", 'name = "studio"', f'digest = "{digest_of(SECRET)}"']
    lines += [f"{name} = {value}" for name, value in limits.items()]
    path = tmp_path / "tokens.toml"
    path.write_text("\n".join(lines))
    return TokenFile(path)


class TestTokens:
    @pytest.mark.parametrize("shown", ["", "kvf_wrong-secret", SECRET[:-1], SECRET + "x", "x" * 600])
    def test_without_the_right_token_nobody_comes_in(
        self, start: Start, tmp_path: Path, kv: Stored, shown: str, logs: list[Any]
    ) -> None:
        running = start(tokens=tokens(tmp_path))
        peer = running.connect(hello=shown)
        peer.say(1, kv.encoded)
        code, message, _ = peer.failure()
        assert code == "AUTHENTICATION"
        assert running.idle()
        (line,) = logs
        assert line["event"] == "refused"
        for text in (message, json.dumps(line)):
            assert "secret" not in text
            assert "kvf_" not in text
        assert running.metric("kvferry_received_bytes_total", kind="manifest") == 0
        assert running.metric("kvferry_rpcs_total", rpc="tcp", code="UNAUTHENTICATED") == 1

    def test_the_right_token_comes_in_and_owns_what_it_brings(self, start: Start, tmp_path: Path, kv: Stored) -> None:
        running = start(tokens=tokens(tmp_path))
        peer = running.connect(hello=SECRET)
        put(peer, kv, *offer(peer, kv))
        assert peer.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED
        assert running.bench.store.get(kv.artifact_id).record.owner == "studio"

    def test_an_expired_token_and_a_quota_hold_here_too(self, start: Start, tmp_path: Path, kv: Stored) -> None:
        yesterday = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
        peer = start(tokens=tokens(tmp_path, expires=yesterday)).connect(hello=SECRET)
        assert peer.failure()[0] == "AUTHENTICATION"
        peer = start(tokens=tokens(tmp_path, max_bytes=100)).connect(hello=SECRET)
        peer.say(1, kv.encoded)
        assert peer.failure()[0] == "QUOTA"

    @pytest.mark.parametrize(("limits", "max_calls", "field"), [({"max_calls": 2}, 64, "token.max_calls"), ({}, 2, "")])
    def test_a_token_and_the_daemon_have_so_many_places(
        self, start: Start, tmp_path: Path, limits: dict[str, int], max_calls: int, field: str, logs: list[Any]
    ) -> None:
        running = start(tokens=tokens(tmp_path, **limits), max_calls=max_calls)
        peers = [running.connect(hello=SECRET) for _ in range(2)]
        wait_for(lambda: running.worker._admission.limits._running == 2)
        code, _, fields = running.connect(hello=SECRET).failure()
        assert (code, fields["field"]) == ("BUSY", field or "max_calls")
        assert fields["retry_after_ms"] > 0
        wait_for(lambda: [line["event"] for line in logs] == ["refused"])
        peers[0].endpoint.close()
        wait_for(lambda: running.worker._admission.limits._running == 1)
        assert running.connect(hello=SECRET).ask(1, b"")[1] == "MANIFEST"

    def test_places_are_shared_with_calls_over_grpc(self, start: Start, tmp_path: Path) -> None:
        running = start(tokens=tokens(tmp_path), max_calls=1)
        with running.worker._admission.limits.running(Token(name="studio", digest="0" * 64)):
            assert running.connect(hello=SECRET).failure()[0] == "BUSY"
        assert running.connect(hello=SECRET).ask(1, b"")[1] == "MANIFEST"


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


class TestFlood:
    def test_more_connections_than_places_are_turned_away_and_places_come_back(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
    ) -> None:
        monkeypatch.setattr(tcp_worker, "MAX_CONNECTIONS", 5)
        running = start()
        silent = [running.connect(hello=None) for _ in range(5)]
        wait_for(lambda: len(running.worker._threads) == 5)
        code, message, fields = running.connect(hello=None).failure()
        assert (code, fields) == ("BUSY", {"retry_after_ms": 1000})
        assert "5 connections are open" in message
        more = [running.connect(hello=None) for _ in range(200)]
        wait_for(lambda: len(logs) == 100)
        for peer in (*silent, *more):
            peer.endpoint.close()
        assert running.idle()
        assert running.connect().ask(1, b"")[1] == "MANIFEST"

    def test_want_of_files_passes(self, running: Running, monkeypatch: pytest.MonkeyPatch, logs: list[Any]) -> None:
        listener, fails = running.worker._listener, [True, True]

        class Starved:
            def accept(self) -> Any:
                if fails:
                    fails.pop()
                    raise OSError(24, "Too many open files")
                return listener.accept()

            def close(self) -> None:
                listener.close()

        monkeypatch.setattr(tcp_worker, "_PAUSE_SECONDS", 0.01)
        running.worker._listener = Starved()  # type: ignore[assignment]
        assert running.connect().ask(1, b"")[1] == "MANIFEST"
        assert ["Too many open files" in line["reason"] for line in logs if line["event"] == "refused"][:2] == [
            True
        ] * 2

    def test_want_of_threads_turns_away(
        self, running: Running, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
    ) -> None:
        def starved(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starved)
            assert running.connect(hello=None).failure()[0] == "BUSY"
        assert running.idle()
        assert running.connect().ask(1, b"")[1] == "MANIFEST"


class TestEnd:
    def test_an_idle_connection_is_ended_after_the_grace_period(self, running: Running) -> None:
        peer = running.connect()
        wait_for(lambda: bool(running.worker._open))
        begin = time.monotonic()
        running.worker.close(0.2)
        assert 0.15 < time.monotonic() - begin < 3
        assert peer.hear() is None
        with pytest.raises(OSError, match="refused"):
            running.connect()

    def test_a_transfer_may_finish_within_it(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        offer(peer, kv)
        closing = threading.Thread(target=running.worker.close, args=(10.0,))
        closing.start()
        put(peer, kv, *range(kv.plan.count))
        assert peer.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED
        peer.endpoint.close()
        closing.join(5)
        assert not closing.is_alive()
        assert running.visible() == [kv.artifact_id]

    def test_nothing_is_left_and_it_may_be_closed_again(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        offer(peer, kv)
        peer.raw(b"\x00\x04\x00\x00half")
        running.worker.close()
        running.worker.close()
        names = {thread.name for thread in threading.enumerate()}
        assert not {name for name in names if name.startswith("kvferry-tcp")}

    def test_a_port_in_use_is_one_clear_error(self, start: Start) -> None:
        taken = start().worker.address
        with pytest.raises(ConfigError, match=f"^tcp: {taken} cannot be bound: ") as caught:
            TcpWorker(taken, None, None, None)  # type: ignore[arg-type]
        assert caught.value.fields == {"field": "tcp", "value": str(taken)}

    @pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 100, "192.0.2.1"])
    def test_an_address_that_is_not_here_is_one_clear_error(self, host: str) -> None:
        with pytest.raises(ConfigError, match=r"^tcp: .* cannot be bound: "):
            TcpWorker(Address(host, 0), None, None, None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pki:
    """One authority, certificates of its own and of another."""

    folder: Path

    def server(self, *, asks: bool = False) -> ssl.SSLContext:
        folder = self.folder
        return tls.server_context(folder / "node.pem", folder / "node.key", folder / "authority.pem" if asks else None)

    def client(self, authority_name: str = "authority", shown: str = "") -> ssl.SSLContext:
        folder = self.folder
        context = tls.client_context(
            PeerSecurity(
                authority=folder / f"{authority_name}.pem",
                certificate=folder / f"{shown}.pem" if shown else None,
                key=folder / f"{shown}.key" if shown else None,
            )
        )
        assert context is not None
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    for name, pair in {"authority": authority.create(), "foreign-authority": authority.create()}.items():
        (folder / f"{name}.pem").write_bytes(pair.certificate)
        leaf = authority.issue(pair, "node", ("127.0.0.1",))
        stem = "node" if name == "authority" else "foreign"
        (folder / f"{stem}.pem").write_bytes(leaf.certificate)
        (folder / f"{stem}.key").write_bytes(leaf.key)
    return Pki(folder)


class TestTls:
    @pytest.mark.parametrize("asks", [False, True])
    def test_an_artifact_arrives(self, start: Start, pki: Pki, kv: Stored, *, asks: bool) -> None:
        running = start(context=pki.server(asks=asks))
        peer = running.connect(context=pki.client(shown="node" if asks else ""))
        missing = offer(peer, kv)
        for index in missing:
            peer.say(3, kv.artifact_id, index, kv.read_chunk(index))
        assert [peer.hear() for _ in missing] == [[TAKEN, index] for index in missing]
        assert peer.ask(5, kv.artifact_id, ACCOUNT)[0] == COMMITTED
        assert running.visible() == [kv.artifact_id]

    @pytest.mark.parametrize("shown", ["", "foreign"])
    def test_mutual_tls_takes_no_other_certificate(self, start: Start, pki: Pki, shown: str, logs: list[Any]) -> None:
        running = start(context=pki.server(asks=True))
        with pytest.raises(OSError, match="alert|reset|closed|EOF"):
            # With TLS 1.3 a client learns only from the first answer that its certificate was not taken.
            running.connect(context=pki.client(shown=shown)).hear()
        assert running.idle()
        (line,) = logs
        assert line["event"] == "refused"
        assert "TLS handshake failed" in line["reason"]
        assert running.metric("kvferry_rpcs_total", rpc="tcp", code="OK") == 0

    def test_who_speaks_no_tls_is_turned_away(self, start: Start, pki: Pki, logs: list[Any]) -> None:
        running = start(context=pki.server())
        peer = running.connect()
        with contextlib.suppress(OSError):
            while peer.endpoint.recv(100):
                pass
        assert running.idle()
        assert ["TLS handshake failed" in line["reason"] for line in logs] == [True]

    def test_who_speaks_tls_where_there_is_none_is_turned_away(self, running: Running, pki: Pki) -> None:
        with pytest.raises(ssl.SSLError):
            running.connect(context=pki.client())
        assert running.idle()

    def test_a_handshake_that_does_not_go_on_is_not_waited_for(
        self, start: Start, pki: Pki, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_worker, "GREETING_SECONDS", 0.15)
        running = start(context=pki.server())
        peer = running.connect(hello=None)
        begin = time.monotonic()
        peer.raw(b"\x16\x03\x01")
        assert peer.endpoint.recv(100) == b""
        assert 0.1 < time.monotonic() - begin < 3
        assert running.idle()

    def test_closing_ends_a_connection_in_the_middle_of_its_handshake(self, start: Start, pki: Pki) -> None:
        running = start(context=pki.server())
        peer = running.connect(hello=None)
        wait_for(lambda: bool(running.worker._open))
        running.worker.close()
        assert peer.endpoint.recv(100) == b""

    def test_closing_ends_an_encrypted_connection(self, start: Start, pki: Pki, kv: Stored) -> None:
        running = start(context=pki.server())
        peer = running.connect(context=pki.client())
        offer(peer, kv)
        running.worker.close()
        assert peer.hear() is None


class TestAccounts:
    def crossed(self, running: Running, direction: str) -> float:
        kinds = ("manifest", "payload", "resent", "control")
        return sum(running.metric(f"kvferry_{direction}_bytes_total", kind=kind) for kind in kinds)

    def test_every_byte_is_counted_once(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        missing = offer(peer, kv)
        for index in [*missing, 5]:
            peer.say(3, kv.artifact_id, index, kv.read_chunk(index))
        for _ in [*missing, 5]:
            peer.hear()
        peer.say(5, kv.artifact_id, ACCOUNT)
        before_the_receipt = peer.got
        receipt = peer.hear()
        traffic = running.bench.store.get(kv.artifact_id).record.traffic
        assert receipt[3:] == [traffic.received_bytes, traffic.control_bytes]
        assert traffic.wire_bytes == peer.sent + before_the_receipt
        assert traffic.received_bytes == kv.manifest.payload.length + len(kv.read_chunk(5))
        peer.endpoint.close()
        assert running.idle()
        assert self.crossed(running, "received") == peer.sent
        assert self.crossed(running, "sent") == peer.got

    def test_broken_connections_and_refused_chunks_are_charged_to_the_last_byte(
        self, running: Running, kv: Stored
    ) -> None:
        sent = got = 0
        # A frame that is cut off; a chunk that is damaged, with others behind it; an offer that leads nowhere.
        for scene in ("cut", "damaged", "offer"):
            peer = running.connect()
            missing = offer(peer, kv)
            if scene != "offer":
                put(peer, kv, *missing[:3])
            if scene == "cut":
                peer.raw(struct.pack("<I", 2000) + b"half a frame")
            if scene == "damaged":
                peer.say(3, kv.artifact_id, missing[3], bytes(1024))
                for index in missing[4:9]:
                    peer.say(3, kv.artifact_id, index, kv.read_chunk(index))
            peer.endpoint.shutdown(socket.SHUT_WR)
            while peer.hear() is not None:
                pass
            assert running.idle()
            sent, got = sent + peer.sent, got + peer.got
        peer = running.connect()
        missing = offer(peer, kv)
        assert missing == list(range(6, kv.plan.count))
        put(peer, kv, *missing)
        peer.say(5, kv.artifact_id, ACCOUNT)
        before_the_receipt = peer.got
        peer.hear()
        peer.endpoint.close()
        assert running.idle()
        traffic = running.bench.store.get(kv.artifact_id).record.traffic
        assert traffic.wire_bytes == sent + got + peer.sent + before_the_receipt
        # Chunks that nobody looked at any more may be counted with their frames.
        least = 16 + 1024 + sum(len(kv.read_chunk(index)) for index in range(7, 12))
        assert least <= traffic.resent_bytes <= least + 5 * 50
        assert self.crossed(running, "received") == sent + peer.sent
        assert self.crossed(running, "sent") == got + peer.got

    def test_connections_are_counted_by_how_they_end(self, running: Running, kv: Stored) -> None:
        peer = running.connect()
        offer(peer, kv)
        wait_for(lambda: running.metric("kvferry_rpcs_in_flight", rpc="tcp") == 1)
        peer.endpoint.close()
        peer = running.connect()
        peer.say(3, b"\x01" * 32, 0, b"data")
        assert peer.failure()[0] == "NOT_FOUND"
        assert running.idle()
        assert running.metric("kvferry_rpcs_total", rpc="tcp", code="OK") == 1
        assert running.metric("kvferry_rpcs_total", rpc="tcp", code="NOT_FOUND") == 1
        assert running.metric("kvferry_rpcs_in_flight", rpc="tcp") == 0
