"""From the settings of a grid to methods of the registry."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import msgspec

from kvferry.ablations.harness.settings import Setting, checked
from kvferry.ablations.methods.grid import EVERY, Grid
from kvferry.core.errors import InvalidRequestError, UnknownMethodError
from kvferry.sender import registry


def plan(grid: Grid) -> Grid:
    """Return a grid in which every setting names a method, checked as far as the registry can.

    Raises:
        InvalidRequestError: naming a parameter that its method does not take.
    """
    settings = tuple(setting for given in grid.settings for setting in _named(given))
    for setting in settings:
        # A method that this version does not have fails its own cells; a misspelt parameter is a mistake in the grid.
        with contextlib.suppress(UnknownMethodError):
            checked(setting)
    return replace(grid, settings=settings)


def _named(setting: Setting) -> list[Setting]:
    """Return a setting for every method that it stands for."""
    if setting.method != EVERY:
        return [setting]
    names = {name for name, _ in setting.parameters}
    found = [
        method.info.id
        for method in registry.METHODS
        if method.info.form == "kv" and names <= {field.name for field in msgspec.structs.fields(method.parameters)}
    ]
    if not found:
        listed = ", ".join(sorted(names)) or "none"
        raise InvalidRequestError(f"method: {EVERY!r}: no method takes the parameters {listed}", field="method")
    return [replace(setting, method=name) for name in found]
