"""What several tests of the engine need.

====================  ==================================================================================================
held_bytes            function: bytes that the allocator holds more than before a piece of work
compiler              a compiler of grammars for the tiny models' tokenizer, with ``ENDS`` of its own
spelling              the bytes of every token of that tokenizer
single                its token of every byte
====================  ==================================================================================================
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from grammar_steps import ENDS, byte_tokens, spellings
from mlx_lm import tokenizer_utils

from kvferry.engine.constrained import GrammarCompiler


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


@pytest.fixture(scope="session")
def grammar_tokenizer(tiny_tokenizer_dir: Path) -> Any:
    return tokenizer_utils.load(tiny_tokenizer_dir, eos_token_ids=list(ENDS))


@pytest.fixture(scope="session")
def compiler(grammar_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(grammar_tokenizer)


@pytest.fixture(scope="session")
def spelling(grammar_tokenizer: Any) -> list[bytes]:
    return spellings(grammar_tokenizer)


@pytest.fixture(scope="session")
def single(spelling: list[bytes]) -> dict[int, int]:
    return byte_tokens(spelling)
