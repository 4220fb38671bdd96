"""Command-line options of the daemons: one for each key of their configuration, derived from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar

import click
import msgspec
from msgspec import inspect

from kvferry.core.config import NodeConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_LOGGING = {"log_level": "least severe events to log.", "log_format": "form of the log on standard error."}
_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def config_options(kind: type[NodeConfig]) -> Callable[[Function], Function]:
    """Return a decorator that adds an option for every key of ``kind``; options that are not given are None."""
    described = _descriptions(kind)
    fields = sorted(msgspec.structs.fields(kind), key=lambda field: field.name, reverse=True)

    def decorate(function: Function) -> Function:
        for field in fields:
            function = _option(field, described.get(field.name, ""))(function)
        return function

    return decorate


def _descriptions(kind: type[NodeConfig]) -> dict[str, str]:
    """Return what the configuration's own documentation says of each key."""
    found = dict(_LOGGING)
    for parent in kind.__mro__:
        for names, text in _ATTRIBUTE.findall(cleandoc(parent.__doc__ or "")):
            for name in names.split(", "):
                found.setdefault(name, " ".join(text.split()))
    return found


def _option(field: msgspec.structs.FieldInfo, text: str) -> Callable[[Function], Function]:
    flag = field.name.replace("_", "-")
    kind = inspect.type_info(field.type)
    if field.default not in ("", False):
        text += f"  [default: {field.default}]"
    if isinstance(kind, inspect.BoolType):
        return click.option(f"--{flag}/--no-{flag}", field.name, default=None, help=text)
    return click.option(f"--{flag}", field.name, type=_click_type(kind), help=text)


def _click_type(kind: inspect.Type) -> click.ParamType[Any]:
    if isinstance(kind, inspect.IntType):
        return click.INT
    if isinstance(kind, inspect.FloatType):
        return click.FLOAT
    if isinstance(kind, inspect.LiteralType):
        return click.Choice(kind.values)
    return click.STRING
