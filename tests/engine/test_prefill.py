"""Reading a prefix: progress, giving up, and the same cache whatever the chunks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from kvferry.core.errors import ContextOverflowError, ModelError
from kvferry.core.progress import finish
from kvferry.engine import prefill as prefill_module
from kvferry.engine.cache import PrefixCache
from kvferry.engine.generate import forward
from kvferry.engine.model import LoadedModel
from kvferry.engine.prefill import prefill, read, snapshot

IDS = [int(token) for token in np.random.default_rng(8).integers(0, 376, 150)]


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("qwen3", layers=3, seed=4)


@pytest.fixture(scope="module")
def model(loaded: LoadedModel) -> Any:
    return loaded.model


def run(generator: Generator[Any, None, Any]) -> tuple[list[Any], Any]:
    """Return what a generator yields, and what it returns."""
    seen: list[Any] = []
    made = finish(generator, seen.append)
    return seen, made


@pytest.mark.parametrize(
    ("tokens", "chunk", "progress"),
    [
        (1, 64, [1]),
        (64, 64, [64]),
        (65, 64, [64, 65]),
        (150, 64, [64, 128, 150]),
        (3, 1, [1, 2, 3]),
    ],
)
def test_progress_counts_tokens(model: Any, tokens: int, chunk: int, progress: list[int]) -> None:
    seen, prefix = run(prefill(model, IDS[:tokens], chunk))
    assert seen == progress
    assert prefix.offset == tokens


def test_only_valid_rows_are_kept(model: Any) -> None:
    _, prefix = run(prefill(model, IDS, 64))
    cache = make_prompt_cache(model)
    model(mx.array([IDS[:64]]), cache=cache)
    model(mx.array([IDS[64:128]]), cache=cache)
    model(mx.array([IDS[128:]]), cache=cache)
    assert cache[0].keys.shape[2] > 150
    assert len(prefix.layers) == 3
    for layer, plain in zip(prefix.layers, cache, strict=True):
        assert layer.keys.shape == layer.values.shape == (1, 2, 150, 16)
        assert layer.positions is None
        # A view would keep the padded buffer alive.
        assert np.array(layer.keys, copy=False).flags.c_contiguous
        assert np.array(layer.values, copy=False).flags.c_contiguous
        assert np.array_equal(np.array(layer.keys), np.array(plain.keys)[:, :, :150])
        assert np.array_equal(np.array(layer.values), np.array(plain.values)[:, :, :150])
    # K and V, 3 layers, 2 KV heads, 150 tokens, head dimension 16, fp32.
    assert prefix.nbytes == 2 * 3 * 2 * 150 * 16 * 4


def test_chunks_change_nothing_but_the_last_bits(model: Any) -> None:
    question = [5, 6, 7]
    whole = run(prefill(model, IDS, 1000))[1]
    expected = np.array(forward(model, question, whole.branch(3)))
    for chunk in (1, 7, 64, 149, 150):
        prefix = run(prefill(model, IDS, chunk))[1]
        for layer, reference in zip(prefix.layers, whole.layers, strict=True):
            assert np.allclose(np.array(layer.keys), np.array(reference.keys), atol=1e-4)
        logits = np.array(forward(model, question, prefix.branch(3)))
        assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-5


def test_a_snapshot_lives_on_its_own(model: Any) -> None:
    cache = make_prompt_cache(model)
    model(mx.array([IDS[:20]]), cache=cache)
    prefix = snapshot(cache)
    before = [np.array(layer.keys).tobytes() for layer in prefix.layers]
    model(mx.array([IDS[20:40]]), cache=cache)
    assert prefix.offset == 20
    assert [np.array(layer.keys).tobytes() for layer in prefix.layers] == before


def test_trimmed_rows_are_not_kept(model: Any) -> None:
    cache = make_prompt_cache(model)
    model(mx.array([IDS[:20]]), cache=cache)
    for layer in cache:
        layer.trim(5)
    prefix = snapshot(cache)
    shorter = run(prefill(model, IDS[:15], 1000))[1]
    assert prefix.offset == 15
    for layer, reference in zip(prefix.layers, shorter.layers, strict=True):
        assert layer.keys.shape == (1, 2, 15, 16)
        assert np.allclose(np.array(layer.values), np.array(reference.values), atol=1e-5)


def test_giving_up_frees_the_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def watched(of: Any) -> list[Any]:
        cache = make_prompt_cache(of)
        made.extend(weakref.ref(layer) for layer in cache)
        return cache

    monkeypatch.setattr(prefill_module, "make_prompt_cache", watched)
    calls = []

    class Counted:
        layers = model.layers

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return model(*args, **kwargs)

    generator = prefill(Counted(), IDS, 10)
    assert [next(generator), next(generator)] == [10, 20]
    assert all(layer() is not None for layer in made)
    generator.close()
    del generator
    gc.collect()
    assert len(made) == 3
    assert all(layer() is None for layer in made)
    assert len(calls) == 2


def test_a_model_with_fewer_caches_than_layers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # mlx-lm would run two layers of three and say nothing.
    monkeypatch.setattr(prefill_module, "make_prompt_cache", lambda of: make_prompt_cache(of)[:2])
    with pytest.raises(ModelError, match="cache: 2 caches for 3 layers"):
        run(prefill(model, IDS, 64))


def test_a_ring_is_read_but_not_kept(random_model: Callable[..., Any]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 376,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
    }
    windowed = random_model(config)
    seen, cache = run(read(windowed, IDS[:30], 10))
    assert seen == [10, 20, 30]
    assert [type(layer) for layer in cache] == [KVCache, RotatingKVCache]
    with pytest.raises(ModelError, match="layer 1: cache class RotatingKVCache, only KVCache can be carried"):
        run(prefill(windowed, IDS[:30], 10))


def test_reading_for_one_answer_gives_the_models_own_caches(model: Any) -> None:
    cache = run(read(model, IDS[:40], 16))[1]
    prefix = run(prefill(model, IDS[:40], 16))[1]
    ours = np.array(forward(model, [1, 2], prefix.branch(2)))
    assert np.array_equal(np.array(forward(model, [1, 2], cache)), ours)


def test_a_loaded_model_reads_in_its_own_chunks(loaded: LoadedModel) -> None:
    seen, prefix = run(replace(loaded, prefill_chunk=40).prefill(IDS[:100]))
    assert seen == [40, 80, 100]
    assert isinstance(prefix, PrefixCache)


@pytest.mark.parametrize("road", ["prefill", "read"])
def test_a_prefix_must_leave_room(loaded: LoadedModel, road: str) -> None:
    limit = loaded.profile.context_length
    with pytest.raises(ContextOverflowError, match=rf"context: {limit} prefix \+ 0 question \+ 1 answer tokens"):
        getattr(loaded, road)([1] * limit)


def test_a_long_prefix_is_never_held_twice() -> None:
    """mlx-lm's buffers go layer by layer as the snapshot grows: at most one layer is there twice."""
    layers, rows = 8, 3000
    caches = []
    for _ in range(layers):
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 4, rows, 64)), mx.zeros((1, 4, rows, 64)))
        caches.append(cache)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
    one_layer = caches[0].nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    del cache
    frozen = snapshot(caches, consume=True)
    assert mx.get_peak_memory() - before <= 1.5 * one_layer
    assert frozen.row_counts == [rows] * 4 * layers
