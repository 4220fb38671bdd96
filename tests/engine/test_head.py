"""The logits of the last row alone: the same as among all, in every kind of model, and only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core.progress import finish
from kvferry.engine import head
from kvferry.engine.generate import Sampling, forward, generate, last_logits
from kvferry.engine.model import LoadedModel

IDS = [5, 6, 7, 8, 9]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 64, "vocab_size": 61, "rms_norm_eps": 1e-5, "head_dim": 8}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "llama", "tie_word_embeddings": False},
    {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 256},
    {"model_type": "qwen3", "rope_theta": 1e6, "max_position_embeddings": 256, "tie_word_embeddings": True},
    {"model_type": "gemma2", "final_logit_softcapping": 30.0},
    {"model_type": "olmo2", "tie_word_embeddings": False},
    {"model_type": "gemma3", "text_config": SHAPE | {"model_type": "gemma3_text", "sliding_window_pattern": 2}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}")
def test_the_last_logits_are_those_among_all(random_model: Callable[..., Any], config: dict[str, Any]) -> None:
    model = random_model(SHAPE | config)
    names = [name for name, _ in tree_flatten(model.parameters())]
    expected = np.array(forward(model, IDS, make_prompt_cache(model))[-1])
    head.install(model)
    head.install(model)
    with head.last_row_only(model):
        assert model(mx.array([IDS])).shape == (1, 1, 61)
    caches = make_prompt_cache(model)
    np.testing.assert_allclose(np.array(last_logits(model, IDS, caches)), expected, rtol=1e-4, atol=1e-4)
    # The caches took every row, and everybody else still gets every row's logits.
    assert caches[0].offset == len(IDS)
    assert forward(model, IDS, caches).shape == (len(IDS), 61)
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    head.remove(model)
    with head.last_row_only(model):
        assert model(mx.array([IDS])).shape == (1, len(IDS), 61)


def test_after_an_error_every_row_passes_again(random_model: Callable[..., Any]) -> None:
    model = random_model(SHAPE | CONFIGS[0])
    head.install(model)
    with pytest.raises(ZeroDivisionError), head.last_row_only(model):
        raise ZeroDivisionError
    assert model(mx.array([IDS])).shape == (1, len(IDS), 61)


def test_a_model_without_such_a_norm_is_left_as_it_is() -> None:
    class Odd(nn.Module):
        layers = ()

        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            return mx.broadcast_to(ids[..., None].astype(mx.float32), (*ids.shape, 3))

    model = Odd()
    head.install(model)
    assert last_logits(model, IDS, []).tolist() == [9.0, 9.0, 9.0]


def test_a_loaded_model_is_taught(tiny_model: Callable[..., LoadedModel]) -> None:
    loaded = tiny_model("qwen3")
    with head.last_row_only(loaded.model):
        assert loaded.model(mx.array([IDS])).shape[:2] == (1, 1)


def test_an_answer_asks_for_one_row_of_logits_a_pass(
    tiny_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny_model("qwen3")
    rows: list[int] = []
    call = type(loaded.model).__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = call(self, *args, **kwargs)
        rows.append(logits.shape[1])
        return logits

    monkeypatch.setattr(type(loaded.model), "__call__", noted)
    caches = make_prompt_cache(loaded.model)
    finish(generate(loaded.model, loaded.tokenizer, IDS, caches, Sampling(max_tokens=3)), lambda _: None)
    assert set(rows) == {1}


def test_a_norm_that_is_not_the_last_thing_but_the_head_is_not_taught(
    random_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.engine import model as model_module

    model = random_model(SHAPE | CONFIGS[0])
    inner = type(model.model)

    class Mixing(inner):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            rows = super().__call__(*args, **kwargs)
            return rows + mx.mean(rows, axis=1, keepdims=True)

    model.model.__class__ = Mixing
    expected = np.array(model(mx.array([IDS]))[0, -1])
    assert model_module._install_head(model) == 61
    assert np.array_equal(np.array(last_logits(model, IDS, make_prompt_cache(model))), expected)
