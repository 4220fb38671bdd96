from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest

from kvferry.core import errors
from kvferry.core.errors import KvferryError


def tree(cls: type[KvferryError]) -> Iterator[type[KvferryError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from tree(child)


CLASSES = [cls for cls in tree(KvferryError) if cls.__module__ == errors.__name__]

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def test_codes_are_unique_and_lead_back_to_their_classes() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes) >= 19
    found = errors.error_classes()
    assert all(found[cls.code] is cls for cls in CLASSES)


@every_class
def test_every_class_has_a_code_of_its_own(cls: type[KvferryError]) -> None:
    assert "code" in vars(cls)
    assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", cls.code)


@every_class
def test_every_status_is_one_of_grpcs_failures(cls: type[KvferryError]) -> None:
    assert cls.status in grpc.StatusCode.__members__
    assert cls.status != "OK"


@every_class
def test_an_error_carries_its_message_and_fields(cls: type[KvferryError]) -> None:
    error = cls("chunk 3: digest differs", chunk=3, actual="ab", expected=None)
    assert isinstance(error, KvferryError)
    assert str(error) == error.message == "chunk 3: digest differs"
    assert error.fields == {"chunk": 3, "actual": "ab", "expected": None}
    assert cls("no fields").fields == {}


def test_a_message_is_one_line_and_moves_no_cursor_whatever_a_peer_put_in_it() -> None:
    error = KvferryError("sections.a\nb\r\x1b[2J\x85\u2028é門: no such name")
    assert error.message == str(error) == r"sections.a b \x1b[2J  é門: no such name"
    assert error.message.splitlines() == [error.message]


@every_class
def test_every_class_says_when_it_is_raised(cls: type[KvferryError]) -> None:
    assert cls is KvferryError or (cls.__doc__ or "").startswith("Raised when ")


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retryable} == {
        "BusyError",
        "IntegrityError",
        "TransferError",
        "UnavailableError",
        "DeadlineError",
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("UNAVAILABLE", True),
        ("DEADLINE", True),
        ("BUSY", True),
        ("NOT_FOUND", False),
        ("AUTHENTICATION", False),
        ("LATER_VERSION", False),
        (None, False),
    ],
)
def test_a_look_up_may_be_tried_again_when_what_stopped_it_may_pass(reason: str | None, expected: bool) -> None:  # noqa: FBT001
    assert errors.LookUpError("passages cannot be had", reason=reason).retryable is expected


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Names and parents, read from the indentation of the drawing."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"( {4}[ │├└─]*)(\w+Error)\b", line)
        if found:
            depth = (len(found[1]) - 4) // 4
            path = [*path[:depth], found[2]]
            drawn[found[2]] = path[-2] if depth else ""
    parents = {cls.__name__: cls.__base__.__name__ if cls.__base__ else "" for cls in CLASSES}
    assert drawn == parents | {"KvferryError": ""}
