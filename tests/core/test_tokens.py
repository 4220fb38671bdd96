"""The token file: what it may say, who it lets in, and what happens when it changes or breaks."""

from __future__ import annotations

import datetime
import hmac
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvferry.core import tokens
from kvferry.core.errors import AuthenticationError, ConfigError
from kvferry.core.tokens import Token, TokenFile

SECRET = "kvf_a-secret-of-the-studio"  # noqa: S105
OTHER = "kvf_a-secret-of-the-laptop"
TODAY = datetime.date(2026, 11, 30)


def entry(name: str, secret: str = SECRET, extra: str = "") -> str:
    return f'[[tokens]]\nname = "{name}"\ndigest = "{blake3(secret.encode()).hexdigest()}"\n{extra}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


@pytest.fixture
def write(path: Path) -> Callable[[str], None]:
    """Return a function that writes the file with a new modification time, however fast the test is."""
    times = iter(range(1_700_000_000, 1_700_001_000))

    def write_text(text: str) -> None:
        path.write_text(text)
        now = next(times)
        os.utime(path, (now, now))

    return write_text


def test_a_secret_leads_to_its_token_and_limits(path: Path, write: Callable[[str], None]) -> None:
    write(entry("studio", extra="max_bytes = 10\nmax_artifacts = 2\nmax_calls = 3") + entry("laptop", OTHER))
    file = TokenFile(path)
    studio = file.authenticate(SECRET)
    assert (studio.name, studio.max_bytes, studio.max_artifacts, studio.max_calls) == ("studio", 10, 2, 3)
    assert file.authenticate(OTHER) == Token(name="laptop", digest=blake3(OTHER.encode()).hexdigest())


@pytest.mark.parametrize(
    "secret", ["", "kvf_", SECRET[:-1], SECRET + "x", SECRET.upper(), f" {SECRET}", "x" * 100_000, "\ud800", "é"]
)
def test_any_other_secret_is_refused_without_being_repeated(
    path: Path, write: Callable[[str], None], secret: str
) -> None:
    write(entry("studio"))
    with pytest.raises(AuthenticationError) as caught:
        TokenFile(path).authenticate(secret)
    assert caught.value.message == "token: not one that this daemon accepts"
    assert caught.value.fields == {"field": "token"}


def test_the_digest_itself_is_no_secret(path: Path, write: Callable[[str], None]) -> None:
    write(entry("studio"))
    with pytest.raises(AuthenticationError):
        TokenFile(path).authenticate(blake3(SECRET.encode()).hexdigest())


@pytest.mark.parametrize(("last_day", "accepted"), [(TODAY, True), (TODAY - datetime.timedelta(days=1), False)])
def test_a_token_is_good_through_its_last_day(
    path: Path, write: Callable[[str], None], last_day: datetime.date, *, accepted: bool
) -> None:
    write(entry("studio", extra=f"expires = {last_day}"))
    file = TokenFile(path, today=lambda: TODAY)
    if accepted:
        assert file.authenticate(SECRET).name == "studio"
    else:
        with pytest.raises(AuthenticationError, match=f"studio expired after {last_day}"):
            file.authenticate(SECRET)


def test_every_entry_is_compared_in_constant_time(
    path: Path, write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("".join(entry(f"token-{number}", f"secret-{number}") for number in range(5)))
    compared: list[str] = []
    original = hmac.compare_digest

    def count(one: str, other: str) -> bool:
        compared.append(one)
        return original(one, other)

    file = TokenFile(path)
    monkeypatch.setattr(hmac, "compare_digest", count)
    assert file.authenticate("secret-0").name == "token-0"
    assert len(compared) == 5


def test_an_entry_that_is_deleted_is_revoked_at_the_next_call(path: Path, write: Callable[[str], None]) -> None:
    write(entry("studio") + entry("laptop", OTHER))
    file = TokenFile(path)
    assert file.authenticate(SECRET).name == "studio"
    with capture_logs() as logs:
        write(entry("laptop", OTHER))
        with pytest.raises(AuthenticationError):
            file.authenticate(SECRET)
        assert file.authenticate(OTHER).name == "laptop"
    assert [(line["event"], line["tokens"]) for line in logs] == [("token file read", 1)]


def test_an_empty_file_lets_nobody_in(path: Path, write: Callable[[str], None]) -> None:
    write("")
    with pytest.raises(AuthenticationError):
        TokenFile(path).authenticate(SECRET)


@pytest.mark.parametrize("broken", ["[[tokens", entry("Bad Name", OTHER), "\x00", None])
def test_a_file_that_breaks_keeps_its_last_good_content_and_says_so_once(
    path: Path, write: Callable[[str], None], broken: str | None
) -> None:
    write(entry("studio"))
    file = TokenFile(path)
    with capture_logs() as logs:
        if broken is None:
            path.unlink()
        else:
            write(broken)
        for _ in range(5):
            assert file.authenticate(SECRET).name == "studio"
    assert [line["log_level"] for line in logs] == ["error"]
    assert str(path) in logs[0]["reason"]
    write(entry("laptop", OTHER))
    assert file.authenticate(OTHER).name == "laptop"


def test_a_file_that_is_replaced_by_one_of_equal_size_and_time_is_read(path: Path, tmp_path: Path) -> None:
    path.write_text(entry("studio"))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    file = TokenFile(path)
    aside = tmp_path / "aside"
    aside.write_text(entry("laptop", OTHER))
    os.utime(aside, (1_700_000_000, 1_700_000_000))
    assert aside.stat().st_size == path.stat().st_size
    aside.replace(path)
    assert file.authenticate(OTHER).name == "laptop"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[[token]]", "token"),
        ('[[tokens]]\nname = "a"', "digest"),
        (entry("a", extra="max_call = 3"), "max_call"),
        (entry("a", extra="max_calls = 0"), "max_calls"),
        (entry("a", extra="max_bytes = -1"), "max_bytes"),
        (entry("a", extra='max_bytes = "much"'), "max_bytes"),
        (entry("a", extra='expires = "tomorrow"'), "expires"),
        (entry("a", extra="expires = 2026-01-01T00:00:00Z"), "expires"),
        ('[[tokens]]\nname = "a"\ndigest = "abc"', "digest"),
        (entry("a").replace('digest = "', 'digest = "A'), "digest"),
        (entry("a") + entry("a", OTHER), "name"),
        (entry("a") + entry("b"), "digest"),
        ("tokens = 3", "tokens"),
        ("x = " + "[" * 5000, ""),
        ("[[tokens", ""),
    ],
)
def test_a_mistake_is_one_error_that_names_the_file_and_the_key(
    path: Path, write: Callable[[str], None], text: str, word: str
) -> None:
    write(text)
    with pytest.raises(ConfigError) as caught:
        TokenFile(path)
    assert caught.value.message.startswith(f"tokens: {path}: ")
    assert word in caught.value.message
    assert "\n" not in caught.value.message.strip()


@pytest.mark.parametrize("name", ["", "A", "a b", "../a", "a/b", "-a", "a-", "a\\n", "a.b", "é", "a" * 65])
def test_a_name_is_lower_case_letters_digits_and_hyphens(path: Path, write: Callable[[str], None], name: str) -> None:
    write(entry(name))
    with pytest.raises(ConfigError, match="name"):
        TokenFile(path)


def test_a_file_that_is_missing_too_long_or_no_text_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        TokenFile(path)
    path.write_bytes(b"#" * (tokens.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="over 1048576 bytes"):
        TokenFile(path)
    path.write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="utf-8"):
        TokenFile(path)


@given(st.text(max_size=400))
def test_any_text_is_tokens_or_a_value_error(text: str) -> None:
    try:
        found = tokens.parse(text)
    except (ValueError, msgspec.ValidationError):
        return
    assert all(isinstance(token, Token) for token in found)


def test_a_new_token_is_appended_and_everything_else_stays(path: Path, write: Callable[[str], None]) -> None:
    write("# of the studio\n" + entry("studio", extra="max_calls = 3 # three"))
    before = path.read_text().rstrip()
    path.chmod(0o640)
    added = Token(name="laptop", digest=tokens.digest_of(OTHER), expires=TODAY, max_bytes=5)
    tokens.append(path, added)
    assert path.read_text().startswith(before)
    assert tokens.load(path)[1] == added
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    again = path.read_bytes()
    with pytest.raises(ConfigError, match="laptop"):
        tokens.append(path, added)
    assert path.read_bytes() == again


def test_a_new_file_is_for_its_owner_only(path: Path) -> None:
    tokens.append(path, Token(name="studio", digest=tokens.digest_of(SECRET)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert TokenFile(path).authenticate(SECRET).name == "studio"


def test_secrets_are_random_long_and_can_travel() -> None:
    made = {tokens.new_secret() for _ in range(50)}
    assert len(made) == 50
    for secret in made:
        assert secret.startswith("kvf_")
        assert len(secret) == 4 + 43  # 32 bytes in base64
        assert tokens.check_secret(secret, "x") == secret


def test_a_secret_is_read_without_the_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"\n  {SECRET}\r\n")
    assert tokens.read_secret(file) == SECRET


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"caf\xc3\xa9 is-no-token", b"a\x00b", b"y" * 5000])
def test_a_file_that_holds_no_secret_is_refused_without_its_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        tokens.read_secret(file)
    assert str(file) in caught.value.message
    words: list[Any] = [word for word in content.decode("latin-1").split() if len(word) > 3]
    assert not [word for word in words if word in caught.value.message]


def test_a_secret_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"token_file: {tmp_path}/none: No such file"):
        tokens.read_secret(tmp_path / "none")
