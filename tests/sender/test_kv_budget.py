"""Budgets: rows, fractions and bytes. For bytes the oracle is to try every number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import InvalidRequestError
from kvferry.sender.kv import budget


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0B", 0),
        ("17 B", 17),
        ("200KB", 200_000),
        ("200kB", 200_000),
        ("1.5KiB", 1536),
        ("2 MiB", 2**21),
        ("3MB", 3 * 10**6),
        ("1GB", 10**9),
        ("0.5GiB", 2**29),
        ("1.001KB", 1001),
        ("0.57KB", 570),
    ],
)
def test_bytes_have_a_unit(text: str, expected: int) -> None:
    assert budget.parse_bytes(text) == expected


def test_bytes_without_a_unit_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="^budget: '200' has no unit"):
        budget.parse_bytes("200")


@pytest.mark.parametrize(
    ("given", "rows"),
    [(1, 1), (64, 64), (700, 700), (9000, 700), (1.0, 700), (0.25, 175), (0.57, 399), (0.001, 1), (0.9999, 699)],
)
def test_rows_and_fractions(given: float, rows: int) -> None:
    assert budget.spend(given, 700, lambda count: count, lambda _: 0) == rows


def sizes(tokens: int, block: int, row: int, positions: int) -> Callable[[int], int]:
    """A dense row costs four times what a packed one does; only whole blocks are packed; all rows need no positions."""

    def size(count: int) -> int:
        packed = count - count % block if block > 1 else 0
        return row * (packed + 4 * (count - packed)) + (0 if count == tokens else positions * count)

    return size


@given(
    tokens=st.integers(1, 60),
    block=st.sampled_from([1, 4, 7, 32]),
    row=st.integers(1, 9),
    positions=st.integers(0, 3),
    limit=st.integers(0, 2500),
    least=st.integers(1, 12),
)
def test_bytes_keep_as_many_rows_as_fit(
    tokens: int, block: int, row: int, positions: int, limit: int, least: int
) -> None:
    size = sizes(tokens, block, row, positions)

    def keep(count: int) -> int:
        if count < min(least, tokens):
            raise InvalidRequestError(f"budget: {count} rows, but {least} are always kept", field="budget")
        return count

    fitting = [count for count in range(min(least, tokens), tokens + 1) if size(count) <= limit]
    if not fitting:
        with pytest.raises(InvalidRequestError, match=f"^budget: {limit} bytes do not suffice"):
            budget.spend(f"{limit}B", tokens, keep, size, block)
        return
    assert budget.spend(f"{limit}B", tokens, keep, size, block) == max(fitting)
