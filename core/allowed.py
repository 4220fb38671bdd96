"""What values a type of ours allows, in words that people read: msgspec's own messages show regular expressions."""

from __future__ import annotations

from typing import Any

from msgspec import inspect


def in_words(kind: Any) -> str:
    """Return what a value of a type must be, as "2, 3 or 4" or "a whole number from 1"; "" for a type without words.

    A description given with the type (``Meta(description=…)``) is taken as it is. None is left out where there is more.
    """
    return _words(inspect.type_info(kind))


def _words(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        described = (kind.extra_json_schema or {}).get("description")
        return described or _words(kind.type)
    if isinstance(kind, inspect.UnionType):
        return _either([_words(part) for part in kind.types if not isinstance(part, inspect.NoneType)])
    if isinstance(kind, inspect.LiteralType):
        return _either([str(value) for value in kind.values])
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return ("a whole number" if isinstance(kind, inspect.IntType) else "a number") + _bounds(kind)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    return "a text" if kind == inspect.StrType() else ""


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    said = {"from": kind.ge, "above": kind.gt, "up to": kind.le, "below": kind.lt}
    if kind.ge is not None and kind.le is not None:
        return f" from {_number(kind.ge)} to {_number(kind.le)}"
    return "".join(f" {word} {_number(bound)}" for word, bound in said.items() if bound is not None)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _either(parts: list[str]) -> str:
    if not all(parts):
        return ""
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
