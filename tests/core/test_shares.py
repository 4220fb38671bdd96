"""A fraction of a count is the one that was written."""

from __future__ import annotations

import pytest

from kvferry.core.shares import share


@pytest.mark.parametrize("whole", [1, 100, 200, 700, 1000, 123_457])
def test_hundredths_are_those_of_whole_numbers(whole: int) -> None:
    assert [share(percent / 100, whole) for percent in range(1, 101)] == [
        percent * whole // 100 for percent in range(1, 101)
    ]


@pytest.mark.parametrize(("fraction", "found"), [(0.9e-9, 0), (1e-9, 1), (5e-324, 0), (1.0, 10**9)])
def test_what_is_tiny_is_rounded_down(fraction: float, found: int) -> None:
    assert share(fraction, 10**9) == found
