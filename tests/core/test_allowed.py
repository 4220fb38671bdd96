"""What a parameter or a setting may be, in words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from kvferry.core import allowed


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Literal[2, 3, 8], "2, 3 or 8"),
        (Literal["one"], "one"),
        (Literal["first", "always", "never"] | None, "always, first or never"),
        (int, "a whole number"),
        (Annotated[int, Meta(ge=1, le=22)], "a whole number from 1 to 22"),
        (Annotated[int, Meta(ge=0)], "a whole number from 0"),
        (Annotated[float, Meta(gt=0.0, le=1.0)], "a number above 0 up to 1"),
        (Annotated[float, Meta(ge=0.25, lt=1e9)], "a number from 0.25 below 1e+09"),
        (
            Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0.0, le=1.0)],
            "a whole number from 0 or a number from 0 to 1",
        ),
        (bool, "true or false"),
        (str, "a text"),
        (Annotated[int, Meta(ge=1, description="rows from 1")] | Literal["all"], "rows from 1 or all"),
        (Annotated[str, Meta(pattern="^[0-9]+B$", description="bytes like 20B")] | None, "bytes like 20B"),
    ],
)
def test_types_in_words(kind: Any, words: str) -> None:
    assert allowed.in_words(kind) == words


@pytest.mark.parametrize(
    "kind", [Annotated[str, Meta(pattern="^a$")], int | Annotated[str, Meta(pattern="^a$")], bytes]
)
def test_a_type_without_words_has_none(kind: Any) -> None:
    assert allowed.in_words(kind) == ""
