"""Settings: a method and its parameters, as a grid gives them, and as the registry knows them.

    [[methods]]
    method = "B3"                   # id or name
    budget = [64, 128, 256]         # every other key is a parameter; a list stands for one setting a value

Two lists in one entry stand for every pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.manifest import Scalar
from kvferry.sender import registry
from kvferry.sender.method import Method

METHOD = "method"


@dataclass(frozen=True)
class Setting:
    """A method and the parameters that the grid gives it; the others keep their defaults."""

    method: str
    parameters: tuple[tuple[str, Scalar], ...] = ()

    @property
    def words(self) -> str:
        """In a few words."""
        return " ".join((self.method, *(f"{name}={value}" for name, value in self.parameters)))


def checked(setting: Setting) -> tuple[Method[Any], msgspec.Struct]:
    """Return a setting's method and its parameters, defaults filled in.

    Raises:
        UnknownMethodError: when this version has no such method.
        InvalidRequestError: naming the parameter and its allowed range.
    """
    method = registry.find(setting.method)
    return method, registry.check_parameters(method, dict(setting.parameters))


def expand(entries: Sequence[dict[str, Any]], path: Path) -> tuple[Setting, ...]:
    """Return the settings that a grid's ``methods`` stand for, in their order.

    Args:
        entries: the tables.
        path: of the grid, for messages.

    Raises:
        ConfigError: naming the entry and the key.
    """
    places = (f"{path}: methods[{at}]" for at in range(len(entries)))
    return tuple(setting for given, place in zip(entries, places, strict=True) for setting in _expand(given, place))


def _expand(given: dict[str, Any], place: str) -> Iterator[Setting]:
    method = given.get(METHOD)
    if not isinstance(method, str) or not method:
        raise ConfigError(f"{place}: {METHOD} = {method!r}: the id or name of a method is needed", place=place)
    names = [name for name in given if name != METHOD]
    choices = [_choices(given[name], f"{place}: {name}") for name in names]
    for values in itertools.product(*choices):
        yield Setting(method, tuple(zip(names, values, strict=True)))


def _choices(value: Any, place: str) -> list[Scalar]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str | int | float) for item in values):
        raise ConfigError(f"{place} = {value!r}: a text, a number, a truth value or a list of them is needed")
    return values
