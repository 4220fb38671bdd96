"""StreamingLLM: what is left answers as if nothing else had ever been read."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvferry.core.errors import InvalidRequestError
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.sender import registry
from kvferry.sender.kv.sink_recent import SinkRecent
from kvferry.sender.kv.streaming_llm import StreamingLLM

TEXT = "The ferry leaves at dawn, carries eleven crates of paper, and returns when the tide allows it. " * 4
QUESTION = "Who keeps the keys?"
# Rotations of every kind; YaRN and longrope have a magnitude as well, which must not be applied twice.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "traditional": ("llama", {"rope_traditional": True}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "longrope": (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "long_factor": [2.0, 1.5] * 4, "short_factor": [1.0] * 8},
            "original_max_position_embeddings": 1024,
        },
    ),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", {"rope_theta": 1e6}),
    "partial": ("glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    model_type, config = MODELS[request.param]
    return tiny_model(model_type, layers=1, config=config)


@pytest.fixture
def make(workshop: Callable[..., Any], drain: Callable[..., Any]) -> Callable[..., PrefixCache]:
    def run(method: Any, model: LoadedModel, **given: Any) -> PrefixCache:
        reading = workshop(model).reading(TEXT)
        cache: PrefixCache = drain(method.make(reading, registry.check_parameters(method, given))).cache
        return cache

    return run


def logits(model: LoadedModel, cache: PrefixCache) -> np.ndarray[Any, Any]:
    fresh = model.prompt.fresh(QUESTION)
    return np.array(model.forward(fresh, cache.branch(len(fresh))))


def apart(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("budget", "sinks"), [(40, 4), (21, 0), (30, 29)])
def test_one_layer_answers_as_after_reading_the_kept_tokens_alone(
    model: LoadedModel, make: Callable[..., PrefixCache], drain: Callable[..., Any], budget: int, sinks: int
) -> None:
    """In a model of one layer a row depends on its token and position only, so this holds exactly."""
    ids = model.prompt.prefix(TEXT, DEFAULT_SYSTEM)
    assert len(ids) > 100
    kept = ids[:sinks] + ids[len(ids) - (budget - sinks) :]
    cache = make(StreamingLLM(), model, budget=budget, sinks=sinks)
    assert cache.offset == budget
    assert cache.row_counts == [budget] * 2
    expected = logits(model, drain(model.prefill(kept)))
    assert apart(logits(model, cache), expected) < 2e-5
    # At their own positions the same rows say something else, unless there is no gap: only distances count.
    assert (apart(logits(model, make(SinkRecent(), model, budget=budget, sinks=sinks)), expected) > 1e-3) is (sinks > 0)


def test_the_rows_are_those_of_the_rule(
    tiny_model: Callable[..., LoadedModel], make: Callable[..., PrefixCache], selector_oracles: ModuleType
) -> None:
    model = tiny_model("llama", layers=3)
    tokens = len(model.prompt.prefix(TEXT, DEFAULT_SYSTEM))
    dense = make(registry.find("B1"), model)
    for sinks, recent in ((4, 60), (0, 20), (1, tokens - 2)):
        cache = make(StreamingLLM(), model, budget=sinks + recent, sinks=sinks)
        rows = selector_oracles.streaming_llm_rows(tokens, sinks, recent)
        for layer, full in zip(cache.layers, dense.layers, strict=True):
            assert np.array_equal(np.array(layer.arrays[1]), np.array(full.arrays[1])[:, :, rows])


def test_when_everything_fits_nothing_moves(
    tiny_model: Callable[..., LoadedModel], make: Callable[..., PrefixCache]
) -> None:
    model = tiny_model("llama", layers=2)
    tokens = len(model.prompt.prefix(TEXT, DEFAULT_SYSTEM))
    dense = make(registry.find("B1"), model)
    for budget in (tokens, tokens + 1, 10 * tokens, 1.0):
        cache = make(StreamingLLM(), model, budget=budget)
        assert cache.offset == tokens
        pairs = zip(cache.arrays, dense.arrays, strict=True)
        assert all(np.array_equal(np.array(one), np.array(two)) for one, two in pairs)
    assert make(StreamingLLM(), model, budget=tokens - 1).offset == tokens - 1


def test_the_receiver_goes_on_where_the_rows_end(
    tiny_model: Callable[..., LoadedModel], workshop: Callable[..., Any]
) -> None:
    model = tiny_model("llama", layers=2)
    manifest = workshop(model).make("streamingllm", TEXT, budget=40).stored.manifest
    assert {layer.offset for layer in manifest.layout} == {40}
    assert {layer.positions for layer in manifest.layout} == {"renumbered"}
    assert manifest.prefix.tokens > 100


@pytest.mark.parametrize("budget", [3, 4])
def test_a_budget_without_a_recent_row_is_refused(
    tiny_model: Callable[..., LoadedModel], make: Callable[..., PrefixCache], budget: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"^budget: {budget} rows, but 4 sinks and 1 recent"):
        make(StreamingLLM(), tiny_model("llama"), budget=budget)


def test_keys_move_in_fp32_and_keep_their_dtype(
    tiny_model: Callable[..., LoadedModel], make: Callable[..., PrefixCache]
) -> None:
    cache = make(StreamingLLM(), tiny_model("llama", layers=1), budget=40)
    assert {array.dtype for array in cache.arrays} == {mx.float32}
    assert all(layer.positions is None for layer in cache.layers)
