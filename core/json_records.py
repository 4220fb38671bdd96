"""JSON that somebody else may have written. However deep it nests, it fails as any other malformed JSON does.

The parsers themselves raise RecursionError then, at a depth that depends on who calls.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")


def decode(data: bytes | str, kind: type[Kind]) -> Kind:
    """Parse a record of a known kind.

    Raises:
        msgspec.DecodeError: when it is no JSON, is no UTF-8, nests too deeply, or does not fit (ValidationError).
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from error


def loads(data: bytes | str) -> Any:
    """Parse any JSON.

    Raises:
        ValueError: when it is none, or nests too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
