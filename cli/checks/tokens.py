"""The token files of a configuration: whom the daemon lets in, and what it shows itself."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from kvferry.cli.checks.findings import Finding
from kvferry.core import tokens
from kvferry.core.config import NodeConfig
from kvferry.core.errors import ConfigError

_MAKE = "`kvferry certs` makes tokens and their files; see docs/security.md"
_OTHERS = 0o077


def accepted(config: NodeConfig, today: dt.date | None = None) -> Finding | None:
    """Check the file of the tokens that callers may show; None without one."""
    if not config.tokens:
        return None
    path = Path(config.tokens).expanduser()
    try:
        found = tokens.load(path)
    except ConfigError as error:
        return Finding("tokens", "problem", error.message, _MAKE)
    now = today or dt.datetime.now(dt.UTC).date()
    expired = [token.name for token in found if token.expires is not None and token.expires < now]
    text = f"{path} holds {len(found)} token(s)"
    if len(expired) == len(found):
        return Finding("tokens", "problem", f"{text}, none of them in force: nobody may call", _MAKE)
    if expired:
        return Finding("tokens", "warning", f"{text}; expired: {', '.join(expired)}", f"{_MAKE}; remove the old ones")
    return Finding("tokens", "ok", text)


def shown(config: NodeConfig) -> Finding | None:
    """Check the token that the daemon shows to its peer; None without one."""
    if not config.token_file:
        return None
    path = Path(config.token_file).expanduser()
    try:
        tokens.read_secret(path)
    except ConfigError as error:
        return Finding("token", "problem", error.message, _MAKE)
    if path.stat().st_mode & _OTHERS:
        return Finding("token", "warning", f"{path} can be read by other users of this machine", f"chmod 600 {path}")
    return Finding("token", "ok", f"{path} holds a token")
