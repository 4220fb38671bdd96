"""What several tests of the engine need.

====================  ==================================================================================================
quantisation_oracles  and attention_oracles, selector_oracles: the modules of tests/oracles
held_bytes            function: bytes that the allocator holds more than before a piece of work
masked_logits         function: what a model says on mlx-lm's full cache where rows are masked out, head by head
====================  ==================================================================================================
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache


def load(path: Path, name: str) -> ModuleType:
    """Import a file that lies on no path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_oracles = load(Path(__file__).parents[1] / "oracles" / "conftest.py", "kvferry_oracles")
quantisation_oracles, attention_oracles = _oracles.quantisation_oracles, _oracles.attention_oracles
selector_oracles = _oracles.selector_oracles


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
def masked_logits() -> Callable[..., np.ndarray[Any, Any]]:
    """Return a function: ``masked_logits(model, ids, fresh, kept)`` for an mlx-lm model of llama's structure.

    ``kept`` says for every layer and KV head which rows of ``ids`` are seen. MLX takes masks over query heads.
    """

    def run(model: Any, ids: Sequence[int], fresh: Sequence[int], kept: Any) -> np.ndarray[Any, Any]:
        inner = model.model
        cache = make_prompt_cache(model)
        model(mx.array([list(ids)]), cache=cache)
        total, count = len(ids), len(fresh)
        hidden = inner.embed_tokens(mx.array([list(fresh)]))
        for layer, layer_cache, rows in zip(inner.layers, cache, kept, strict=True):
            heads = layer.self_attn.n_heads
            visible = np.zeros((1, heads, count, total + count), dtype=bool)
            for head in range(heads):
                visible[0, head, :, rows[head * len(rows) // heads]] = True
            visible[..., total:] = np.tril(np.ones((count, count), dtype=bool))
            hidden = layer(hidden, mx.array(visible), layer_cache)
        return np.array(inner.embed_tokens.as_linear(inner.norm(hidden))[0])

    return run
