"""What several tests of the engine need.

====================  ==================================================================================================
held_bytes            function: bytes that the allocator holds more than before a piece of work
====================  ==================================================================================================
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest


@pytest.fixture
def held_bytes() -> Callable[[Callable[[], Any]], tuple[Any, int]]:
    """Return a function: ``held_bytes(work)`` gives what ``work`` returns, and the bytes held since because of it."""

    def measure(work: Callable[[], Any]) -> tuple[Any, int]:
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        result = work()
        gc.collect()
        mx.clear_cache()
        return result, mx.get_active_memory() - before

    return measure
