"""File writes that are either wholly there after a crash or not there at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` aside, make it durable, and rename it onto ``path``.

    Raises:
        OSError: when the disk refuses; ``path`` is then unchanged.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_directory(path.parent)
