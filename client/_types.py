"""Arguments of another type than they must be are refused by name, before they fail somewhere else."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

from kvferry.core.errors import ConfigError, InvalidRequestError


def check_text(field: str, value: object, error: type[InvalidRequestError | ConfigError] = InvalidRequestError) -> None:
    """Check that a value is a text.

    Raises:
        InvalidRequestError: or ``error``, naming the field and the value's type.
    """
    if not isinstance(value, str):
        raise wrong(field, value, "a text", error)


def check_flag(field: str, value: object) -> None:
    """Check that a value is True or False.

    Raises:
        InvalidRequestError: naming the field and the value's type.
    """
    if not isinstance(value, bool):
        raise wrong(field, value, "True or False")


def check_progress(value: object) -> None:
    """Check that a value can be called with progress, or is None.

    Raises:
        InvalidRequestError: naming the value's type.
    """
    if value is not None and not callable(value):
        raise wrong("progress", value, "a function")


def check_questions(value: object) -> None:
    """Check that a value is several questions. One text would be taken for as many as it has characters.

    Raises:
        InvalidRequestError: naming the value's type.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise wrong("questions", value, "several texts, such as a list")


def is_number(value: object) -> bool:
    """Whether a value is a number, which True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def wrong(
    field: str, value: object, wanted: str, error: type[InvalidRequestError | ConfigError] = InvalidRequestError
) -> InvalidRequestError | ConfigError:
    """Return the error of a value of the wrong type."""
    kind = type(value).__name__
    return error(f"{field}: of type {kind}, must be {wanted}", field=field, value=kind)
