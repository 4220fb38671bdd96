"""A carried cache is the local cache: the same logits, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core.progress import finish
from kvferry.engine import tensors
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.generate import forward
from kvferry.engine.prefill import prefill

VOCABULARY = 380
PREFIX_LENGTHS = (1, 2, 255, 256, 257, 600)
QUESTION_LENGTHS = (1, 2, 3, 4, 5)
# Type, layers, query heads, KV heads, head dimension: plain, grouped by 2, 3 and 7, and one KV head for all.
WIDE = (("llama", 2, 9, 3, 8), ("qwen2", 2, 14, 2, 8))
SLIM = (
    ("llama", 4, 2, 1, 16),
    ("qwen3", 3, 2, 1, 32),
    ("qwen2", 2, 3, 3, 16),
    ("qwen3", 2, 3, 1, 16),
    ("llama", 2, 2, 2, 8),
    ("qwen2", 2, 2, 2, 16),
    ("qwen3", 2, 4, 2, 8),
    ("llama", 2, 2, 2, 64),
    ("qwen2", 3, 2, 1, 8),
)
SHAPES = (*WIDE, *SLIM, *SLIM)
CHUNKS = (64, 256, 512, 100)


def config_of(case: int) -> dict[str, Any]:
    model_type, layers, heads, kv_heads, head_dim = SHAPES[case]
    return {
        "model_type": model_type,
        "hidden_size": heads * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": (10000.0, 1e6)[case % 2],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": case % 2 == 0,
    }


def cross(prefix: PrefixCache) -> PrefixCache:
    """Rebuild a cache from bytes alone."""

    def carry(array: mx.array) -> mx.array:
        wire = bytes(tensors.to_bytes(array))
        return tensors.from_bytes(wire, tensors.dtype_name(array), tuple(array.shape))

    layers = [DenseLayer(carry(layer.keys), carry(layer.values)) for layer in prefix.layers]
    return PrefixCache(tuple(layers), prefix.offset)


def local_cache(model: Any, ids: Sequence[int], chunk: int) -> list[Any]:
    """Prefill as mlx-lm does it, in the same chunks."""
    cache: list[Any] = make_prompt_cache(model)
    for start in range(0, len(ids), chunk):
        model(mx.array([ids[start : start + chunk]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return cache


def local_logits(model: Any, cache: list[Any], ids: Sequence[int]) -> mx.array:
    return model(mx.array([list(ids)]), cache=cache)[0]


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.view(mx.uint32 if array.dtype == mx.float32 else mx.uint16))


def random_ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCABULARY, count)]


@pytest.mark.parametrize("case", range(len(SHAPES)))
def test_logits_after_crossing_are_local_logits(case: int, random_model: Callable[..., Any]) -> None:
    model = random_model(config_of(case), seed=100 + case)
    chunk = CHUNKS[case % len(CHUNKS)]
    rng = np.random.default_rng(case)
    document = random_ids(rng, max(PREFIX_LENGTHS))
    for length in PREFIX_LENGTHS:
        ids = document[:length]
        carried = cross(finish(prefill(model, ids, chunk)))
        local = local_cache(model, ids, chunk)
        for count in QUESTION_LENGTHS:
            question = random_ids(rng, count)
            ours = forward(model, question, carried.branch(count))
            theirs = local_logits(model, copy.deepcopy(local), question)
            assert ours.shape == (count, VOCABULARY)
            assert np.array_equal(bits(ours), bits(theirs)), (length, count)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [0, 1, 3])
def test_half_precision_caches_cross_unchanged(case: int, dtype: str, random_model: Callable[..., Any]) -> None:
    model = random_model(config_of(case), seed=200 + case, dtype=dtype)
    rng = np.random.default_rng(case)
    document = random_ids(rng, 257)
    for length in (1, 256, 257):
        carried = cross(finish(prefill(model, document[:length], 128)))
        assert {layer.keys.dtype for layer in carried.layers} == {getattr(mx, dtype)}
        local = local_cache(model, document[:length], 128)
        for count in (1, 5):
            question = random_ids(rng, count)
            ours = forward(model, question, carried.branch(count))
            theirs = local_logits(model, copy.deepcopy(local), question)
            assert np.array_equal(bits(ours), bits(theirs)), (length, count)


@pytest.mark.parametrize(("case", "dtype"), [(0, "float32"), (1, "float32"), (3, "float32"), (5, "bfloat16")])
@pytest.mark.parametrize("length", [3, 254, 256])
def test_every_step_of_an_answer_is_the_local_one(
    case: int, dtype: str, length: int, random_model: Callable[..., Any]
) -> None:
    model = random_model(config_of(case), seed=300 + case, dtype=dtype)
    rng = np.random.default_rng(case)
    ids, step = random_ids(rng, length), random_ids(rng, 3)
    # Less room than is used, so that the branch grows between two steps.
    branch = cross(finish(prefill(model, ids, 256))).branch(5)
    local = local_cache(model, ids, 256)
    answer = []
    for _ in range(9):
        ours, theirs = forward(model, step, branch), local_logits(model, local, step)
        assert np.array_equal(bits(ours), bits(theirs)), len(answer)
        step = [int(mx.argmax(theirs[-1]).item())]
        answer += step
    assert [layer.offset for layer in branch] == [layer.offset for layer in local]
    assert len(set(answer)) > 1


def test_one_wrong_bit_in_one_value_shows(random_model: Callable[..., Any]) -> None:
    model = random_model(config_of(1), seed=1)
    prefix = finish(prefill(model, random_ids(np.random.default_rng(0), 40), 256))
    wrong = np.array(prefix.layers[0].values)
    wrong[0, 1, 20, 3] *= -1
    damaged = PrefixCache((DenseLayer(prefix.layers[0].keys, mx.array(wrong)), *prefix.layers[1:]), prefix.offset)
    right = forward(model, [5], cross(prefix).branch(1))
    assert not np.array_equal(bits(forward(model, [5], cross(damaged).branch(1))), bits(right))
