"""From the settings of a grid to methods of the registry and their checked parameters."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.ablations.grid import EVERY, Grid
from kvferry.ablations.settings import Setting
from kvferry.core.errors import InvalidRequestError, UnknownMethodError
from kvferry.sender import registry
from kvferry.sender.method import Method


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


def checked(setting: Setting) -> tuple[Method[Any], msgspec.Struct]:
    """Return a setting's method and its parameters, defaults filled in.

    Raises:
        UnknownMethodError: when this version has no such method.
        InvalidRequestError: naming the parameter and its allowed range.
    """
    method = registry.find(setting.method)
    return method, registry.check_parameters(method, dict(setting.parameters))


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
