"""Certificates, keys and authorities: what is refused and how; real handshakes, and what the failed ones say."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kvferry.core import authority, certificates, channel, handshakes, rpc, tls
from kvferry.core.addresses import Address
from kvferry.core.authority import Pair
from kvferry.core.errors import AuthenticationError, ConfigError, KvferryError, UnavailableError
from kvferry.core.tls import PeerSecurity

METHOD = "/kvferry.test.EchoService/Echo"
TOKEN = "kvf_x"  # noqa: S105
NOW = datetime.datetime.now(datetime.UTC)
LONG_AGO = NOW - datetime.timedelta(days=100)


@dataclass(frozen=True)
class Files:
    """The files of one certificate."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Pki:
    """Certificates of every kind. They are made once: nothing in the tests changes a file."""

    folder: Path
    pair: Pair
    authority: Path
    foreign_authority: Path
    good: Files
    expired: Files
    foreign: Files
    elsewhere: Files

    def write(self, name: str, pair: Pair) -> Files:
        return write(self.folder, name, pair)


def write(folder: Path, name: str, pair: Pair) -> Files:
    files = Files(folder / f"{name}.pem", folder / f"{name}.key")
    files.certificate.write_bytes(pair.certificate)
    files.key.write_bytes(pair.key)
    return files


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    own, foreign = authority.create(), authority.create()
    hosts = ("127.0.0.1", "localhost")
    return Pki(
        folder,
        own,
        write(folder, "authority", own).certificate,
        write(folder, "foreign-authority", foreign).certificate,
        write(folder, "good", authority.issue(own, "good", hosts)),
        write(folder, "expired", authority.issue(own, "expired", hosts, 30, LONG_AGO)),
        write(folder, "foreign", authority.issue(foreign, "foreign", hosts)),
        write(folder, "elsewhere", authority.issue(own, "elsewhere", ("mac-studio.local",))),
    )


Serve = Callable[..., "contextlib.AbstractAsyncContextManager[Address]"]


@pytest.fixture
def serve(pki: Pki) -> Serve:
    """Return a function that serves an echo of the request and its authorization."""

    @contextlib.asynccontextmanager
    async def run(files: Files | None, client_authority: Path | None = None) -> AsyncIterator[Address]:
        async def echo(request: bytes, context: Any) -> bytes:
            given = [value for key, value in context.invocation_metadata() if key == "authorization"]
            return request + b"|" + ",".join(given).encode()

        server = grpc.aio.server(options=channel.server_options())
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvferry.test.EchoService", handlers),))
        if files is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            # Read without the checks of read_identity, which would not let an expired certificate serve.
            identity = certificates.Identity(files.certificate.read_bytes(), files.key.read_bytes(), NOW)
            port = server.add_secure_port("127.0.0.1:0", tls.server_credentials(identity, client_authority))
        await server.start()
        try:
            yield Address("127.0.0.1", port)
        finally:
            await server.stop(None)

    return run


async def call(address: Address, security: PeerSecurity) -> bytes:
    async with channel.open_async(address, security) as peer:
        with rpc.translating(str(address), "Echo"):
            answer: bytes = await peer.unary_unary(METHOD)(b"hello", timeout=10)
            return answer


async def refused(address: Address, security: PeerSecurity) -> str:
    with pytest.raises(UnavailableError) as caught:
        await call(address, security)
    assert "\n" not in caught.value.message
    return caught.value.message


class TestFiles:
    def test_a_pair_is_read_with_its_last_day(self, pki: Pki) -> None:
        identity = certificates.read_identity(pki.good.certificate, pki.good.key)
        assert identity.certificate == pki.good.certificate.read_bytes()
        assert identity.key == pki.good.key.read_bytes()
        assert abs(identity.expires - NOW - datetime.timedelta(days=365)) < datetime.timedelta(minutes=5)
        assert "PRIVATE" not in repr(identity)

    @pytest.mark.parametrize(
        ("certificate", "key", "words"),
        [
            ("none.pem", "good.key", ["certificate", "none.pem", "No such file"]),
            ("good.pem", "none.key", ["key", "none.key", "No such file"]),
            (".", "good.key", ["certificate", "directory"]),
            ("good.key", "good.key", ["certificate", "good.key", "no PEM certificate"]),
            ("good.pem", "good.pem", ["key", "good.pem", "no PEM private key"]),
            ("good.pem", "elsewhere.key", ["key", "elsewhere.key", "good.pem", "does not belong"]),
            ("expired.pem", "expired.key", ["certificate", "expired.pem", "expired on"]),
            ("garbage", "good.key", ["certificate", "garbage", "no PEM certificate"]),
            ("cut", "good.key", ["certificate", "cut", "no PEM certificate"]),
            ("good.pem", "encrypted", ["key", "encrypted"]),
            ("good.pem", "ed25519", ["key", "ed25519", "P-256"]),
            ("early.pem", "early.key", ["certificate", "early.pem", "valid only from", "clock"]),
            ("huge", "good.key", ["certificate", "huge", "over 1048576 bytes"]),
        ],
    )
    def test_what_cannot_be_used_is_one_error_that_names_file_and_reason(
        self, pki: Pki, certificate: str, key: str, words: list[str]
    ) -> None:
        (pki.folder / "garbage").write_bytes(b"\x00\xff not PEM")
        (pki.folder / "cut").write_bytes(pki.good.certificate.read_bytes()[:300])
        (pki.folder / "huge").write_bytes(b" " * (certificates.MAX_PEM_BYTES + 1))
        (pki.folder / "encrypted").write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1()), b"passphrase"))
        (pki.folder / "ed25519").write_bytes(private_pem(ed25519.Ed25519PrivateKey.generate(), None))
        pki.write("early", authority.issue(pki.pair, "early", ("a",), now=NOW + datetime.timedelta(days=5)))
        with pytest.raises(ConfigError) as caught:
            certificates.read_identity(pki.folder / certificate, pki.folder / key)
        message = caught.value.message
        assert [word for word in words if word not in message] == []
        assert "\n" not in message
        assert "PRIVATE" not in message

    @pytest.mark.parametrize(("certificate", "key", "missing"), [("x", None, "key"), (None, "x", "certificate")])
    def test_half_a_pair_is_refused(self, certificate: str | None, key: str | None, missing: str) -> None:
        paths = [Path(name) if name else None for name in (certificate, key)]
        with pytest.raises(ConfigError, match=f"^{missing}: is needed"):
            certificates.read_identity(*paths)

    def test_an_authority_that_has_expired_is_refused_unless_a_newer_one_stands_beside_it(self, pki: Pki) -> None:
        old = authority.create(30, LONG_AGO).certificate
        path = pki.folder / "old-authority.pem"
        path.write_bytes(old)
        with pytest.raises(ConfigError, match=r"authority: .*old-authority\.pem: expired on"):
            certificates.read_authority(path)
        path.write_bytes(old + pki.authority.read_bytes())
        assert certificates.read_authority(path) == path.read_bytes()

    @pytest.mark.parametrize(("mode", "private"), [(0o600, True), (0o400, True), (0o640, False), (0o604, False)])
    def test_a_key_that_others_can_read_is_noticed(self, tmp_path: Path, mode: int, *, private: bool) -> None:
        path = tmp_path / "key"
        path.touch()
        path.chmod(mode)
        assert certificates.is_private(path) is private


def private_pem(key: Any, passphrase: bytes | None) -> bytes:
    protection: Any = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    return pem


class TestHandshakes:
    async def test_a_certificate_of_the_authority_is_trusted(self, pki: Pki, serve: Serve) -> None:
        async with serve(pki.good) as address:
            for host in ("127.0.0.1", "localhost"):
                assert await call(Address(host, address.port), PeerSecurity(pki.authority)) == b"hello|"

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ("expired", "certificate has expired"),
            ("foreign", "not signed by the authority"),
            ("elsewhere", "for another host name"),
            (None, "does not speak TLS"),
        ],
    )
    async def test_any_other_server_is_refused_with_the_reason(
        self, pki: Pki, serve: Serve, files: str | None, words: str
    ) -> None:
        async with serve(getattr(pki, files) if files else None) as address:
            assert words in await refused(address, PeerSecurity(pki.authority))

    async def test_a_client_without_tls_is_told_that_the_peer_may_want_it(self, pki: Pki, serve: Serve) -> None:
        async with serve(pki.good) as address:
            assert "may ask for TLS" in await refused(address, PeerSecurity())
            assert await call(address, PeerSecurity(pki.authority)) == b"hello|"

    async def test_mutual_tls_takes_only_clients_of_the_authority(self, pki: Pki, serve: Serve) -> None:
        async with serve(pki.good, pki.authority) as address:
            for files in (None, pki.foreign):
                security = PeerSecurity(
                    pki.authority, files.certificate if files else None, files.key if files else None
                )
                assert "client certificate" in await refused(address, security)
            # A client does not show an expired certificate: it finds out by itself.
            with pytest.raises(ConfigError, match="expired on"):
                await call(address, PeerSecurity(pki.authority, pki.expired.certificate, pki.expired.key))
            # A certificate for any host is good for a client, which has no address to be dialled at.
            for files in (pki.good, pki.elsewhere):
                security = PeerSecurity(pki.authority, files.certificate, files.key)
                assert await call(address, security) == b"hello|"

    @pytest.mark.parametrize(
        ("details", "expected"),
        [
            ("", ""),
            ("Socket closed", ""),
            ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", ""),
            ("failed to connect to all addresses; handshake failed: something new", "TLS handshake failed"),
            ("failed to connect to all addresses; CERTIFICATE_VERIFY_FAILED: something new", "cannot be verified"),
        ],
    )
    def test_only_a_failed_handshake_is_explained_as_one(self, details: str, expected: str) -> None:
        found = handshakes.explain(details)
        assert expected in found
        assert bool(found) == bool(expected)


class TestTokens:
    async def test_a_token_goes_with_every_call_over_tls(self, pki: Pki, serve: Serve) -> None:
        async with serve(pki.good) as address:
            assert await call(address, PeerSecurity(pki.authority, token=TOKEN)) == b"hello|Bearer kvf_x"
            security = PeerSecurity(pki.authority, token=TOKEN)
            with channel.open_blocking(address, security) as peer:
                echo = peer.unary_unary(METHOD)
                assert await asyncio.to_thread(echo, b"a", timeout=10) == b"a|Bearer kvf_x"
                answer, _ = await asyncio.to_thread(echo.with_call, b"b", timeout=10, metadata=(("x-more", "1"),))
                assert answer == b"b|Bearer kvf_x"
                assert await asyncio.to_thread(echo.future(b"c", timeout=10).result) == b"c|Bearer kvf_x"

    async def test_on_loopback_a_token_needs_no_tls(self, serve: Serve) -> None:
        async with serve(None) as address:
            assert await call(address, PeerSecurity(token=TOKEN)) == b"hello|Bearer kvf_x"

    @pytest.mark.parametrize("opened", [channel.open_async, channel.open_blocking])
    def test_a_token_never_crosses_a_network_unencrypted(self, pki: Pki, opened: Callable[..., Any]) -> None:
        address = Address("192.0.2.1", 7412)
        with pytest.raises(
            ConfigError, match=r"token: would cross the network to 192\.0\.2\.1:7412 unencrypted"
        ) as caught:
            opened(address, PeerSecurity(token=TOKEN))
        assert TOKEN not in repr(caught.value) + str(caught.value.fields)

    async def test_unless_that_was_asked_for(self, pki: Pki) -> None:
        address = Address("192.0.2.1", 7412)
        for security in (PeerSecurity(token=TOKEN, insecure=True), PeerSecurity(pki.authority, token=TOKEN)):
            await channel.open_async(address, security).close()
            channel.open_blocking(address, security).close()

    def test_nothing_that_prints_it_shows_a_token(self) -> None:
        assert TOKEN not in repr(PeerSecurity(token=TOKEN))

    def test_a_certificate_without_an_authority_is_refused(self, pki: Pki) -> None:
        with pytest.raises(ConfigError, match="authority"):
            channel.open_blocking(Address("127.0.0.1", 1), PeerSecurity(None, pki.good.certificate, pki.good.key))

    async def test_streams_are_grpcs_own_calls(self, serve: Serve) -> None:
        async with serve(None) as address, channel.open_async(address, PeerSecurity(token=TOKEN)) as peer:
            calls = [peer.unary_stream(METHOD)(b""), peer.stream_unary(METHOD)(), peer.stream_stream(METHOD)()]
            for stream in calls:
                assert type(stream).__module__ == "grpc.aio._call"
                stream.cancel()


async def test_a_foreign_unauthenticated_status_becomes_our_error() -> None:
    async def refuse(_: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")
        return b""

    server = grpc.aio.server()
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvferry.test.EchoService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(KvferryError) as caught:
            await call(Address("127.0.0.1", port), PeerSecurity())
    finally:
        await server.stop(None)
    assert type(caught.value) is AuthenticationError
    assert "who are you" in caught.value.message


def test_a_client_without_tls_never_loads_cryptography() -> None:
    code = (
        "import sys\n"
        "from kvferry.core import channel\n"
        "from kvferry.core.addresses import Address\n"
        "channel.open_blocking(Address('127.0.0.1', 1)).close()\n"
        "print('cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
