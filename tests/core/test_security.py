"""Which protection a configuration asks for, what it refuses to do without, and where the daemon's own token goes."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvferry.core import authority, config, security
from kvferry.core.addresses import Address, parse
from kvferry.core.config import NodeConfig, ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError
from kvferry.core.tls import PeerSecurity

SECRET = "kvf_a-secret-of-the-sender"  # noqa: S105
EVERYWHERE = "0.0.0.0:7412"


def load(**options: Any) -> NodeConfig:
    return config.load(ReceiverConfig, None, {}, options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every file that a daemon may be given."""
    own = authority.create()
    (tmp_path / "authority.pem").write_bytes(own.certificate)
    pair = authority.issue(own, "node", ("127.0.0.1",))
    (tmp_path / "node.pem").write_bytes(pair.certificate)
    (tmp_path / "node.key").write_bytes(pair.key)
    (tmp_path / "node.key").chmod(0o600)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "tokens.toml").write_text("")
    return tmp_path


def files(folder: Path, *names: str) -> dict[str, str]:
    known = {
        "certificate": "node.pem",
        "key": "node.key",
        "authority": "authority.pem",
        "tokens": "tokens.toml",
        "token_file": "secret",
    }
    return {name: str(folder / known[name]) for name in names}


class TestConfiguration:
    @pytest.mark.parametrize(
        ("given", "missing"),
        [
            ({}, "certificate, key, tokens"),
            ({"certificate": "c", "key": "k"}, "tokens"),
            ({"tokens": "t"}, "certificate, key"),
        ],
    )
    def test_an_open_address_needs_tls_and_tokens(self, given: dict[str, str], missing: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(listen=EVERYWHERE, **given)
        assert f"give {missing} (`kvferry certs` makes them)" in caught.value.message
        assert load(listen=EVERYWHERE, insecure=True, **given).insecure

    @pytest.mark.parametrize(
        ("given", "missing"),
        [
            ({}, "certificate, key, tokens"),
            ({"certificate": "c", "key": "k"}, "tokens"),
            ({"tokens": "t"}, "certificate, key"),
        ],
    )
    def test_so_does_an_open_address_of_the_tcp_worker(self, given: dict[str, str], missing: str) -> None:
        with pytest.raises(ConfigError, match="^tcp: 0.0.0.0:7412 can be reached") as caught:
            load(tcp=EVERYWHERE, **given)
        assert f"give {missing} (`kvferry certs` makes them)" in caught.value.message
        assert load(tcp=EVERYWHERE, insecure=True, **given).insecure
        assert load(tcp=EVERYWHERE, certificate="c", key="k", tokens="t")
        assert load(tcp="127.0.0.1:0", **given)
        with pytest.raises(ConfigError, match="^tcp: 'nowhere' is not host:port"):
            load(tcp="nowhere")

    def test_with_both_it_needs_nothing_else(self) -> None:
        loaded = load(listen=EVERYWHERE, certificate="c", key="k", tokens="t")
        assert not loaded.insecure

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"certificate": "c"}, ["key", "together"]),
            ({"key": "k"}, ["certificate", "together"]),
            ({"client_certificates": True}, ["client_certificates", "certificate and authority"]),
            ({"client_certificates": True, "certificate": "c", "key": "k"}, ["client_certificates", "authority"]),
            ({"max_calls": 0}, ["max_calls", "0"]),
        ],
    )
    @pytest.mark.parametrize("insecure", [False, True])
    def test_settings_that_make_no_sense_are_refused_wherever_it_listens(
        self, given: dict[str, Any], words: list[str], *, insecure: bool
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            load(insecure=insecure, **given)
        assert all(word in caught.value.message for word in words)


class TestServer:
    def test_loopback_by_default_has_neither_tls_nor_tokens(self) -> None:
        assert security.for_server(ReceiverConfig()).credentials is None

    def test_with_a_certificate_it_serves_tls(self, folder: Path) -> None:
        given = files(folder, "certificate", "key", "authority", "tokens", "token_file")
        with capture_logs() as logs:
            protection = security.for_server(load(listen=EVERYWHERE, client_certificates=True, **given))
        assert protection.credentials is not None
        assert logs == []

    @pytest.mark.parametrize("tcp", ["", "127.0.0.1:0"])
    def test_a_tcp_worker_gets_the_same_files(self, folder: Path, tcp: str) -> None:
        assert security.for_server(load(tcp=tcp)).context is None
        given = files(folder, "certificate", "key", "authority")
        context = security.for_server(load(tcp=tcp, **given)).context
        assert (context is not None) is bool(tcp)
        asking = security.for_server(load(tcp=tcp, client_certificates=True, **given)).context
        if context is not None and asking is not None:
            assert (context.verify_mode, asking.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)
            assert {one.minimum_version for one in (context, asking)} == {ssl.TLSVersion.TLSv1_2}

    @pytest.mark.parametrize(
        ("setting", "file"),
        [
            ("certificate", "node.pem"),
            ("key", "node.key"),
            ("authority", "authority.pem"),
            ("tokens", "tokens.toml"),
            ("token_file", "secret"),
        ],
    )
    def test_every_file_is_read_before_anything_else_happens(self, folder: Path, setting: str, file: str) -> None:
        given = files(folder, "certificate", "key", "authority", "tokens", "token_file")
        (folder / file).unlink()
        with pytest.raises(ConfigError, match=rf"^{setting}: .*{file}: No such file"):
            security.for_server(load(**given))

    def test_a_key_that_others_can_read_and_a_certificate_that_ends_soon_are_worth_a_line(self, folder: Path) -> None:
        own = authority.create()
        pair = authority.issue(own, "node", ("a",), days=20)
        (folder / "node.pem").write_bytes(pair.certificate)
        (folder / "node.key").write_bytes(pair.key)
        (folder / "node.key").chmod(0o644)
        with capture_logs() as logs:
            security.for_server(load(**files(folder, "certificate", "key")))
        assert [line["event"] for line in logs] == [
            "certificate expires soon",
            "key can be read by other users of this machine",
        ]
        assert pair.key.decode() not in repr(logs)

    def test_a_tilde_is_the_home_directory(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder))
        assert security.for_server(load(certificate="~/node.pem", key="~/node.key")).credentials is not None


def sender(folder: Path, *names: str, **options: Any) -> SenderConfig:
    return config.load(SenderConfig, None, {}, {**files(folder, *names), **options})


class TestPeers:
    """The sender's own token, towards the receiver that a request names and the one that it is configured with."""

    def reached(self, loaded: SenderConfig, peer: str) -> PeerSecurity:
        return security.for_peer(loaded, parse(peer, "receiver"), parse(loaded.receiver, "receiver"))

    def test_nothing_configured_is_nothing_shown(self, folder: Path) -> None:
        assert self.reached(sender(folder), "127.0.0.1:7412") == PeerSecurity()

    def test_with_an_authority_whoever_it_vouches_for_gets_the_token(self, folder: Path) -> None:
        loaded = sender(folder, "authority", "token_file", "certificate", "key")
        found = self.reached(loaded, "192.0.2.9:7412")
        assert (found.token, found.authority) == (SECRET, folder / "authority.pem")
        assert (found.certificate, found.key) == (folder / "node.pem", folder / "node.key")

    @pytest.mark.parametrize(
        ("configured", "asked", "shown"),
        [
            ("127.0.0.1:7412", "127.0.0.1:7412", True),
            ("127.0.0.1:7412", "localhost:7412", True),
            ("127.0.0.1:7412", "[::1]:7412", True),
            ("127.0.0.1:7412", "127.0.0.1:7413", False),
            ("127.0.0.1:7412", "192.0.2.9:7412", False),
            ("192.0.2.9:7412", "192.0.2.9:7412", True),
            ("192.0.2.9:7412", "192.0.2.8:7412", False),
            ("192.0.2.9:7412", "127.0.0.1:7412", False),
        ],
    )
    def test_without_tls_a_request_cannot_draw_the_token_to_another_address(
        self, folder: Path, configured: str, asked: str, *, shown: bool
    ) -> None:
        loaded = sender(folder, "token_file", receiver=configured, insecure=True)
        assert self.reached(loaded, asked).token == (SECRET if shown else None)

    def test_insecure_is_the_configurations_word(self, folder: Path) -> None:
        assert self.reached(sender(folder, insecure=True), "192.0.2.9:7412").insecure
        assert not self.reached(sender(folder), "192.0.2.9:7412").insecure

    def test_a_token_that_was_replaced_is_read_anew(self, folder: Path) -> None:
        loaded = sender(folder, "token_file")
        (folder / "secret").write_text("kvf_new")
        assert self.reached(loaded, "127.0.0.1:7412").token == "kvf_new"  # noqa: S105


@pytest.mark.parametrize("host", ["unix", "vsock", "unix-abstract", "external"])
def test_no_host_is_the_path_of_a_socket(host: str) -> None:
    # gRPC would open a socket file in the working directory.
    for text in (f"{host}:7412", f"[{host}:/run/x]:7412"):
        with pytest.raises(ConfigError, match="receiver"):
            parse(text, "receiver")


@pytest.mark.parametrize(
    "text", ["../../etc/passwd:1", "a/b:1", "a b:1", "a\n:1", "a%2f:1", "é:1", "dns:///a:1", "[fe80::1%../x]:1"]
)
def test_a_host_is_a_name_or_an_address_and_nothing_else(text: str) -> None:
    with pytest.raises(ConfigError, match="receiver"):
        parse(text, "receiver")


def test_a_host_that_is_a_scheme_of_grpcs_is_dialled_as_a_host() -> None:
    from kvferry.core import channel

    assert channel._target(Address("dns", 1)) == "dns:///dns:1"
    assert channel._target(Address("::1", 1)) == "dns:///[::1]:1"
