"""The probe finds out how a model rotates, and notices when a module does something else than it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from kvferry.core.manifest import Rope
from kvferry.engine import rope
from kvferry.engine.rope import Rotation, describe, probe

VOCABULARY = 200
BASE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "long_factor": [2.0, 1.5] * 4, "short_factor": [1.0] * 8}
# Name: config.json beside BASE, and what the probe must find: dims, traditional, base (None: explicit frequencies),
# scale, mscale.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, bool, float | None, float, float]]] = {
    "llama": ({"model_type": "llama"}, (16, False, 1e4, 1.0, 1.0)),
    "llama-traditional": ({"model_type": "llama", "rope_traditional": True}, (16, True, 1e4, 1.0, 1.0)),
    "llama-llama3": (
        {"model_type": "llama", "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}},
        (16, False, None, 1.0, 1.0),
    ),
    "llama-linear": (
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
        (16, False, 1e4, 0.25, 1.0),
    ),
    "llama-yarn": ({"model_type": "llama", "rope_scaling": YARN}, (16, False, None, 1.0, 0.1 * np.log(4.0) + 1.0)),
    "llama-proportional": (
        {"model_type": "llama", "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        (16, False, None, 1.0, 1.0),
    ),
    "phi3-longrope": (
        {
            "model_type": "phi3",
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 1024,
        },
        (16, False, None, 1.0, np.sqrt(1 + np.log(2.0) / np.log(1024.0))),
    ),
    "qwen2": ({"model_type": "qwen2", "rope_theta": 1e6}, (16, False, 1e6, 1.0, 1.0)),
    "qwen3": ({"model_type": "qwen3", "rope_theta": 1e6}, (16, False, 1e6, 1.0, 1.0)),
    "cohere": ({"model_type": "cohere"}, (16, True, 1e4, 1.0, 1.0)),
    "helium": ({"model_type": "helium", "attention_bias": False, "mlp_bias": False}, (16, True, 1e4, 1.0, 1.0)),
    "glm4": (
        {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
        (8, True, 1e4, 1.0, 1.0),
    ),
    "stablelm": (
        {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.25},
        (4, False, 1e4, 1.0, 1.0),
    ),
    "phi": ({"model_type": "phi", "partial_rotary_factor": 0.5}, (8, False, 1e4, 1.0, 1.0)),
    "gemma2": ({"model_type": "gemma2"}, (16, False, 1e4, 1.0, 1.0)),
    "olmo2": ({"model_type": "olmo2"}, (16, False, 1e4, 1.0, 1.0)),
    "starcoder2": ({"model_type": "starcoder2"}, (16, False, 1e4, 1.0, 1.0)),
    "nemotron": (
        {"model_type": "nemotron", "hidden_act": "relu2", "norm_eps": 1e-5},
        (8, False, 1e4, 1.0, 1.0),
    ),
}


@pytest.fixture
def make(random_model: Callable[..., Any]) -> Callable[..., Any]:
    def build(config: dict[str, Any], dtype: str = "float32") -> Any:
        return random_model(BASE | config, seed=13, dtype=dtype)

    return build


def rotary_modules(model: Any) -> list[Any]:
    return [layer.self_attn.rope for layer in model.layers]


def rotate(plain: np.ndarray[Any, Any], found: Rope, freqs: np.ndarray[Any, Any], offset: int) -> np.ndarray[Any, Any]:
    """Rotate [..., N, D] by the textbook, in float64. ``freqs`` are the wavelengths over 2 pi, one a pair."""
    dims = found.dims
    turned = plain.astype(np.float64).copy()
    angles = np.outer(np.arange(offset, offset + plain.shape[-2]) * found.scale, 1 / freqs)
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if found.traditional else (slice(dims // 2), slice(dims // 2, dims))
    )
    a, b = turned[..., first] * found.mscale, turned[..., second] * found.mscale
    turned[..., first] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return turned


@pytest.mark.parametrize("name", MODELS)
def test_the_rotation_of_every_layer_is_proven(name: str, make: Callable[..., Any]) -> None:
    config, (dims, traditional, base, scale, mscale) = MODELS[name]
    found, _ = probe(make(config), VOCABULARY)
    assert found.unsupported == ""
    assert found.error <= 1e-5
    assert len(found.rotations) == 2
    for rotation in found.rotations:
        read = rotation.rope
        assert (read.kind, read.dims, read.traditional, read.base, read.scale) == (
            "rope",
            dims,
            traditional,
            base,
            scale,
        )
        assert read.mscale == pytest.approx(mscale)
        assert (read.freqs is None) == (base is not None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("offset", [0, 37])
def test_keys_are_rotated_back_to_what_they_were(name: str, offset: int, make: Callable[..., Any]) -> None:
    found, _ = probe(make(MODELS[name][0]), VOCABULARY)
    rotation = found.rotations[0]
    pairs = np.arange(0, rotation.rope.dims, 2) / rotation.rope.dims
    freqs = np.array(rotation.freqs, dtype=np.float64) if rotation.freqs is not None else rotation.rope.base**pairs
    plain = np.random.default_rng(1).standard_normal((1, 2, 30, 16))
    turned = rotate(plain, rotation.rope, freqs, offset)
    assert np.abs(turned - plain).max() > 0.5
    back = rotation.unrotate(mx.array(turned.astype(np.float32)), offset)
    assert np.abs(np.array(back) - plain).max() < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-1), ("float16", 2e-2)])
def test_half_precision_passes_within_its_rounding(dtype: str, tolerance: float, make: Callable[..., Any]) -> None:
    found, cache = probe(make({"model_type": "qwen2"}, dtype), VOCABULARY)
    assert cache[0].keys.dtype == getattr(mx, dtype)
    assert found.unsupported == ""
    assert 0 < found.error <= tolerance


def test_layers_without_rotation_are_found(make: Callable[..., Any]) -> None:
    found, _ = probe(make({"model_type": "smollm3", "num_hidden_layers": 4}), VOCABULARY)
    assert found.unsupported == ""
    assert found.error <= 1e-5
    assert [rotation.rope.kind for rotation in found.rotations] == ["rope", "rope", "rope", "none"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 2},
            "layer 0: cache class RotatingKVCache, only KVCache can be carried",
        ),
        (
            {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16},
            "layer 1: cache class RotatingKVCache, only KVCache can be carried",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "layer 0: rotary module DynamicNTKScalingRoPE is not one whose rotation is fixed",
        ),
        (
            {"model_type": "gpt2", "n_ctx": 128, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128,
             "layer_norm_epsilon": 1e-5},
            "layer 0: no rotary module was called, so positions cannot be proven",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_proven_is_unsupported_by_name(
    config: dict[str, Any], reason: str, make: Callable[..., Any]
) -> None:
    found, _ = probe(make(config), VOCABULARY)
    assert found.unsupported == reason


class Lying(nn.RoPE):
    """Says what a plain RoPE says, and does something else."""

    def __init__(self, honest: nn.RoPE, **lie: Any) -> None:
        super().__init__(honest.dims, honest.traditional, honest.base, honest.scale)
        self.lie = lie

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        settings = {"traditional": self.traditional, "base": self.base, "scale": self.scale, "offset": offset}
        settings |= {key: value for key, value in self.lie.items() if key in settings}
        turned = mx.fast.rope(x, self.lie.get("dims", self.dims), freqs=None, **settings)
        return turned * self.lie.get("mscale", 1.0)


LIES: dict[str, dict[str, Any]] = {
    "theta": {"base": 1e6},
    "slightly other theta": {"base": 10500.0},
    "pairing": {"traditional": True},
    "scale": {"scale": 0.5},
    "dims": {"dims": 8},
    "mscale": {"mscale": 1.1},
    "offset of the second chunk": {"offset": 0},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_module_that_rotates_otherwise_is_caught(lie: str, layer: int, make: Callable[..., Any]) -> None:
    model = make({"model_type": "llama"})
    attention = model.layers[layer].self_attn
    attention.rope = Lying(attention.rope, **LIES[lie])
    found, _ = probe(model, VOCABULARY)
    assert found.unsupported.startswith(f"layer {layer}: rotary probe error ")
    assert found.error > 1e-2


@pytest.mark.parametrize("wrong", [{"base": 1e6}, {"traditional": True}, {"scale": 0.5}, {"mscale": 2.0}])
def test_parameters_read_wrongly_are_caught(
    wrong: dict[str, Any], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = describe

    def misread(module: Any) -> Rotation:
        right = honest(module)
        assert right is not None
        fields = {name: getattr(right.rope, name) for name in right.rope.__struct_fields__}
        return Rotation(Rope(**(fields | wrong)), None)

    monkeypatch.setattr(rope, "describe", misread)
    found, _ = probe(make({"model_type": "llama"}), VOCABULARY)
    assert found.unsupported.startswith("layer 0: rotary probe error ")
    assert found.error > 0.1


def test_numbers_that_are_none_prove_nothing(make: Callable[..., Any]) -> None:
    model = make({"model_type": "llama"})
    projection = model.layers[1].self_attn.k_proj
    projection.weight = mx.full(projection.weight.shape, float("nan"))
    found, _ = probe(model, VOCABULARY)
    assert found.unsupported.startswith("layer 1: ")


def test_the_model_is_as_before(make: Callable[..., Any]) -> None:
    model = make({"model_type": "qwen3"})
    ids = mx.array([[3, 1, 4, 1, 5]])
    modules, logits = rotary_modules(model), np.array(model(ids))
    names = [name for name, _ in model.named_modules()]
    probe(model, VOCABULARY)
    assert all(after is before for after, before in zip(rotary_modules(model), modules, strict=True))
    assert [name for name, _ in model.named_modules()] == names
    assert np.array_equal(np.array(model(ids)), logits)


def test_the_model_is_as_before_when_it_fails(make: Callable[..., Any]) -> None:
    model = make({"model_type": "llama"})
    modules = rotary_modules(model)
    honest = model.layers[1].mlp

    def broken(_: mx.array) -> mx.array:
        raise RuntimeError("out of memory")

    model.layers[1].mlp = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(model, VOCABULARY)
    assert all(after is before for after, before in zip(rotary_modules(model), modules, strict=True))
    model.layers[1].mlp = honest
    assert probe(model, VOCABULARY)[0].unsupported == ""


def test_the_filled_cache_is_that_of_the_probe_tokens(make: Callable[..., Any]) -> None:
    model = make({"model_type": "llama"})
    _, cache = probe(model, VOCABULARY)
    plain = make_prompt_cache(model)
    ids = mx.array([[(7 + 13 * step) % VOCABULARY for step in range(rope.PROBE_TOKENS)]])
    model(ids, cache=plain)
    for ours, theirs in zip(cache, plain, strict=True):
        assert ours.offset == theirs.offset == rope.PROBE_TOKENS
        assert np.allclose(np.array(ours.keys_and_values()[0]), np.array(theirs.keys_and_values()[0]), atol=1e-5)


def test_equal_rotations_have_equal_wire_forms(make: Callable[..., Any]) -> None:
    def wire(**scaling: Any) -> Rope:
        return probe(make({"model_type": "llama", "rope_scaling": LLAMA3 | scaling}), VOCABULARY)[0].rotations[0].rope

    assert wire() == wire()
    assert wire() != wire(factor=4.0)
    assert wire().freqs is not None
