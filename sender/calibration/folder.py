"""The folder of calibrations, beside the models: ``calibrations/qfilters/NAME.safetensors``.

Names are looked up in it and never become paths.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.core.errors import InvalidRequestError, KvferryError, NotFoundError, StoreError
from kvferry.core.files import write_atomic
from kvferry.engine.model_store import models_home
from kvferry.sender.calibration import qfilters_file
from kvferry.sender.calibration.binding import Binding, check_bound
from kvferry.sender.calibration.qfilters_file import QFilters

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,95}"
NAMES = "up to 96 of a-z, 0-9, '.', '_' and '-', not beginning with a sign"
_SUFFIX = ".safetensors"
_MAKE = "make one with `kvferry calibrate qfilters --model MODEL --text FILE...`"


def qfilters_home() -> Path:
    """Return the folder of calibrated filters: ``$KVFERRY_HOME/calibrations/qfilters``, or in the user's data."""
    return models_home().parent / "calibrations" / "qfilters"


def check_name(name: str) -> None:
    """Refuse what is no name.

    Raises:
        InvalidRequestError: naming what a name may hold.
    """
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InvalidRequestError(
            f"calibration: {name!r} is no name; {NAMES}",
            field="calibration",
            value=name,
        )


def default_name(model: str, estimator: str) -> str:
    """Return a name for a model's calibration."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", model.casefold()).strip("._-")
    return f"{plain[:80] or 'model'}-{estimator}"


def names() -> dict[str, Path]:
    """Return what is in the folder, by name."""
    home = qfilters_home()
    try:
        found = [path for path in home.iterdir() if path.suffix == _SUFFIX] if home.is_dir() else []
    except OSError as error:
        raise StoreError(f"{home}: {error.strerror}", path=str(home)) from error
    return {path.stem: path for path in sorted(found) if re.fullmatch(NAME_PATTERN, path.stem)}


def check_free(name: str, *, overwrite: bool) -> None:
    """Refuse a name that is taken.

    Raises:
        InvalidRequestError: unless it may be overwritten; also when it is no name.
    """
    check_name(name)
    if name in names() and not overwrite:
        raise InvalidRequestError(
            f"calibration: {name!r} is there already; give another --out, or --overwrite",
            field="calibration",
            value=name,
        )


def save(name: str, calibration: QFilters) -> Path:
    """Write a calibration; it is wholly there afterwards or not at all.

    Raises:
        InvalidRequestError: when ``name`` is no name.
        ContainerError: when the filters cannot be used.
        StoreError: when the disk refuses.
    """
    check_name(name)
    data = qfilters_file.encode(calibration)
    path = qfilters_home() / f"{name}{_SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
    return path


def find(name: str, model: Binding) -> QFilters:
    """Return a model's calibration.

    Args:
        name: of the calibration, or "" for the one that is bound to the model.
        model: what it must be bound to.

    Raises:
        NotFoundError: when there is none; the message says how to make one.
        InvalidRequestError: when it belongs to another model, or several belong to this one.
        ContainerError: when the named file is damaged.
    """
    return _named(name, model) if name else _bound(model)


def _named(name: str, model: Binding) -> QFilters:
    check_name(name)
    known = names()
    if name not in known:
        listed = ", ".join(known) or "none"
        raise NotFoundError(f"calibration: no {name!r} in {qfilters_home()}, which holds {listed}; {_MAKE}", name=name)
    found = qfilters_file.read(known[name])
    check_bound(found.record.model, model, f"calibration {name!r}")
    return found


def _bound(model: Binding) -> QFilters:
    bound: dict[str, QFilters] = {}
    others: list[str] = []
    for name, path in names().items():
        try:
            found = qfilters_file.read(path)
            check_bound(found.record.model, model, name)
        except KvferryError as error:
            # Another model's file, or a damaged one, must not stop this model's; it is named when there is no other.
            others.append(error.message)
        else:
            bound[name] = found
    if len(bound) > 1:
        raise InvalidRequestError(
            f"calibration: {len(bound)} are bound to the model {model.id}: {', '.join(bound)}; name one",
            field="calibration",
        )
    if not bound:
        beside = f" ({'; '.join(others[:3])})" if others else ""
        raise NotFoundError(
            f"calibration: none in {qfilters_home()} is bound to the model {model.id}{beside}; {_MAKE}", model=model.id
        )
    return next(iter(bound.values()))
