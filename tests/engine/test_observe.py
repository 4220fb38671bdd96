"""What a model asks while it reads: the queries that its own rotary modules put out, however the reading is cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core.errors import ModelError
from kvferry.core.progress import finish
from kvferry.engine.attention import install
from kvferry.engine.cache import PrefixCache
from kvferry.engine.observe import replay, window
from kvferry.engine.prefill import prefill
from kvferry.engine.quantise import Scheme, Width, quantise

TOKENS, WINDOW, WIDTH, LAYERS = 45, 9, 32, 3
VOCABULARY = 200
# Name: model type, query heads, KV heads, more of config.json. qwen2 has biases, qwen3 a norm on queries and keys.
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama-9-3": ("llama", 9, 3, {}),
    "qwen2-14-2": ("qwen2", 14, 2, {"rope_theta": 1e6}),
    "qwen3-4-1": ("qwen3", 4, 1, {}),
    "llama-yarn": (
        "llama",
        4,
        2,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
}
Array = np.ndarray[Any, Any]


class Recorder(nn.Module):
    """Stands in a rotary module's place and keeps what it puts out."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[Array] = []

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        turned: mx.array = self.inner(x, *args, **kwargs)
        self.calls.append(np.array(turned[0].astype(mx.float32)))
        return turned


@dataclass(frozen=True)
class Case:
    """A model, what it read, and for every layer the queries [H, T, D] and keys [Hk, T, D] as its modules made them."""

    model: Any
    ids: list[int]
    queries: list[Array]
    keys: list[Array]


def build(random_model: Callable[..., Any], name: str, dtype: str = "float32") -> Case:
    model_type, heads, kv_heads, more = CASES[name]
    config = {
        "model_type": model_type,
        "hidden_size": heads * WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": WIDTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        **more,
    }
    model = random_model(config, seed=3, dtype=dtype)
    ids = [int(token) for token in np.random.default_rng(2).integers(0, VOCABULARY, TOKENS)]
    recorders = []
    for layer in model.layers:
        layer.self_attn.rope = Recorder(layer.self_attn.rope)
        recorders.append(layer.self_attn.rope)
    mx.eval(model(mx.array([ids]), cache=make_prompt_cache(model)))
    for layer, recorder in zip(model.layers, recorders, strict=True):
        layer.self_attn.rope = recorder.inner
    made = [sorted(recorder.calls, key=len) for recorder in recorders]
    assert [[len(call) for call in calls] for calls in made] == [[kv_heads, heads]] * LAYERS
    assert install(model) == ""
    return Case(model, ids, [calls[1] for calls in made], [calls[0] for calls in made])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, random_model: Callable[..., Any]) -> Case:
    return build(random_model, request.param)


@pytest.fixture(scope="module")
def llama(random_model: Callable[..., Any]) -> Case:
    return build(random_model, "llama-9-3")


def observe(case: Case, chunk: int) -> tuple[list[list[Array]], list[Array], list[tuple[int, int, int]], list[int]]:
    """Return every layer's queries, by chunk, and last keys; layer, start and tokens of every call; the progress."""
    queries: list[list[Array]] = [[] for _ in range(LAYERS)]
    keys: list[Array] = [np.empty(0)] * LAYERS
    calls = []

    def see(layer: int, start: int, asked: mx.array, held: mx.array) -> None:
        assert asked.dtype == held.dtype == mx.float32
        assert held.shape[1] == start + asked.shape[1]
        queries[layer].append(np.array(asked))
        keys[layer] = np.array(held)
        calls.append((layer, start, asked.shape[1]))

    done = list(replay(case.model, case.ids, chunk, see))
    return queries, keys, calls, done


def apart(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("chunk", [1, 7, 20, TOKENS, 512])
def test_a_replay_shows_what_the_rotary_modules_put_out(case: Case, chunk: int) -> None:
    queries, keys, calls, done = observe(case, chunk)
    starts = range(0, TOKENS, chunk)
    assert calls == [(layer, start, min(chunk, TOKENS - start)) for start in starts for layer in range(LAYERS)]
    assert done == [min(start + chunk, TOKENS) for start in starts]
    for layer in range(LAYERS):
        assert apart(np.concatenate(queries[layer], axis=1), case.queries[layer]) < 1e-5
        assert apart(keys[layer], case.keys[layer]) < 1e-5


def test_keys_and_queries_can_be_multiplied_as_they_are(case: Case) -> None:
    """The first layer's attention, computed from what is shown, is what the model's own layer gives."""
    attention = case.model.layers[0].self_attn
    hidden = case.model.layers[0].input_layernorm(case.model.model.embed_tokens(mx.array([case.ids])))
    expected = np.array(attention(hidden, mask="causal", cache=None)[0])
    shown: list[tuple[Array, Array]] = []
    finish(replay(case.model, case.ids, 512, lambda layer, start, q, k: shown.append((np.array(q), np.array(k)))))
    queries, keys = shown[0]
    cache = make_prompt_cache(case.model)
    case.model(mx.array([case.ids]), cache=cache)
    values = np.array(cache[0].keys_and_values()[1][0])
    group = len(queries) // len(keys)
    outputs = []
    for head, asked in enumerate(queries):
        logits = asked @ keys[head // group].T * attention.scale
        logits[np.triu_indices(TOKENS, 1)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        outputs.append(weights / weights.sum(axis=1, keepdims=True) @ values[head // group])
    joined = mx.array(np.concatenate(outputs, axis=-1).astype(np.float32))
    assert apart(np.array(attention.o_proj(joined)), expected) < 1e-5


def test_a_window_shows_its_own_tokens(case: Case) -> None:
    cache = finish(prefill(case.model, case.ids[:-WINDOW], 20))
    seen = finish(window(case.model, cache, case.ids[-WINDOW:]))
    assert len(seen) == LAYERS
    for layer, found in enumerate(seen):
        assert found.queries.dtype == found.keys.dtype == mx.float32
        assert apart(np.array(found.queries), case.queries[layer][:, -WINDOW:]) < 1e-5
        assert apart(np.array(found.keys), case.keys[layer][:, -WINDOW:]) < 1e-5


def test_a_window_of_one_token(case: Case) -> None:
    cache = finish(prefill(case.model, case.ids[:-1], 20))
    found = finish(window(case.model, cache, case.ids[-1:]))[2]
    assert apart(np.array(found.queries), case.queries[2][:, -1:]) < 1e-5


@pytest.mark.parametrize("chunk", [1, 4, WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_window_is_run_in_pieces(case: Case, chunk: int) -> None:
    cache = finish(prefill(case.model, case.ids[:-WINDOW], 20))
    told: list[int] = []
    seen = finish(window(case.model, cache, case.ids[-WINDOW:], chunk), told.append)
    assert told == list(range(chunk, WINDOW, chunk))
    for layer, found in enumerate(seen):
        assert apart(np.array(found.queries), case.queries[layer][:, -WINDOW:]) < 1e-5
        assert apart(np.array(found.keys), case.keys[layer][:, -WINDOW:]) < 1e-5


def test_a_window_stops_when_it_is_closed(llama: Case) -> None:
    cache = finish(prefill(llama.model, llama.ids, 20))
    read: list[int] = []

    class Counting:
        layers = llama.model.layers

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            read.append(ids.shape[1])
            logits: mx.array = llama.model(ids, cache=cache)
            return logits

    steps = window(Counting(), cache, [5, 6, 7, 8, 9], 2)
    next(steps)
    steps.close()
    assert read == [2]


def test_a_window_changes_nothing(llama: Case) -> None:
    cache: PrefixCache = finish(prefill(llama.model, llama.ids, 20))
    before = [np.array(array) for array in cache.arrays]
    logits = np.array(llama.model(mx.array([[3, 4]]), cache=cache.branch(2)))
    finish(window(llama.model, cache, [5, 6, 7]))
    assert cache.offset == TOKENS
    assert all(np.array_equal(np.array(array), old) for array, old in zip(cache.arrays, before, strict=True))
    assert np.array_equal(np.array(llama.model(mx.array([[3, 4]]), cache=cache.branch(2))), logits)


def test_logits_are_not_computed(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are none of what is shown, and cost as much as several layers of a small model."""
    cache: PrefixCache = finish(prefill(llama.model, llama.ids, 20))
    widths: set[int] = set()
    real = mx.eval

    def evaluate(*what: Any) -> None:
        widths.update(one.shape[-1] for _, one in tree_flatten(list(what)) if isinstance(one, mx.array))
        real(*what)

    monkeypatch.setattr(mx, "eval", evaluate)
    finish(window(llama.model, cache, [5, 6]))
    finish(replay(llama.model, llama.ids, 20, lambda *shown: None))
    assert widths == {WIDTH}


def test_a_window_behind_selected_rows_stands_at_its_true_positions(llama: Case) -> None:
    """The first layer's queries depend on nothing but tokens and positions."""
    cache = finish(prefill(llama.model, llama.ids[:-WINDOW], 20))
    rows = mx.array([[0, 1, 5, 30]] * 3, dtype=mx.int32)
    seen = finish(window(llama.model, cache.select([rows] * LAYERS), llama.ids[-WINDOW:]))
    assert apart(np.array(seen[0].queries), llama.queries[0][:, -WINDOW:]) < 1e-5
    assert apart(np.array(seen[0].keys), llama.keys[0][:, -WINDOW:]) < 1e-5
    # Those of the next layer have seen that rows are missing.
    assert apart(np.array(seen[1].queries), llama.queries[1][:, -WINDOW:]) > 1e-2


def test_half_precision_is_shown_in_fp32(random_model: Callable[..., Any]) -> None:
    case = build(random_model, "llama-9-3", "bfloat16")
    queries, keys, _, _ = observe(case, 20)
    # Cut otherwise than recorded, so the roundings of bf16 differ; the first layer's do not depend on that.
    assert np.array_equal(np.concatenate(queries[0], axis=1), case.queries[0])
    assert np.array_equal(keys[0], case.keys[0])


def unhook(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[type(case.model.layers[0].self_attn).__module__]
    monkeypatch.setattr(module, "scaled_dot_product_attention", base.scaled_dot_product_attention)


def test_a_model_that_attends_on_its_own_is_refused(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = finish(prefill(llama.model, llama.ids, 20))
    unhook(llama, monkeypatch)
    with pytest.raises(ModelError, match="^layer 0: its queries were not seen"):
        finish(window(llama.model, cache, [5, 6]))
    calls: list[int] = []
    with pytest.raises(ModelError, match="^attention: a layer's queries were not seen"):
        finish(replay(llama.model, llama.ids, 20, lambda layer, start, q, k: calls.append(layer)))
    assert calls == []


def test_a_layer_that_attends_on_its_own_is_refused(random_model: Callable[..., Any]) -> None:
    class Deaf(nn.Module):
        """An attention that adds its rows and asks no cache."""

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            rows = mx.zeros((1, 3, x.shape[1], WIDTH))
            cache.update_and_fetch(rows, rows)
            return x

    case = build(random_model, "llama-9-3")
    case.model.layers[1].self_attn = Deaf()
    with pytest.raises(ModelError, match="^attention: a layer's queries were not seen"):
        finish(replay(case.model, case.ids, 20, lambda *shown: None))


@pytest.mark.parametrize("form", ["packed", "ragged"])
def test_only_dense_rows_can_be_observed(llama: Case, form: str) -> None:
    cache = finish(prefill(llama.model, llama.ids, 20))
    if form == "packed":
        made = quantise(cache, Scheme(Width(8, 32), Width(8, 32)))
    else:
        heads = [mx.arange(count, dtype=mx.int32) for count in (4, 5, 6)]
        made = cache.select([heads] * LAYERS)
    with pytest.raises(ModelError, match=f"^layer 0: {form.capitalize()}Layer, only dense rows can be observed"):
        finish(window(llama.model, made, [5, 6]))


def test_a_replay_stops_when_it_is_closed(llama: Case) -> None:
    calls: list[int] = []
    steps = replay(llama.model, llama.ids, 10, lambda layer, start, q, k: calls.append(start))
    next(steps)
    steps.close()
    assert calls == [0] * LAYERS


def test_queries_carry_the_scale_of_a_model_that_scales_its_attention_otherwise(
    random_model: Callable[..., Any],
) -> None:
    """Over the root of D they give what the softmax sees. Layer 0 is asked the same either way."""
    plain = build(random_model, "llama-9-3").model
    other = build(random_model, "llama-9-3").model
    for layer in other.layers:
        layer.self_attn.scale = 0.25
    ids = list(range(TOKENS))
    shown: list[list[Array]] = []
    for model in (plain, other):
        install(model)
        seen: list[Array] = []
        cache = finish(prefill(model, ids, TOKENS))
        seen.append(np.array(finish(window(model, cache, [5, 6]))[0].queries))
        finish(replay(model, ids, TOKENS, lambda layer, _start, queries, _keys, to=seen: to.append(np.array(queries))))
        shown.append(seen[:2])
    for before, after in zip(*shown, strict=True):
        np.testing.assert_allclose(after, before * 0.25 * WIDTH**0.5, rtol=1e-5)
