"""Digests say what a model is: every change of it shows, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import platformdirs
import pytest
from mlx_lm import tokenizer_utils

from kvferry.core.digests import file_digest
from kvferry.core.errors import ModelError
from kvferry.core.manifest import Quantization, Tokenizer
from kvferry.engine import fingerprint
from kvferry.engine.fingerprint import (
    adapter_digest,
    config_digest,
    describe_tokenizer,
    tokenizer_identity,
    weights_digest,
)


@pytest.fixture
def folder(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    """A model directory that the test may change."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's digests are kept."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return platformdirs.user_cache_path("kvferry") / "file-digests.json"


@pytest.fixture
def digested(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read, in order."""
    del cache_file
    names: list[str] = []

    def read(path: Path) -> bytes:
        names.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(fingerprint, "file_digest", read)
    return names


def write_tensors(path: Path, **tensors: Any) -> Path:
    mx.save_safetensors(str(path), {name: mx.array(np.float32(values)) for name, values in tensors.items()})
    return path


def rewrite(path: Path, data: bytes, age_ns: int) -> None:
    """Write a file and give it a modification time that differs by ``age_ns``."""
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before, before + age_ns))


# --- Weights ----------------------------------------------------------------------------------------------------------


def test_one_changed_weight_changes_the_digest(folder: Path) -> None:
    before = weights_digest(folder)
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.1.self_attn.k_proj.weight"
    changed = np.array(weights[name])
    changed[3, 5] = np.nextafter(changed[3, 5], np.float32(9))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, name: mx.array(changed)}, {"format": "mlx"})
    assert weights_digest(folder) != before


def test_equal_contents_have_equal_digests_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(folder, tmp_path / "other"))
    # The hub's cache holds links to blobs with other names.
    linked = tmp_path / "snapshot"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert weights_digest(folder) == weights_digest(elsewhere) == weights_digest(linked)
    assert len(weights_digest(folder)) == 32


def test_every_shard_counts_and_so_does_its_name(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first, second = (write_tensors(tmp_path / name, w=[index]) for index, name in enumerate(names))
    both = weights_digest(tmp_path)
    contents = first.read_bytes(), second.read_bytes()
    rewrite(first, contents[1], 1)
    rewrite(second, contents[0], 1)
    assert weights_digest(tmp_path) != both
    second.unlink()
    alone = weights_digest(tmp_path)
    assert alone != both
    first.rename(tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != alone


def test_files_that_are_no_weights_do_not_count(folder: Path) -> None:
    before = weights_digest(folder)
    (folder / "README.md").write_text("words")
    write_tensors(folder / "adapters.safetensors", w=[1])
    (folder / "model.safetensors.index.json").write_text("{}")
    assert weights_digest(folder) == before


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"weights: no model\*\.safetensors in {tmp_path}"):
        weights_digest(tmp_path)


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"weights: .*model\.safetensors"):
        weights_digest(tmp_path)


def test_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match="No such file"):
        weights_digest(tmp_path)


# --- The digests that are kept ----------------------------------------------------------------------------------------


def test_a_file_is_read_once(folder: Path, cache_file: Path, digested: list[str]) -> None:
    first = weights_digest(folder)
    assert weights_digest(folder) == first
    assert digested == ["model.safetensors"]
    assert cache_file.is_file()


@pytest.mark.parametrize("age_ns", [1, -1_000_000_000])
def test_a_file_of_the_same_size_but_another_time_is_read_again(folder: Path, digested: list[str], age_ns: int) -> None:
    first = weights_digest(folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    rewrite(weights, bytes(data), age_ns)
    assert weights_digest(folder) != first
    assert digested == ["model.safetensors"] * 2


def test_only_what_changed_is_read_again(tmp_path: Path, digested: list[str]) -> None:
    for index in (1, 2, 3):
        write_tensors(tmp_path / f"model-{index}.safetensors", w=[index])
    weights_digest(tmp_path)
    digested.clear()
    second = tmp_path / "model-2.safetensors"
    rewrite(second, second.read_bytes(), 5)
    weights_digest(tmp_path)
    assert digested == ["model-2.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"/model": 3}', b'{"/model": {"size": 1}}', b'{"\xff": {}}', b"null"],
)
def test_damaged_notes_are_ignored_and_replaced(
    folder: Path, cache_file: Path, digested: list[str], damage: bytes
) -> None:
    first = weights_digest(folder)
    cache_file.write_bytes(damage)
    assert weights_digest(folder) == first
    assert weights_digest(folder) == first
    assert digested == ["model.safetensors"] * 2
    assert list(msgspec.json.decode(cache_file.read_bytes())) == [str((folder / "model.safetensors").resolve())]


def test_a_cache_that_cannot_be_written_does_not_matter(folder: Path, cache_file: Path) -> None:
    cache_file.parent.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(cache_file.parent, ignore_errors=True)
    cache_file.parent.write_text("a file where the directory should be")
    assert weights_digest(folder) == weights_digest(folder)


# --- Configuration ----------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "hidden_size": 64,
    "rope_scaling": {"type": "yarn", "factor": 4},
}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10001.0},
        {"hidden_size": 128},
        {"rope_scaling": {"type": "yarn", "factor": 8}},
        {"rope_scaling": None},
        {"quantization": {"bits": 4, "group_size": 64}},
        {"eos_token_id": 2},
    ],
)
def test_what_a_model_reads_changes_the_digest(change: dict[str, Any]) -> None:
    assert config_digest(CONFIG | change) != config_digest(CONFIG)


def test_what_no_model_reads_does_not() -> None:
    volatile = {
        "_name_or_path": "/home/ada/model",
        "transformers_version": "5.7.0",
        "torch_dtype": "bfloat16",
        "dtype": "float16",
        "use_cache": False,
    }
    assert config_digest(CONFIG | volatile) == config_digest(CONFIG)
    assert config_digest(dict(reversed(CONFIG.items()))) == config_digest(CONFIG)


def test_quantization_is_what_the_configuration_states() -> None:
    assert fingerprint.quantization(CONFIG) is None
    stated = {"quantization": {"bits": 4, "group_size": 64, "model.layers.0.mlp": {"bits": 8}}}
    assert fingerprint.quantization(stated) == Quantization(4, 64, "affine")
    assert fingerprint.quantization({"quantization": {"bits": 8, "group_size": 32, "mode": "mxfp8"}}) == Quantization(
        8, 32, "mxfp8"
    )


# --- Tokenizer --------------------------------------------------------------------------------------------------------


def changed_tokenizer(source: Path, tmp_path: Path, file: str, change: Callable[[Any], None]) -> Any:
    path = Path(shutil.copytree(source, tmp_path / f"tokenizer-{len(list(tmp_path.iterdir()))}"))
    content = json.loads((path / file).read_text("utf-8"))
    change(content)
    (path / file).write_text(json.dumps(content), "utf-8")
    return tokenizer_utils.load(path)


def identity_of(tokenizer: Any) -> Tokenizer:
    return tokenizer_identity(describe_tokenizer(tokenizer), tokenizer.chat_template)


def swap_two_entries(tokenizer: Any) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def drop_a_merge(tokenizer: Any) -> None:
    tokenizer["model"]["merges"].pop()


def make_it_special(tokenizer: Any) -> None:
    tokenizer["added_tokens"][-1]["special"] = True


@pytest.mark.parametrize("change", [swap_two_entries, drop_a_merge, make_it_special])
def test_a_changed_vocabulary(change: Callable[[Any], None], tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    before = identity_of(tokenizer_utils.load(tiny_tokenizer_dir))
    after = identity_of(changed_tokenizer(tiny_tokenizer_dir, tmp_path, "tokenizer.json", change))
    assert after.vocab != before.vocab
    assert after.chat_template == before.chat_template


def test_a_changed_template(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    def add_a_space(settings: Any) -> None:
        settings["chat_template"] += " "

    before = identity_of(tokenizer_utils.load(tiny_tokenizer_dir))
    after = identity_of(changed_tokenizer(tiny_tokenizer_dir, tmp_path, "tokenizer_config.json", add_a_space))
    assert after.vocab == before.vocab
    assert after.chat_template != before.chat_template


def test_other_ends_of_an_answer(tiny_tokenizer_dir: Path) -> None:
    first, second = (tokenizer_utils.load(tiny_tokenizer_dir, eos_token_ids=[end]) for end in (376, 377))
    assert identity_of(first).vocab != identity_of(second).vocab


def test_using_a_tokenizer_does_not_change_it(tiny_tokenizer_dir: Path) -> None:
    tokenizer = tokenizer_utils.load(tiny_tokenizer_dir)
    before = identity_of(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    assert identity_of(tokenizer) == before
    assert identity_of(tokenizer_utils.load(tiny_tokenizer_dir)) == before


def test_a_tokenizer_without_a_fast_back_end() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        describe_tokenizer(SimpleNamespace(eos_token_ids={1}, chat_template=""))


# --- Adapter ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    write_tensors(path / "adapters.safetensors", a=[1, 2], b=[3])
    (path / "adapter_config.json").write_text('{"num_layers": 2, "lora_parameters": {"rank": 8, "scale": 20}}')
    return path


def test_an_adapter_is_its_weights_and_its_configuration(adapter: Path) -> None:
    before = adapter_digest(adapter)
    assert adapter_digest(adapter) == before
    (adapter / "adapter_config.json").write_text('{"num_layers": 2, "lora_parameters": {"rank": 8, "scale": 10}}')
    scaled = adapter_digest(adapter)
    other = write_tensors(adapter.parent / "other.safetensors", a=[1, 2], b=[4])
    rewrite(adapter / "adapters.safetensors", other.read_bytes(), 7)
    assert len({before, scaled, adapter_digest(adapter)}) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), ("{", "adapter_config.json: "), ("[1]", "expected a JSON object, got list")],
)
def test_an_adapter_without_a_usable_configuration(adapter: Path, content: str | None, reason: str) -> None:
    path = adapter / "adapter_config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=reason):
        adapter_digest(adapter)


def test_an_adapter_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter: no \*\.safetensors"):
        adapter_digest(tmp_path)
