"""Everything that reads bytes from a stranger, given bytes that nobody meant: one of our errors, and little memory.

==========  ===========================================================================================================
fuzz        runs a check over drawn values: 60 of them by default, 10,000 with ``-m fuzz`` (``make test-fuzz``)
kv_example  and the other factories of whole artifacts: those of tests/core
==========  ===========================================================================================================

KVFERRY_FUZZ_SEED=n draws other values in the long run; the short one is the same every time.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from loading import load

# Read before the fixture that takes such variables away.
SEED = int(os.environ.get("KVFERRY_FUZZ_SEED", "0"))
SHORT, LONG = 60, 10_000
QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


class Budget:
    """Measures what a piece of work holds at its peak."""

    @contextmanager
    def at_most(self, cap: int) -> Iterator[None]:
        """Fail when the block's peak of Python memory, output of decompression included, is above ``cap`` bytes."""
        tracemalloc.start()
        try:
            yield
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= cap, f"{peak} bytes at the peak, the cap is {cap}"


Fuzz = Callable[..., None]


@pytest.fixture(
    params=[
        pytest.param(SHORT, id="short"),
        pytest.param(LONG, id="long", marks=[pytest.mark.fuzz, pytest.mark.timeout(3600)]),
    ]
)
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Return a function: ``fuzz(check, name=strategy, …)`` calls ``check(budget, name=value, …)`` many times.

    ``heavy`` cases, of megabytes each, are a twentieth as many.
    """
    budget, short = Budget(), request.param == SHORT

    def run(check: Callable[..., None], *, heavy: bool = False, **strategies: Any) -> None:
        @settings(
            max_examples=max(request.param // 20, 10) if heavy else request.param,
            database=None,
            deadline=None,
            derandomize=short,
            print_blob=True,
            suppress_health_check=QUIET,
        )
        @given(**strategies)
        def one(**values: Any) -> None:
            check(budget, **values)

        (one if short else seed(SEED)(one))()

    return run


_core = load("core/conftest.py")
kv_example, text_example, zstd_example = _core.kv_example, _core.text_example, _core.zstd_example
packed_example, describe, profile_of = _core.packed_example, _core.describe, _core.profile_of
in_memory = _core.in_memory
