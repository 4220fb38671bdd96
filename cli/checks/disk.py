"""The store: room, and whether what is written there stays."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from kvferry.cli import output
from kvferry.cli.checks.findings import Finding
from kvferry.core import config as configuration
from kvferry.core.config import NodeConfig, ReceiverConfig

LITTLE_BYTES = 2_000_000_000
_REASONS = {
    errno.EACCES: "give this user the right to write there (chmod, chown), or choose another store",
    errno.EROFS: "the disk is read-only: choose another store, or mount it for writing",
    errno.ENOSPC: "the disk is full: free some room, or choose a store on another disk",
    errno.ENOTDIR: "a file is in the way: move it, or choose another store",
    errno.EDQUOT: "your quota is used up: free some room, or choose another store",
}


def writable(path: Path, name: str = "store") -> Finding:
    """Check that a directory, or the nearest one above that exists, can be written to and synced."""
    folder = _existing(path)
    probe = folder / f".kvferry-doctor-{secrets.token_hex(4)}"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, b"kvferry")
            os.fsync(handle)
        finally:
            os.close(handle)
            probe.unlink()
    except OSError as error:
        remedy = _REASONS.get(error.errno or 0, "choose a store on a local disk that this user may write to")
        return Finding(name, "problem", f"{path}: {error.strerror} in {folder}", remedy)
    return Finding(name, "ok", f"{path} can be written" + ("" if folder == path else ", and will be made"))


def space(path: Path) -> Finding:
    """Check how much room a store has."""
    try:
        free = shutil.disk_usage(_existing(path)).free
    except OSError as error:
        return Finding("disk", "problem", f"{path}: {error.strerror}", "choose a store on a disk that is there")
    text = f"{output.size(free)} are free at {path}"
    if free < LITTLE_BYTES:
        remedy = "free some room, drop artifacts that are done with, or put the store on another disk"
        return Finding("disk", "warning", text, remedy)
    return Finding("disk", "ok", text)


def ledger(config: NodeConfig) -> Finding | None:
    """Check the receiver's ledger where it is not in the store; None elsewhere."""
    if not isinstance(config, ReceiverConfig) or not config.ledger:
        return None
    path = configuration.ledger_path(config)
    if path.is_dir():
        return Finding("ledger", "problem", f"{path} is a directory", "give the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        return Finding(
            "ledger", "problem", f"{path}: Permission denied", _REASONS[errno.EACCES].replace("store", "file")
        )
    return writable(path.parent, "ledger")


def _existing(path: Path) -> Path:
    absolute = path.expanduser().absolute()
    return next((folder for folder in (absolute, *absolute.parents) if folder.exists()), Path("/"))
