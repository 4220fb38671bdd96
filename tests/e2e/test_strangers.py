"""Strangers at the door of real daemons with TLS, client certificates and tokens: refused in one line each, and then
the daemon still serves.

A sender and a receiver run as processes of their own, as two machines would. Every test ends with a call that works.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.cli.main import main
from kvferry.client import Client
from kvferry.core import addresses, authority, channel, limits, rpc, tokens
from kvferry.core.digests import digest
from kvferry.core.errors import (
    AuthenticationError,
    BusyError,
    ConfigError,
    InvalidRequestError,
    KvferryError,
    ManifestError,
    NotFoundError,
    PeerError,
    QuotaError,
    TooLargeError,
    UnavailableError,
    UnknownMethodError,
)
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import receiver_service_pb2 as receiver_pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as receiver_grpc
from kvferry.proto.v1 import sender_service_pb2 as sender_pb
from kvferry.proto.v1 import sender_service_pb2_grpc as sender_grpc

pytestmark = pytest.mark.slow

SECONDS = 20.0
DOCUMENT = "The access code of the north warehouse is 4417. The keys are with Ada Lindqvist. "
NAMES = ("studio", "ferry", "crowd", "old")
ACCOUNT = (
    '{"prefill_tokens": %d, "dense_bf16_bytes": 1, "prefill_ms": %s, "method_ms": 0, "encode_ms": 0, "transfer_ms": 0}'
)
TRAVERSAL = "../../../../../../etc/passwd"
REFUSED = "refused"
HANDSHAKE = "Handshake failed"


@dataclass
class Daemon:
    """A daemon process and its log."""

    process: subprocess.Popen[str]
    log: Path
    address: addresses.Address = field(default_factory=lambda: addresses.Address("127.0.0.1", 0))

    def lines(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if REFUSED in line or HANDSHAKE in line]

    @contextlib.contextmanager
    def one_line_more(self, *words: str) -> Iterator[None]:
        """Expect one line about a refusal, which holds these words, and no second one."""
        before = len(self.lines())
        yield
        deadline = time.monotonic() + SECONDS
        while len(self.lines()) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        new = self.lines()[before:]
        assert len(new) == 1, new
        assert [word for word in words if word not in new[0]] == []


@dataclass
class House:
    """Both daemons, every file that belongs to them, and every secret."""

    folder: Path
    secrets: dict[str, str] = field(repr=False)
    own: authority.Pair
    sender: Daemon
    receiver: Daemon
    said: list[str] = field(default_factory=list)

    def path(self, name: str) -> Path:
        return self.folder / name

    def security(self, token: str | None = "studio", node: str | None = "laptop") -> PeerSecurity:  # noqa: S107
        return PeerSecurity(
            authority=self.path("authority.pem"),
            certificate=self.path(f"{node}.pem") if node else None,
            key=self.path(f"{node}.key") if node else None,
            token=self.secrets.get(token, token) if token else None,
        )

    def client(self, token: str = "studio") -> Client:  # noqa: S107
        security = self.security(token)
        return Client(
            sender=str(self.sender.address),
            receiver=str(self.receiver.address),
            authority=security.authority,
            certificate=security.certificate,
            key=security.key,
            token=security.token,
            timeout=SECONDS,
        )

    @contextlib.contextmanager
    def receiving(self, security: PeerSecurity | None = None, host: str = "127.0.0.1") -> Iterator[Any]:
        address = addresses.Address(host, self.receiver.address.port)
        with channel.open_blocking(address, security or self.security()) as opened:
            yield receiver_grpc.ReceiverServiceStub(opened)

    @contextlib.contextmanager
    def sending(self, security: PeerSecurity | None = None) -> Iterator[Any]:
        with channel.open_blocking(self.sender.address, security or self.security()) as opened:
            yield sender_grpc.SenderServiceStub(opened)

    @contextlib.contextmanager
    def refuses(self, kind: type[KvferryError], *words: str) -> Iterator[None]:
        """Expect an error, and keep what it says for the search for secrets."""
        with pytest.raises(KvferryError) as caught, rpc.translating("peer:1", "call"):
            yield
        self.said.append(f"{caught.value.message} {caught.value.fields} {caught.value!r}")
        assert type(caught.value) is kind, caught.value
        assert "\n" not in caught.value.message
        assert [word for word in words if word not in caught.value.message] == []

    def serves(self) -> bool:
        """Call both daemons as a friend."""
        with self.receiving() as receiver, self.sending() as sender:
            node = receiver.Describe(receiver_pb.ReceiverServiceDescribeRequest(), timeout=SECONDS).node
            other = sender.Describe(sender_pb.SenderServiceDescribeRequest(), timeout=SECONDS).node
        return (node.role, other.role) == ("receiver", "sender")


def write_pair(folder: Path, name: str, pair: authority.Pair) -> None:
    (folder / f"{name}.pem").write_bytes(pair.certificate)
    (folder / f"{name}.key").write_bytes(pair.key)
    (folder / f"{name}.key").chmod(0o600)


def write_certificates(folder: Path) -> authority.Pair:
    own, foreign = authority.create(), authority.create()
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=100)
    write_pair(folder, "authority", own)
    for name in ("sender", "receiver", "laptop"):
        write_pair(folder, name, authority.issue(own, name, ("127.0.0.1",)))
    write_pair(folder, "foreign", authority.issue(foreign, "foreign", ("127.0.0.1",)))
    write_pair(folder, "expired", authority.issue(own, "expired", ("127.0.0.1",), 30, long_ago))
    (folder / "foreign-authority.pem").write_bytes(foreign.certificate)
    return own


def write_tokens(folder: Path, secrets: dict[str, str], leave_out: str = "", **ferry: int) -> None:
    """Write the receiver's token file, with a new time however fast the test is."""
    path = folder / "tokens.toml"
    more: dict[str, dict[str, Any]] = {
        "old": {"expires": datetime.date(2020, 1, 1)},
        "crowd": {"max_calls": 2},
        "ferry": ferry,
    }
    path.unlink(missing_ok=True)
    for name, secret in secrets.items():
        if name != leave_out:
            tokens.append(path, tokens.Token(name=name, digest=tokens.digest_of(secret), **more.get(name, {})))


def start(folder: Path, role: str, model: Path, **options: object) -> Daemon:
    log = folder / f"{role}.log"
    given = {
        "listen": "127.0.0.1:0",
        "model": model,
        "store": folder / role / "store",
        "certificate": folder / f"{role}.pem",
        "key": folder / f"{role}.key",
        "authority": folder / "authority.pem",
        "tokens": folder / "tokens.toml",
        "log_format": "json",
        "log_level": "debug",
        **options,
    }
    arguments = [item for name, value in given.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli", role, "--json", "--client-certificates", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return Daemon(process, log)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Callable[..., Path]) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    secrets = {name: tokens.new_secret() for name in NAMES}
    own = write_certificates(folder)
    write_tokens(folder, secrets)
    (folder / "ferry.token").write_text(secrets["ferry"])
    model = tiny_model_dir()
    running = {
        "receiver": start(folder, "receiver", model, max_calls=4),
        "sender": start(folder, "sender", model, token_file=folder / "ferry.token", max_document_bytes=10_000),
    }
    try:
        for daemon in running.values():
            line = daemon.process.stdout.readline() if daemon.process.stdout else ""
            assert line, daemon.log.read_text()[-2000:]
            daemon.address = addresses.parse(json.loads(line)["address"], "listen")
        yield House(folder, secrets, own, **running)
    finally:
        for daemon in running.values():
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait(SECONDS)
            if daemon.process.stdout:
                daemon.process.stdout.close()


def test_friends_carry_a_document_and_ask(house: House) -> None:
    with house.client() as client:
        report = client.send(text=DOCUMENT, method="B1")
        assert report.ask("What is the access code?", max_tokens=4).ledger.wire_bytes > 0
    record = json.loads(
        (house.folder / "receiver" / "store" / "artifacts" / report.artifact_id / "record.json").read_text()
    )
    # The studio asked for it; the sender delivered it, with a token of its own.
    assert record["owner"] == "ferry"
    assert '"token": "ferry"' in house.receiver.log.read_text()
    assert '"token": "studio"' in house.sender.log.read_text()


def test_friends_may_use_the_command_line(house: House) -> None:
    house.path("studio.token").write_text(house.secrets["studio"])
    files = {
        "AUTHORITY": "authority.pem",
        "CERTIFICATE": "laptop.pem",
        "KEY": "laptop.key",
        "TOKEN_FILE": "studio.token",
    }
    environment = {f"KVFERRY_{name}": str(house.path(file)) for name, file in files.items()}
    places = ["--sender", str(house.sender.address), "--receiver", str(house.receiver.address)]
    sent = CliRunner().invoke(main, ["send", "-", *places, "--json"], input=f"6 {DOCUMENT}", env=environment)
    assert sent.exit_code == 0, sent.output
    artifact = json.loads(sent.stdout)["artifact_id"]
    options = [
        word for name, file in files.items() for word in (f"--{name.lower().replace('_', '-')}", str(house.path(file)))
    ]
    asked = CliRunner().invoke(main, ["ask", artifact, "Which code?", "--max-tokens", "2", *places[2:], *options])
    assert asked.exit_code == 0, asked.output
    refused = CliRunner().invoke(main, ["ask", artifact, "Which code?", *places[2:], *options[:-2]])
    assert refused.exit_code == 1
    assert "shows none" in refused.stderr
    environment["KVFERRY_TOKEN_FILE"] = str(house.path("nowhere"))
    missing = CliRunner().invoke(main, ["ask", artifact, "Which code?", *places[2:]], env=environment)
    assert missing.exit_code == 2
    assert "nowhere: No such file" in missing.stderr


class TestCertificates:
    @pytest.mark.parametrize("node", [None, "foreign"])
    def test_a_client_of_another_authority_or_of_none(self, house: House, node: str | None) -> None:
        with (
            house.receiver.one_line_more(HANDSHAKE),
            house.receiving(house.security(node=node)) as stub,
            house.refuses(UnavailableError, "client certificate"),
        ):
            stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
        assert house.serves()

    def test_a_client_whose_certificate_has_expired(self, house: House) -> None:
        with pytest.raises(ConfigError, match="expired on"), house.receiving(house.security(node="expired")):
            pass
        # One that looks no closer at its own certificate is refused by the daemon.
        credentials = grpc.ssl_channel_credentials(
            house.path("authority.pem").read_bytes(),
            house.path("expired.key").read_bytes(),
            house.path("expired.pem").read_bytes(),
        )
        with (
            house.receiver.one_line_more(HANDSHAKE, "expired"),
            grpc.secure_channel(str(house.receiver.address), credentials) as opened,
            house.refuses(UnavailableError),
        ):
            receiver_grpc.ReceiverServiceStub(opened).List(receiver_pb.ListRequest(), timeout=SECONDS)
        assert house.serves()

    def test_a_client_that_trusts_another_authority(self, house: House) -> None:
        security = PeerSecurity(house.path("foreign-authority.pem"), house.path("laptop.pem"), house.path("laptop.key"))
        with house.receiving(security) as stub, house.refuses(UnavailableError, "not signed by the authority"):
            stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
        assert house.serves()

    def test_a_client_that_dials_another_name(self, house: House) -> None:
        with house.receiving(host="localhost") as stub, house.refuses(UnavailableError, "another host name"):
            stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
        assert house.serves()

    def test_a_client_that_speaks_no_tls(self, house: House) -> None:
        with (
            house.receiver.one_line_more(HANDSHAKE),
            house.receiving(PeerSecurity()) as stub,
            house.refuses(UnavailableError, "may ask for TLS"),
        ):
            stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
        assert house.serves()


class TestTokens:
    @pytest.mark.parametrize(
        ("token", "words"),
        [(None, "shows none"), ("kvf_wrong", "not one that this daemon accepts"), ("old", "expired after 2020-01-01")],
    )
    def test_missing_wrong_and_expired(self, house: House, token: str | None, words: str) -> None:
        for daemon, opened, request in (
            (house.receiver, house.receiving, lambda stub: stub.List(receiver_pb.ListRequest(), timeout=SECONDS)),
            (
                house.sender,
                house.sending,
                lambda stub: stub.Describe(sender_pb.SenderServiceDescribeRequest(), timeout=SECONDS),
            ),
        ):
            with (
                daemon.one_line_more(words, "127.0.0.1"),
                opened(house.security(token)) as stub,
                house.refuses(AuthenticationError, words),
            ):
                request(stub)
        assert house.serves()

    def test_revoked_while_the_daemon_runs(self, house: House) -> None:
        with house.receiving(house.security("crowd")) as stub:
            stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
            write_tokens(house.folder, house.secrets, leave_out="crowd")
            with house.receiver.one_line_more("not one that"), house.refuses(AuthenticationError):
                stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
            write_tokens(house.folder, house.secrets)
            stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
        assert house.serves()

    def test_a_sender_whose_own_token_is_refused_says_that_it_is_its_own(self, house: House) -> None:
        house.path("ferry.token").write_text("kvf_not-the-ferrys")
        try:
            with house.client() as client, house.refuses(AuthenticationError, "receiver 127.0.0.1", "token_file"):
                client.send(text=f"1 {DOCUMENT}", method="A1")
        finally:
            house.path("ferry.token").write_text(house.secrets["ferry"])
        with house.client() as client:
            client.send(text=f"1 {DOCUMENT}", method="A1")

    def test_a_receiver_that_nobody_vouches_for_gets_no_token(self, house: House) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            heard: list[bytes] = []

            def hear() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        with connection:
                            connection.settimeout(0.5)
                            with contextlib.suppress(OSError):
                                heard.append(connection.recv(65536))

            threading.Thread(target=hear, daemon=True).start()
            elsewhere = f"127.0.0.1:{listener.getsockname()[1]}"
            with house.client() as client:
                client._peers = client._peers.__class__(**{**vars(client._peers), "deliver_to": elsewhere})
                with house.refuses(UnavailableError):
                    client.send(text=f"2 {DOCUMENT}", method="A1")
            listener.shutdown(socket.SHUT_RDWR)
        assert heard
        assert not [data for data in heard if house.secrets["ferry"].encode() in data]
        assert house.serves()


class TestQuotas:
    def test_a_token_stores_as_much_as_it_may_and_dropping_makes_room(self, house: House) -> None:
        with house.client() as client:
            first = client.send(text=f"3 {DOCUMENT}", method="A1")
            held = len(client.artifacts())
            write_tokens(house.folder, house.secrets, max_artifacts=held)
            with house.refuses(QuotaError, "max_artifacts", f"{held} stored", "1 more", f"limit is {held}"):
                client.send(text=f"4 {DOCUMENT}", method="A1")
            # What is there already costs nothing more.
            assert client.send(text=f"3 {DOCUMENT}", method="A1").artifact_id == first.artifact_id
            client.drop(first)
            client.send(text=f"4 {DOCUMENT}", method="A1")
        write_tokens(house.folder, house.secrets)
        assert house.serves()

    def test_slow_callers_fill_their_own_share_and_no_other(self, house: House) -> None:
        release = threading.Event()

        def trickle() -> Iterator[receiver_pb.PutRequest]:
            release.wait(SECONDS)
            return
            yield

        with house.receiving(house.security("crowd")) as stub:
            slow = [stub.Put(trickle()) for _ in range(2)]
            assert [call.initial_metadata() for call in slow]
            with (
                house.receiver.one_line_more("token crowd has 2 calls"),
                house.refuses(BusyError, "try again in 500 ms"),
            ):
                stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
            assert house.serves()
            for call in slow:
                call.cancel()
            release.set()
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    stub.List(receiver_pb.ListRequest(), timeout=SECONDS)
                    break
                except grpc.RpcError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)


class TestSizes:
    def test_a_message_over_the_limit(self, house: House) -> None:
        credentials = grpc.ssl_channel_credentials(
            *(house.path(name).read_bytes() for name in ("authority.pem", "laptop.key", "laptop.pem"))
        )
        options = [("grpc.max_send_message_length", -1)]
        metadata = (("authorization", f"Bearer {house.secrets['studio']}"),)
        with grpc.secure_channel(str(house.receiver.address), credentials, options=options) as opened:
            stub = receiver_grpc.ReceiverServiceStub(opened)
            for request in (bytes(limits.MAX_MESSAGE_BYTES), bytes(8 * limits.MAX_MESSAGE_BYTES)):
                with house.receiver.one_line_more("over the limit", "127.0.0.1"), house.refuses(TooLargeError):
                    stub.Offer(receiver_pb.OfferRequest(manifest=request), metadata=metadata, timeout=SECONDS)
        assert house.serves()

    def test_a_manifest_over_the_limit_or_of_nothing_but_nesting(self, house: House) -> None:
        with house.receiving() as stub:
            with house.refuses(TooLargeError, str(limits.MAX_MANIFEST_BYTES)):
                stub.Offer(receiver_pb.OfferRequest(manifest=bytes(limits.MAX_MANIFEST_BYTES + 1)), timeout=SECONDS)
            for nested in (
                b"\x91" * 1_000_000,
                b"\x81\xa1a" * 500_000,
                b"\xdf\xff\xff\xff\xff",
                b"\xc6\xff\xff\xff\xff",
            ):
                with house.refuses(ManifestError):
                    stub.Offer(receiver_pb.OfferRequest(manifest=nested), timeout=SECONDS)
        assert house.serves()

    def test_a_document_that_is_announced_too_large(self, house: House) -> None:
        with house.client() as client, house.refuses(TooLargeError, "10001", "10000"):
            client.send(text="x" * 10_001, method="A1")
        assert house.serves()

    @pytest.mark.parametrize(
        "account",
        [
            "[" * 100_000,
            '{"a":' * 100_000,
            '{"prefill_tokens": ' + "9" * 100_000 + "}",
            "\x00",
            "x" * 2_000_000,
            ACCOUNT % (-1, "1.0"),
            ACCOUNT % (10**30, "1.0"),
            ACCOUNT % (1, "-1.0"),
            ACCOUNT % (1, "1e308"),
        ],
    )
    def test_an_account_that_is_none(self, house: House, account: str) -> None:
        with house.client() as client, house.receiving() as stub:
            known = bytes.fromhex(client.send(text=f"5 {DOCUMENT}", method="A1").artifact_id)
            for artifact_id in (known, bytes(32)):
                request = receiver_pb.CommitRequest(artifact_id=artifact_id, account_json=account)
                if artifact_id == known:
                    # Committed already: the receipt comes, and nobody reads the account.
                    assert stub.Commit(request, timeout=SECONDS).receipt.artifact_id == known
                else:
                    with house.refuses(InvalidRequestError if account else NotFoundError):
                        stub.Commit(request, timeout=SECONDS)
        assert house.serves()


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


class TestNames:
    """No name that crosses the wire ever becomes a path."""

    @pytest.fixture(autouse=True)
    def nothing_appears(self, house: House) -> Iterator[None]:
        outside = tree(house.folder)
        here = {path.name for path in Path().iterdir()}
        yield
        assert tree(house.folder) == outside
        assert {path.name for path in Path().iterdir()} == here
        assert house.serves()

    @pytest.mark.parametrize("path", [f"/kvferry.proto.v1.ReceiverService/{TRAVERSAL}", f"/{TRAVERSAL}", "/..//x/.."])
    def test_of_a_call(self, house: House, path: str) -> None:
        for daemon in (house.receiver, house.sender):
            with (
                channel.open_blocking(daemon.address, house.security()) as opened,
                daemon.one_line_more("no such method"),
                house.refuses(PeerError, "UNIMPLEMENTED"),
            ):
                opened.unary_unary(path)(b"", timeout=SECONDS)

    @pytest.mark.parametrize("artifact_id", [b"", b"..", TRAVERSAL.encode(), b"/etc/passwd"])
    def test_of_an_artifact_with_another_length(self, house: House, artifact_id: bytes) -> None:
        with house.receiving() as stub:
            for call in artifact_calls(stub, artifact_id):
                with house.refuses(InvalidRequestError, "artifact_id"):
                    call()

    @pytest.mark.parametrize(
        "artifact_id", [b"../" * 10 + b"..", b"/" * 32, b"\x00" * 32, b"../../../../../../etc/passwd\x00\x00\x00\x00"]
    )
    def test_of_an_artifact_with_the_right_length(self, house: House, artifact_id: bytes) -> None:
        assert len(artifact_id) == 32
        with house.receiving() as stub:
            for call in artifact_calls(stub, artifact_id):
                with house.refuses(NotFoundError, artifact_id.hex()):
                    call()

    @pytest.mark.parametrize("document", [b"..", TRAVERSAL.encode(), b"../" * 10 + b".."])
    def test_of_a_document(self, house: House, document: bytes) -> None:
        request = sender_pb.FetchSpansRequest(document_digest=document, spans=[sender_pb.Span(start=0, end=1)])
        kind = NotFoundError if len(document) == 32 else InvalidRequestError
        with house.sending() as stub, house.refuses(kind):
            stub.FetchSpans(request, timeout=SECONDS)

    @pytest.mark.parametrize(
        ("fields", "kind"),
        [
            ({"method": TRAVERSAL}, UnknownMethodError),
            ({"method": "/etc/passwd"}, UnknownMethodError),
            ({"method": "A1\x00"}, UnknownMethodError),
            ({"method": "x" * 1_000_000}, UnknownMethodError),
            ({"parameters": {TRAVERSAL: sender_pb.ParameterValue(text="x")}}, InvalidRequestError),
            ({"parameters": {"model": sender_pb.ParameterValue(text=TRAVERSAL)}}, InvalidRequestError),
            ({"receiver": TRAVERSAL}, ConfigError),
            ({"receiver": f"{TRAVERSAL}:7412"}, ConfigError),
            ({"receiver": "unix:/etc/passwd"}, ConfigError),
            ({"receiver": "unix:7412"}, ConfigError),
            ({"receiver": "[unix:/tmp/x]:7412"}, ConfigError),
            ({"receiver": "file:///etc/passwd"}, ConfigError),
        ],
    )
    def test_in_a_send(self, house: House, fields: dict[str, Any], kind: type[KvferryError]) -> None:
        text = DOCUMENT.encode()
        start = {"method": "A1", "text_bytes": len(text), "text_digest": digest(text), **fields}
        requests = [sender_pb.SendRequest(start=sender_pb.SendStart(**start)), sender_pb.SendRequest(text=text)]
        with house.sending() as stub, house.refuses(kind):
            list(stub.Send(iter(requests), timeout=SECONDS))


def artifact_calls(stub: Any, artifact_id: bytes) -> list[Callable[[], Any]]:
    account = json.dumps(
        dict.fromkeys(("prefill_tokens", "dense_bf16_bytes"), 0)
        | dict.fromkeys(("prefill_ms", "method_ms", "encode_ms", "transfer_ms"), 0.0)
    )
    return [
        lambda: list(stub.Put(iter([receiver_pb.PutRequest(artifact_id=artifact_id, data=b"x")]), timeout=SECONDS)),
        lambda: stub.Commit(receiver_pb.CommitRequest(artifact_id=artifact_id, account_json=account), timeout=SECONDS),
        lambda: list(
            stub.Ask(
                receiver_pb.AskRequest(artifact_id=artifact_id, question="?", max_tokens=1, top_p=1.0), timeout=SECONDS
            )
        ),
        lambda: stub.Drop(receiver_pb.DropRequest(artifact_id=artifact_id), timeout=SECONDS),
    ]


def test_five_hundred_connections_keep_nobody_out(house: House) -> None:
    crowd = []
    try:
        for number in range(500):
            connection = socket.create_connection(("127.0.0.1", house.receiver.address.port), timeout=SECONDS)
            crowd.append(connection)
            if number % 5 == 0:
                # The beginning of a TLS record that promises more than it brings.
                connection.sendall(b"\x16\x03\x01\x40\x00")
        start_at = time.monotonic()
        assert house.serves()
        assert time.monotonic() - start_at < 5
        with channel.open_blocking(house.receiver.address, house.security(None)) as opened:
            response = health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        for connection in crowd:
            connection.close()
    assert house.serves()


def test_no_secret_is_in_a_log_an_error_or_a_store(house: House) -> None:
    """Runs last: everything above has left its traces."""
    assert house.said
    written = [daemon.log.read_bytes() for daemon in (house.sender, house.receiver)]
    assert all(b"refused" in log for log in written)
    for role in ("sender", "receiver"):
        written += [path.read_bytes() for path in (house.folder / role).rglob("*") if path.is_file()]
    text = b"\n".join([*written, *(line.encode() for line in house.said)])
    for name, secret in house.secrets.items():
        assert secret.encode() not in text, name
    assert not re.search(rb"kvf_|PRIVATE KEY|Bearer", text)
