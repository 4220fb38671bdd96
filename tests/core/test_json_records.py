"""JSON from elsewhere: every way to be malformed is one kind of error."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.core import json_records


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    a: int
    b: str = ""


DEEP = [b"[" * depth + b"]" * depth for depth in (1_200, 20_000, 200_000)]
MALFORMED = [b"", b"{", b"\xff\xfe", b'{"a": "\xff"}', b"{}", b'{"a": 1, "c": 2}', *DEEP]


@pytest.mark.parametrize("data", [*MALFORMED, *(b'{"x":' + deep + b"}" for deep in DEEP)], ids=lambda data: data[:9])
def test_what_is_malformed_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        json_records.decode(data, Pair)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", *DEEP[1:]], ids=lambda data: data[:9])
def test_any_json_that_is_malformed_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the parser's own words differ between versions)
        json_records.loads(data)


def test_what_is_well_formed_is_read() -> None:
    assert json_records.decode(b'{"a": 1}', Pair) == Pair(1)
    assert json_records.decode('{"a": 1, "b": "c"}', Pair) == Pair(1, "c")
    assert json_records.loads(b'{"a": [1, null]}') == {"a": [1, None]}
