"""Tokens that a daemon accepts. The file holds names, limits and digests, never a secret.

[[tokens]]
name = "studio"
digest = "…64 hexadecimal digits: BLAKE3 of the secret…"
expires = 2027-11-30          # the last day; optional, as all that follows
max_bytes = 10737418240       # of artifacts that are stored for this token
max_artifacts = 200
max_calls = 8                 # at the same time

The file is read again when it changes, so deleting an entry revokes its token. While it cannot be read, the last good
content stays in force.
"""

from __future__ import annotations

import datetime
import hmac
import secrets
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.core.digests import digest
from kvferry.core.errors import AuthenticationError, ConfigError
from kvferry.core.files import write_atomic
from kvferry.core.logs import logger

MAX_FILE_BYTES = 1024 * 1024
MAX_SECRET_CHARACTERS = 512
NAME_PATTERN = r"\A[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?\Z"
_SECRET_BYTES = 32
# A known beginning lets scanners for leaked secrets recognise ours.
_SECRET_PREFIX = "kvf_"  # noqa: S105


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One token. A limit that is None does not apply.

    Attributes:
        name: who holds it; stands in logs and beside what is stored.
        digest: BLAKE3 of the secret, hexadecimal.
        expires: the last day (UTC) on which it is accepted.
        max_bytes: payload bytes that may be stored for it.
        max_artifacts: artifacts that may be stored for it.
        max_calls: calls that may run for it at the same time.
    """

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    digest: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    expires: datetime.date | None = None
    max_bytes: Annotated[int, Meta(ge=0)] | None = None
    max_artifacts: Annotated[int, Meta(ge=0)] | None = None
    max_calls: Annotated[int, Meta(ge=1)] | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[Token] = []


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


class TokenFile:
    """The tokens of one file, as they are now."""

    def __init__(self, path: Path, today: Callable[[], datetime.date] = _today) -> None:
        """Read the file.

        Args:
            path: the file.
            today: the date in UTC.

        Raises:
            ConfigError: when it cannot be read or says something impossible.
        """
        self._path = path
        self._today = today
        self._log = logger("tokens")
        self._seen = _version(path)
        self._tokens = load(path)

    def authenticate(self, secret: str) -> Token:
        """Return the token that a secret stands for.

        Raises:
            AuthenticationError: when there is none, or it has expired. The message does not hold the secret.
        """
        self._refresh()
        found = None
        if len(secret) <= MAX_SECRET_CHARACTERS:
            shown = digest_of(secret)
            # Every entry is compared in full: time tells neither whether one fits nor which.
            for token in self._tokens:
                if hmac.compare_digest(token.digest, shown):
                    found = token
        if found is None:
            raise AuthenticationError("token: not one that this daemon accepts", field="token")
        if found.expires is not None and self._today() > found.expires:
            raise AuthenticationError(
                f"token: {found.name} expired after {found.expires}", field="token", name=found.name
            )
        return found

    def _refresh(self) -> None:
        version = _version(self._path)
        if version == self._seen:
            return
        # Noted before reading, so a file that stays broken is reported once and not at every call.
        self._seen = version
        try:
            self._tokens = load(self._path)
        except ConfigError as error:
            self._log.error("token file not usable, the last good one stays in force", reason=error.message)
        else:
            self._log.info("token file read", path=str(self._path), tokens=len(self._tokens))


def load(path: Path) -> tuple[Token, ...]:
    """Read a token file.

    Raises:
        ConfigError: naming the file and what is wrong in it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"tokens: {path}: {error.strerror}", field="tokens", path=str(path)) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"tokens: {path}: over {MAX_FILE_BYTES} bytes", field="tokens", path=str(path))
    try:
        return parse(data.decode("utf-8"))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        # None of their messages quotes a value of the file.
        raise ConfigError(f"tokens: {path}: {error}", field="tokens", path=str(path)) from error


def parse(text: str) -> tuple[Token, ...]:
    """Parse the content of a token file.

    Raises:
        ValueError: when it is no TOML, or two entries share a name or a digest.
        msgspec.ValidationError: when a key or a value is impossible.
    """
    tokens = tuple(msgspec.convert(tomllib.loads(text), _File).tokens)
    for field in ("name", "digest"):
        seen: set[str] = set()
        for token in tokens:
            if getattr(token, field) in seen:
                raise ValueError(f"two tokens have the {field} of {token.name!r}")
            seen.add(getattr(token, field))
    return tokens


def append(path: Path, token: Token) -> None:
    """Add a token to a file, which keeps everything else that it holds; a missing file is made.

    Raises:
        ConfigError: when the file is not usable, has the name already, or cannot be written.
    """
    where = {"field": "tokens", "path": str(path)}
    try:
        before, mode = (path.read_text("utf-8"), path.stat().st_mode & 0o777) if path.exists() else ("", 0o600)
        text = f"{before.rstrip()}\n\n{_as_toml(token)}".lstrip()
        parse(text)
        write_atomic(path, text.encode("utf-8"), mode)
    except OSError as error:
        raise ConfigError(f"tokens: {path}: {error.strerror}", **where) from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(f"tokens: {path}: {error}", **where) from error


def new_secret() -> str:
    """Return a fresh secret of 256 bits."""
    return _SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return what a token file holds for a secret.

    A plain digest is enough because a secret has 256 random bits: there is nothing to guess, so nothing to slow down.
    """
    return digest(secret.encode("utf-8", "surrogatepass")).hex()


def read_secret(path: Path) -> str:
    """Read a secret from its file; space around it does not count.

    Raises:
        ConfigError: naming the file, never its content.
    """
    where = {"field": "token_file", "path": str(path)}
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SECRET_CHARACTERS + 2).strip()
    except OSError as error:
        raise ConfigError(f"token_file: {path}: {error.strerror}", **where) from error
    return check_secret(data.decode("ascii", "replace"), f"token_file: {path}")


def check_secret(secret: str, source: str) -> str:
    """Return a secret that can travel in a header.

    Raises:
        ConfigError: naming ``source``, never the secret.
    """
    if not secret:
        raise ConfigError(f"{source}: holds no token", field="token")
    if len(secret) > MAX_SECRET_CHARACTERS:
        raise ConfigError(f"{source}: over {MAX_SECRET_CHARACTERS} characters", field="token")
    if not all("!" <= character <= "~" for character in secret):
        raise ConfigError(f"{source}: a token is one word of visible ASCII characters", field="token")
    return secret


def _as_toml(token: Token) -> str:
    lines = ["[[tokens]]"]
    for field, value in msgspec.structs.asdict(token).items():
        if value is not None:
            # The names and digests that a token may have need no escapes.
            lines.append(f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}")
    return "\n".join(lines) + "\n"


def _version(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
