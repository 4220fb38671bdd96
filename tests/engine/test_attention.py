"""Who computes attention: a cache that can, else mlx-lm; and models whose attention goes another way say so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from kvferry.core.errors import ModelError
from kvferry.engine import attention
from kvferry.engine.attention import dispatch, install
from kvferry.engine.cache import PrefixCache
from kvferry.engine.generate import forward
from kvferry.engine.model import LoadedModel
from kvferry.engine.prefill import snapshot
from kvferry.engine.quantise import Scheme, Width, quantise
from kvferry.engine.ragged import RaggedLayer, heads_of

VOCABULARY = 100
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
HOOKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"rope_scaling": None},
    "olmo2": {},
    "gemma": {},
    "cohere": {"layer_norm_eps": 1e-5, "use_qk_norm": False, "logit_scale": 1.0},
    "granite": {
        "attention_bias": False,
        "mlp_bias": False,
        "logits_scaling": 1.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "smollm3": {},
    "internlm2": {"bias": False},
    "starcoder2": {"norm_epsilon": 1e-5},
    "stablelm": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": False},
}
SOFT = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32}
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]


def read(model: Any) -> PrefixCache:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([IDS]), cache=cache))
    return snapshot(cache)


def apart(cache: PrefixCache) -> PrefixCache:
    return PrefixCache(tuple(RaggedLayer(heads_of(layer)) for layer in cache.layers), cache.offset)


def distance(actual: mx.array, expected: mx.array) -> float:
    return float(mx.abs(actual - expected).max().item() / mx.abs(expected).max().item())  # type: ignore[operator]


@pytest.fixture
def original() -> Any:
    """mlx-lm's llama with its own attention function, put back afterwards."""
    from mlx_lm.models import llama

    before = llama.scaled_dot_product_attention
    llama.scaled_dot_product_attention = base.scaled_dot_product_attention
    yield llama
    llama.scaled_dot_product_attention = before


# Architectures


@pytest.mark.parametrize("kind", sorted(HOOKED))
def test_models_attend_through_the_cache(random_model: Callable[..., Any], kind: str) -> None:
    model = random_model({**SMALL, "model_type": kind, **HOOKED[kind]}, seed=2)
    own = make_prompt_cache(model)
    mx.eval(model(mx.array([IDS]), cache=own))
    assert install(model) == ""
    prefix = read(model)
    fresh = [7, 77, 17]
    expected = model(mx.array([fresh]), cache=own)[0]
    # Head by head, every row of mlx-lm's own cache is seen.
    assert distance(forward(model, fresh, apart(prefix).branch(3)), expected) <= 1e-5
    # Packed, rows are near enough to tell that it is they that are seen.
    packed = quantise(prefix, Scheme(Width(8, 32), Width(8, 32)))
    near = distance(forward(model, fresh, packed.branch(3)), expected)
    without = distance(model(mx.array([fresh]))[0], expected)
    assert near < 0.05 < without


def test_full_attention_layers_of_a_mixed_model_are_hooked(random_model: Callable[..., Any]) -> None:
    model = random_model(
        {
            **SMALL,
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 32,
            "rope_local_base_freq": 10000.0,
        },
        seed=2,
    )
    assert install(model) == ""
    caches = make_prompt_cache(model)
    full = [index for index, cache in enumerate(caches) if type(cache) is KVCache]
    assert full == [1, 3]
    expected_caches = make_prompt_cache(model)
    mx.eval(model(mx.array([IDS]), cache=caches), model(mx.array([IDS]), cache=expected_caches))
    expected = model(mx.array([[7]]), cache=expected_caches)
    for index in full:
        layer = snapshot([caches[index]]).layers[0]
        caches[index] = RaggedLayer(heads_of(layer)).branch(len(IDS), 1)
    assert distance(model(mx.array([[7]]), cache=caches), expected) <= 1e-5


def test_a_model_with_attention_of_its_own_says_so(random_model: Callable[..., Any]) -> None:
    model = random_model({**SMALL, "model_type": "gemma2", **SOFT}, seed=2)
    assert install(model) == "model type mlx_lm.models.gemma2: its attention does not go through mlx-lm's function"


# The hook


def test_installing_twice_changes_nothing(random_model: Callable[..., Any], original: Any) -> None:
    model = random_model({**SMALL, "model_type": "llama"})
    assert original.scaled_dot_product_attention is base.scaled_dot_product_attention
    for _ in range(3):
        assert install(model) == ""
        assert original.scaled_dot_product_attention is dispatch
    assert base.scaled_dot_product_attention is not dispatch
    # Other modules of mlx-lm stay as they were until a model of theirs comes.
    from mlx_lm.models import exaone as untouched

    assert untouched.scaled_dot_product_attention is base.scaled_dot_product_attention


@pytest.mark.parametrize("kind", [KVCache, QuantizedKVCache])
def test_other_caches_get_mlx_lms_function(random_model: Callable[..., Any], original: Any, kind: type[Any]) -> None:
    model = random_model({**SMALL, "model_type": "llama"}, seed=4)

    def run() -> np.ndarray[Any, Any]:
        caches = [kind() if kind is KVCache else kind(group_size=32, bits=8) for _ in range(2)]
        steps = [model(mx.array([part]), cache=caches) for part in (IDS, [7, 77], [5])]
        return np.concatenate([np.array(step)[0] for step in steps])

    before = run()
    install(model)
    assert np.array_equal(run(), before)


def test_everything_is_handed_on_to_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def spy(*args: Any, **options: Any) -> mx.array:
        seen.update(options, args=args)
        return mx.zeros(1)

    monkeypatch.setattr(base, "scaled_dot_product_attention", spy)
    cache, queries, keys, values, mask, sinks = KVCache(), *(mx.zeros((1,)) for _ in range(5))
    dispatch(queries, keys, values, cache, 0.5, mask, sinks)
    assert [id(item) for item in seen["args"]] == [id(queries), id(keys), id(values)]
    assert (seen["cache"], seen["scale"]) == (cache, 0.5)
    assert seen["mask"] is mask
    assert seen["sinks"] is sinks
    dispatch(queries, keys, values, None, 0.5, None)
    assert seen["cache"] is None


class Asked:
    def __init__(self) -> None:
        self.queries: list[mx.array] = []

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        self.queries.append(queries)
        return queries * scale


@pytest.mark.parametrize("mask", [None, "causal", "bool"])
def test_a_cache_that_attends_is_asked(mask: Any) -> None:
    cache, queries = Asked(), mx.ones((1, 2, 3, 4))
    given = mx.ones((3, 5), dtype=mx.bool_) if mask == "bool" else mask
    found = dispatch(queries, mx.zeros((1,)), mx.zeros((1,)), cache, 0.25, given)
    assert cache.queries == [queries]
    assert np.array_equal(np.array(found), np.full((1, 2, 3, 4), 0.25))


def test_attention_that_is_more_than_causal_is_refused() -> None:
    cache, one = Asked(), mx.zeros((1,))
    with pytest.raises(ModelError, match="^sinks: Asked has no attention with the model's learned sinks"):
        dispatch(one, one, one, cache, 1.0, None, sinks=one)
    with pytest.raises(ModelError, match="^mask: Asked has no attention with a bias"):
        dispatch(one, one, one, cache, 1.0, mx.zeros((3, 5)))
    assert cache.queries == []


class OneLayerApart:
    """Attention of a layer that calls MLX itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        module = sys.modules[type(self.inner).__module__]
        was = module.scaled_dot_product_attention  # type: ignore[attr-defined]
        module.scaled_dot_product_attention = (  # type: ignore[attr-defined]
            lambda q, k, v, cache, scale, mask, sinks=None: mx.fast.scaled_dot_product_attention(
                q, k, v, scale=scale, mask=mask
            )
        )
        try:
            return self.inner(x, mask, cache)  # type: ignore[no-any-return]
        finally:
            module.scaled_dot_product_attention = was  # type: ignore[attr-defined]


def test_a_layer_that_does_not_ask_is_found(random_model: Callable[..., Any]) -> None:
    model = random_model({**SMALL, "model_type": "llama"}, seed=4)
    assert install(model) == ""
    prefix = read(model)
    model.layers[1].self_attn = OneLayerApart(model.layers[1].self_attn)
    for cache in (apart(prefix), quantise(prefix, Scheme(Width(8, 32), Width(8, 32)))):
        branches: list[Any] = cache.branch(4)
        mx.eval(forward(model, [7], branches))
        assert [branch.owed for branch in branches] == [False, True]
        with pytest.raises(ModelError, match="^attention: the model does not ask the cache for it"):
            forward(model, [8], branches)


def test_loading_finds_a_layer_that_does_not_ask(tiny_model_dir: Callable[..., Any], monkeypatch: Any) -> None:
    from kvferry.engine import model as models

    whole = models.load(str(tiny_model_dir("llama")))
    assert whole.profile.attention == ""
    install_all = attention.install

    def install_and_part(model: Any) -> str:
        said = install_all(model)
        model.layers[1].self_attn = OneLayerApart(model.layers[1].self_attn)
        return said

    monkeypatch.setattr(models.attention_hook, "install", install_and_part)
    # However little the layer says: its rows are not seen, and that must not pass for rounding.
    monkeypatch.setitem(models.rope.TOLERANCE, mx.float32, 10.0)
    parted = models.load(str(tiny_model_dir("llama")))
    assert parted.profile.unsupported == ""
    assert parted.profile.attention == "layer 1: its attention does not go through mlx-lm's function"


def test_a_loaded_model_says_why_it_cannot(tiny_model: Callable[..., LoadedModel]) -> None:
    assert tiny_model("qwen3").profile.attention == ""
    soft = tiny_model("gemma2", config=SOFT)
    assert soft.profile.unsupported == ""
    assert soft.profile.attention.startswith("model type mlx_lm.models.gemma2: ")
