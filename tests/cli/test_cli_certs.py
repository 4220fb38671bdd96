"""``kvferry certs``: what it writes is what TLS and the token file take, and secrets are for their owner only."""

from __future__ import annotations

import hashlib
import json
import ssl
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import Result

from kvferry.core.tokens import TokenFile

Run = Callable[..., Result]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def shake_hands(folder: Path, server: str, client: str | None, host: str) -> None:
    """Have Python's own TLS judge: a server shows its certificate for a host, and asks a client for one."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(folder / f"{server}.pem", folder / f"{server}.key")
    served.load_verify_locations(folder / "authority.pem")
    served.verify_mode = ssl.CERT_REQUIRED if client else ssl.CERT_NONE
    dialled = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    if client:
        dialled.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        dialled.wrap_bio(to_client, to_server, server_hostname=host),
        served.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert ends == []


@pytest.fixture
def folder(tmp_path: Path, kvferry: Run) -> Path:
    """A folder with an authority."""
    assert kvferry("certs", "init", str(tmp_path / "ca")).exit_code == 0
    return tmp_path / "ca"


def failure(result: Result) -> str:
    """Return the one line of an error."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_both_ends_trust_what_the_authority_signed(folder: Path, kvferry: Run) -> None:
    for name, hosts in (("receiver", ["127.0.0.1", "::1", "mac-studio.local"]), ("laptop", ["laptop"])):
        options = [item for host in hosts for item in ("--host", host)]
        assert kvferry("certs", "issue", str(folder), name, *options).exit_code == 0
    for host in ("127.0.0.1", "::1", "mac-studio.local"):
        shake_hands(folder, "receiver", "laptop", host)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch|not valid for"):
        shake_hands(folder, "receiver", None, "192.0.2.1")


def test_another_authority_vouches_for_nobody_here(folder: Path, tmp_path: Path, kvferry: Run) -> None:
    other = tmp_path / "other"
    kvferry("certs", "init", str(other))
    kvferry("certs", "issue", str(other), "receiver", "--host", "127.0.0.1")
    (other / "authority.pem").write_bytes((folder / "authority.pem").read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(other, "receiver", None, "127.0.0.1")


def test_a_certificate_cannot_sign_another(folder: Path, tmp_path: Path, kvferry: Run) -> None:
    kvferry("certs", "issue", str(folder), "receiver", "--host", "a")
    (tmp_path / "forged").mkdir()
    for end in ("pem", "key"):
        (tmp_path / "forged" / f"authority.{end}").write_bytes((folder / f"receiver.{end}").read_bytes())
    result = kvferry("certs", "issue", str(tmp_path / "forged"), "evil", "--host", "a")
    assert "may not sign others" in failure(result)


def test_keys_are_for_their_owner_only(folder: Path, kvferry: Run) -> None:
    kvferry("certs", "issue", str(folder), "receiver", "--host", "a")
    assert mode(folder) == 0o700
    assert [mode(folder / name) for name in ("authority.key", "receiver.key")] == [0o600, 0o600]
    assert sorted(path.name for path in folder.iterdir()) == [
        "authority.key",
        "authority.pem",
        "receiver.key",
        "receiver.pem",
    ]


def test_nothing_is_overwritten_unasked(folder: Path, kvferry: Run) -> None:
    kvferry("certs", "issue", str(folder), "receiver", "--host", "a")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert "is there already" in failure(kvferry("certs", "init", str(folder)))
    assert "is there already" in failure(kvferry("certs", "issue", str(folder), "receiver", "--host", "b"))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert kvferry("certs", "issue", str(folder), "receiver", "--host", "127.0.0.1", "--replace").exit_code == 0
    shake_hands(folder, "receiver", None, "127.0.0.1")


@pytest.mark.parametrize(
    "name",
    ["../escape", "a/b", "/etc/passwd", "..", ".", "", "A", "a b", "a\n", "a\x00", "ä", "-a", "authority", "a.b"],
)
def test_a_name_never_becomes_a_path(folder: Path, kvferry: Run, name: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    line = failure(kvferry("certs", "issue", "--host", "a", "--", str(folder), name))
    assert line.startswith(f"error: name: {name!r}")
    tokens = folder / "tokens.toml"
    if name != "authority":
        failure(kvferry("certs", "token", "--tokens", str(tokens), "--", name))
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize("host", ["", "a b", "a/b", "*.local", "-a", "a_b", "http://a", "a:1", "é.local", "a" * 254])
def test_a_host_is_a_dns_name_or_an_address(folder: Path, kvferry: Run, host: str) -> None:
    line = failure(kvferry("certs", "issue", str(folder), "receiver", f"--host={host}"))
    assert line.startswith("error: host: ")
    assert not (folder / "receiver.pem").exists()


@pytest.mark.parametrize("days", ["0", "-1", "40000"])
def test_a_validity_is_a_sensible_number_of_days(folder: Path, kvferry: Run, days: str) -> None:
    line = failure(kvferry("certs", "issue", str(folder), "receiver", "--host", "a", f"--days={days}"))
    assert days in line


def test_an_authority_that_is_not_there_is_named(tmp_path: Path, kvferry: Run) -> None:
    line = failure(kvferry("certs", "issue", str(tmp_path), "receiver", "--host", "a"))
    assert f"{tmp_path}/authority.pem: No such file" in line


def test_show_says_what_a_certificate_is(folder: Path, kvferry: Run) -> None:
    kvferry("certs", "issue", str(folder), "receiver", "--host", "127.0.0.1", "--host", "studio.local", "--days", "30")
    shown = json.loads(kvferry("certs", "show", str(folder / "receiver.pem"), "--json").stdout)["certificates"]
    (facts,) = shown
    assert facts["subject"] == "CN=receiver"
    assert sorted(facts["hosts"]) == ["127.0.0.1", "studio.local"]
    assert (facts["is_authority"], facts["expired"]) == (False, False)
    der = ssl.PEM_cert_to_DER_cert((folder / "receiver.pem").read_text())
    assert facts["fingerprint"].replace(":", "").lower() == hashlib.sha256(der).hexdigest()
    text = kvferry("certs", "show", str(folder / "authority.pem")).stdout
    assert "authority" in text
    assert "no PEM certificate" in failure(kvferry("certs", "show", str(folder / "receiver.key")))


class TestTokens:
    def test_the_file_gets_the_digest_and_standard_output_the_secret_once(self, tmp_path: Path, kvferry: Run) -> None:
        path = tmp_path / "tokens.toml"
        result = kvferry("certs", "token", "studio", "--tokens", str(path), "--max-calls", "3")
        secret = result.stdout.strip()
        assert secret not in result.stderr
        (entry,) = tomllib.loads(path.read_text())["tokens"]
        assert entry == {"name": "studio", "digest": blake3(secret.encode()).hexdigest(), "max_calls": 3}
        assert mode(path) == 0o600
        assert TokenFile(path).authenticate(secret).name == "studio"

    def test_or_a_file_of_its_own(self, tmp_path: Path, kvferry: Run) -> None:
        path, out = tmp_path / "tokens.toml", tmp_path / "secret"
        result = kvferry("certs", "token", "studio", "--tokens", str(path), "--out", str(out))
        secret = out.read_text().strip()
        assert len(secret) > 40
        assert secret not in result.output
        assert mode(out) == 0o600
        assert TokenFile(path).authenticate(secret).name == "studio"

    def test_json_names_everything(self, tmp_path: Path, kvferry: Run) -> None:
        path, out = tmp_path / "tokens.toml", tmp_path / "secret"
        options = ["--expires", "2030-01-31", "--max-bytes", "10", "--max-artifacts", "2"]
        printed = json.loads(kvferry("certs", "token", "a", "--tokens", str(path), *options, "--json").stdout)
        assert (printed["name"], printed["tokens"]) == ("a", str(path))
        token = TokenFile(path).authenticate(printed["token"])
        assert (str(token.expires), token.max_bytes, token.max_artifacts) == ("2030-01-31", 10, 2)
        printed = json.loads(kvferry("certs", "token", "b", "--tokens", str(path), "--out", str(out), "--json").stdout)
        assert printed == {"name": "b", "tokens": str(path), "out": str(out)}

    def test_a_name_that_is_taken_changes_nothing(self, tmp_path: Path, kvferry: Run) -> None:
        path, out = tmp_path / "tokens.toml", tmp_path / "secret"
        kvferry("certs", "token", "studio", "--tokens", str(path))
        before = path.read_bytes()
        assert "studio" in failure(kvferry("certs", "token", "studio", "--tokens", str(path), "--out", str(out)))
        assert path.read_bytes() == before
        assert not out.exists()

    def test_a_secret_is_never_written_over_a_file(self, tmp_path: Path, kvferry: Run) -> None:
        path, out = tmp_path / "tokens.toml", tmp_path / "precious"
        out.write_text("precious")
        assert "is there already" in failure(
            kvferry("certs", "token", "studio", "--tokens", str(path), "--out", str(out))
        )
        assert out.read_text() == "precious"
        assert not path.exists()

    def test_a_broken_token_file_is_not_touched(self, tmp_path: Path, kvferry: Run) -> None:
        path = tmp_path / "tokens.toml"
        path.write_text("[[tokens")
        assert str(path) in failure(kvferry("certs", "token", "studio", "--tokens", str(path)))
        assert path.read_text() == "[[tokens"

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path, kvferry: Run) -> None:
        result: Any = kvferry("certs", "token", "studio", "--tokens", str(tmp_path / "no" / "tokens.toml"))
        assert "No such file" in failure(result)
