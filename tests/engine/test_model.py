"""Loading: what a model is said to be, and one clear error for everything that is no usable model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from kvferry.core.compat import LayerGeometry
from kvferry.core.errors import ModelError
from kvferry.core.manifest import Quantization
from kvferry.core.progress import finish
from kvferry.engine import fingerprint
from kvferry.engine import model as model_module
from kvferry.engine.generate import Sampling
from kvferry.engine.model import LoadedModel, load

TinyModelDir = Callable[..., Path]
on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only CPUs compute in float32 alone")


@pytest.fixture
def folder(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Path:
    """A model directory that the test may change."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), "utf-8")


# --- What it is said to be --------------------------------------------------------------------------------------------


def test_the_profile_is_what_was_measured(tiny_model_dir: TinyModelDir) -> None:
    path = tiny_model_dir("qwen3", layers=3, heads=9, kv_heads=3, head_dim=8, context=777)
    profile = load(str(path), max_payload_bytes=1234).profile
    assert profile.layers == (LayerGeometry("KVCache", 3, 8, 8, "F32"),) * 3
    assert (profile.context_length, profile.max_payload_bytes, profile.unsupported) == (777, 1234, "")
    assert [(item.kind, item.dims, item.base) for item in profile.rope] == [("rope", 8, 10000.0)] * 3
    assert 0 <= profile.probe_error <= 1e-5
    assert profile.dense_bytes_per_token == 3 * 3 * (8 + 8) * 2
    identity = profile.model
    assert (identity.id, identity.type, identity.revision, identity.adapter) == (path.name, "qwen3", "", None)
    assert identity.weights == fingerprint.weights_digest(path)
    assert identity.quantization is None


def test_equal_directories_have_equal_profiles_and_others_have_not(tiny_model_dir: TinyModelDir, folder: Path) -> None:
    first, copy = load(str(tiny_model_dir())).profile, load(str(folder)).profile
    assert (copy.model.weights, copy.model.config) == (first.model.weights, first.model.config)
    assert (copy.tokenizer, copy.rope, copy.layers) == (first.tokenizer, first.rope, first.layers)
    other = load(str(tiny_model_dir(seed=1))).profile
    assert other.model.weights != first.model.weights
    assert (other.model.config, other.tokenizer, other.layers) == (first.model.config, first.tokenizer, first.layers)


def test_a_context_that_is_not_stated_is_2048(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=None)
    assert load(str(folder)).profile.context_length == 2048


def test_a_directory_has_one_name_however_it_is_written(
    folder: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (isolated_home / "linked").symlink_to(folder)
    names = [load(source).profile.model.id for source in (str(folder), f"{folder}/", ".", "~/linked")]
    assert names == ["model", "model", "model", "linked"]


@on_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_cpu_everything_is_float32(tiny_model_dir: TinyModelDir, dtype: str) -> None:
    model = load(str(tiny_model_dir(dtype=dtype)))
    assert {layer.dtype for layer in model.profile.layers} == {"F32"}
    assert model.profile.unsupported == ""


def test_quantised_weights(tiny_model_dir: TinyModelDir, random_model: Callable[..., Any], folder: Path) -> None:
    config = json.loads((tiny_model_dir() / "config.json").read_text("utf-8"))
    model = random_model(config)
    nn.quantize(model, group_size=32, bits=8)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    edit(folder / "config.json", quantization={"group_size": 32, "bits": 8})
    profile = load(str(folder)).profile
    assert profile.model.quantization == Quantization(8, 32, "affine")
    assert profile.unsupported == ""


def test_a_model_answers(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model(seed=2)
    prefix = finish(model.prefill(model.prompt.prefix("The code is 4417.")))
    answer = finish(model.answer(model.prompt.fresh("Which code?"), prefix, prefix.offset, Sampling(max_tokens=5)))
    assert len(answer.token_ids) == 5


def test_models_with_sliding_windows_load_but_their_cache_cannot_be_kept(tiny_model_dir: TinyModelDir) -> None:
    window = {"sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    model = load(str(tiny_model_dir("gemma3_text", config=window)))
    reason = "layer 0: cache class RotatingKVCache, only KVCache can be carried"
    assert model.profile.unsupported == reason
    assert [layer.cache_class for layer in model.profile.layers] == ["RotatingKVCache", "KVCache"]
    ids = model.prompt.prefix("The code is 4417. " * 4)
    with pytest.raises(ModelError, match=f"cannot be kept: {reason}"):
        model.prefill(ids)
    # Reading for one answer needs no cache that can be kept.
    cache = finish(model.read(ids))
    answer = finish(model.answer(model.prompt.fresh("Which code?"), cache, len(ids), Sampling(max_tokens=4)))
    assert len(answer.token_ids) == 4


def test_a_cache_that_gives_other_logits_is_unsupported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = model_module.forward
    monkeypatch.setattr(model_module, "forward", lambda *args: forward(*args) + 1.0)
    assert load(str(folder)).profile.unsupported.startswith("a carried cache gives other logits: relative error ")


# --- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA adapter of one projection in the last layer."""
    path = tmp_path / "adapter"
    path.mkdir()
    rng = np.random.default_rng(2)
    weights = {
        "model.layers.1.self_attn.q_proj.lora_a": rng.standard_normal((64, 4)),
        "model.layers.1.self_attn.q_proj.lora_b": rng.standard_normal((4, 64)),
    }
    arrays = {name: mx.array(value.astype(np.float32)) for name, value in weights.items()}
    mx.save_safetensors(str(path / "adapters.safetensors"), arrays)
    settings = {
        "fine_tune_type": "lora",
        "num_layers": 1,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def test_an_adapter_changes_the_answers_and_the_identity(folder: Path, adapter: Path) -> None:
    plain, adapted = load(str(folder)), load(str(folder), adapter=str(adapter))
    assert adapted.profile.model.adapter == fingerprint.adapter_digest(adapter)
    assert adapted.profile.model.weights == plain.profile.model.weights
    assert adapted.profile.unsupported == ""
    ids = mx.array([[3, 1, 4]])
    assert np.abs(np.array(adapted.model(ids)) - np.array(plain.model(ids))).max() > 1e-2


def spoil_shape(path: Path) -> None:
    mx.save_safetensors(
        str(path / "adapters.safetensors"), {"model.layers.1.self_attn.q_proj.lora_a": mx.zeros((3, 3))}
    )


@pytest.mark.parametrize(
    "spoil",
    [
        shutil.rmtree,
        lambda path: (path / "adapters.safetensors").unlink(),
        lambda path: (path / "adapters.safetensors").write_bytes(b"\x01" * 40),
        spoil_shape,
        lambda path: (path / "adapter_config.json").unlink(),
        lambda path: (path / "adapter_config.json").write_text("{"),
        lambda path: (path / "adapter_config.json").write_text("[]"),
        lambda path: (path / "adapter_config.json").write_text("{}"),
        lambda path: (path / "adapter_config.json").write_text('{"num_layers": 1, "lora_parameters": {}}'),
    ],
    ids=["directory", "weights", "bytes", "shape", "config", "json", "list", "keys", "parameters"],
)
def test_an_unusable_adapter(folder: Path, adapter: Path, spoil: Callable[[Path], Any]) -> None:
    spoil(adapter)
    with pytest.raises(ModelError, match=f"adapter: {adapter} could not be loaded: ."):
        load(str(folder), adapter=str(adapter))


# --- What is no usable model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["/no/such/place", "./nothing", "~/nothing", "just-a-name", "a/b/c", ""])
def test_neither_a_directory_nor_a_hub_id(source: str) -> None:
    with pytest.raises(ModelError, match=f"model: {source!r} is neither a directory nor a hub id"):
        load(source)


def test_a_file_is_no_directory(folder: Path) -> None:
    with pytest.raises(ModelError, match="neither a directory"):
        load(str(folder / "config.json"))


def test_a_hub_id_is_fetched_without_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(model_module, "snapshot_download", fetch)
    model = load("owner/name", revision="abc")
    load("owner/name")
    assert [(name, revision) for name, revision, _ in asked] == [("owner/name", "abc"), ("owner/name", None)]
    assert not any("py" in pattern for pattern in asked[0][2])
    assert (model.profile.model.id, model.profile.model.revision) == ("owner/name", "abc")


def test_a_hub_that_cannot_be_reached() -> None:
    with pytest.raises(ModelError, match="model: no-such-owner/no-such-model could not be fetched: "):
        load("no-such-owner/no-such-model")


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def config_that_is_no_json(path: Path) -> None:
    (path / "config.json").write_text("{")


def config_that_is_a_list(path: Path) -> None:
    (path / "config.json").write_text("[]")


def own_code(path: Path) -> None:
    edit(path / "config.json", model_file="model.py")


def unknown_architecture(path: Path) -> None:
    edit(path / "config.json", model_type="nonesuch")


def missing_setting(path: Path) -> None:
    edit(path / "config.json", hidden_size=None)


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def broken_weights(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x07" * 100)


def cut_weights(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def weights_of_another_shape(path: Path) -> None:
    edit(path / "config.json", intermediate_size=96)


def too_few_weights(path: Path) -> None:
    edit(path / "config.json", num_hidden_layers=3)


def no_tokenizer(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()


def broken_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def no_template(path: Path) -> None:
    edit(path / "tokenizer_config.json", chat_template=None)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_config, "has no config.json"),
        (config_that_is_no_json, "could not be loaded: "),
        (config_that_is_a_list, "could not be loaded: "),
        (own_code, r"could not be loaded: .*model\.py"),
        (unknown_architecture, "could not be loaded: .*nonesuch"),
        (missing_setting, "could not be loaded: .*hidden_size"),
        (no_weights, "could not be loaded: .*No safetensors"),
        (broken_weights, "could not be loaded: "),
        (cut_weights, "could not be loaded: "),
        (weights_of_another_shape, "could not be loaded: .*mlp"),
        (too_few_weights, "could not be loaded: .*layers.2"),
        (no_tokenizer, "tokenizer: .* could not be loaded: "),
        (broken_tokenizer, "tokenizer: .* could not be loaded: "),
        (no_template, "chat template: the model has none"),
    ],
)
def test_one_clear_error(folder: Path, spoil: Callable[[Path], None], reason: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=reason) as caught:
        load(str(folder))
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 700
    assert str(folder) in caught.value.message or spoil is no_template


def test_block_sparse_attention_loads_but_its_cache_cannot_be_kept(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by a row's index; the prefix of a self test is too short to show it."""
    from mlx_lm.models.llama import Attention

    path = tiny_model_dir()
    assert load(str(path)).profile.unsupported == ""
    monkeypatch.setattr(Attention, "block_sparse", True, raising=False)
    assert "layer 0: block-sparse attention" in load(str(path)).profile.unsupported
