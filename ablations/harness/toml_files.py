"""TOML files that people write, read strictly: an unknown, missing or impossible key is an error that names it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvferry.core.errors import ConfigError

Entry = TypeVar("Entry", bound=msgspec.Struct)


def text(path: Path) -> str:
    """Return a file's text, its line ends as they are.

    Raises:
        ConfigError: when it cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: {reason}", path=str(path)) from error


def read(path: Path, kind: type[Entry]) -> Entry:
    """Read a file.

    Raises:
        ConfigError: when it cannot be read, or naming the key that is unknown, missing or impossible.
    """
    try:
        return msgspec.convert(tomllib.loads(text(path)), kind)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}", path=str(path)) from error


def entry(given: dict[str, Any], kind: type[Entry], place: str) -> Entry:
    """Convert one table of a file.

    Args:
        given: the table.
        kind: what it has to be.
        place: the file and the table's name, for the message.

    Raises:
        ConfigError: naming the key that is unknown, missing or impossible.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}", place=place) from error


def check_filled(tables: msgspec.Struct, names: Iterable[str], path: Path) -> None:
    """Check that lists of tables are not empty.

    Raises:
        ConfigError: naming the list.
    """
    for name in names:
        if not getattr(tables, name):
            raise ConfigError(f"{path}: {name}: at least one is needed", path=str(path), field=name)
