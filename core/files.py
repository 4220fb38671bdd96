"""File writes that are either wholly there after a crash or not there at all."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

_RANDOM_BYTES = 6
_UNFINISHED = re.compile(rf"\..+\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}")


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write ``data`` aside, make it durable, and rename it onto ``path``.

    Args:
        path: the file.
        data: its whole content.
        mode: permissions, less the umask; secrets take 0o600 and are never readable by others, not even for a moment.

    Raises:
        OSError: when the disk refuses; ``path`` is then unchanged.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}")
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_directory(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that ended within ``write_atomic`` left in a folder where nobody writes now.

    Raises:
        OSError: when the disk refuses.
    """
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
