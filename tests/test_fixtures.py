"""The shared fixtures keep what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import platformdirs
from tokenizers import Tokenizer

FOLDERS = ("cache", "config", "data", "state")


def test_every_directory_of_the_users_is_a_temporary_one(isolated_home: Path) -> None:
    assert Path.home() == isolated_home
    paths = [getattr(platformdirs, f"user_{name}_path")("kvferry") for name in FOLDERS]
    assert all(path.is_relative_to(isolated_home) for path in paths)
    assert not [name for name in os.environ if name.startswith("KVFERRY_")]
    script = "import platformdirs; print(platformdirs.user_data_path('kvferry'))"
    started = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert Path(started.stdout.strip()).is_relative_to(isolated_home)


def test_the_fixtures_import_no_mlx_before_they_are_used() -> None:
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('fixtures', {str(Path(__file__).with_name('conftest.py'))!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "print([name for name in ('mlx', 'mlx_lm', 'transformers') if name in sys.modules])"
    )
    started = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert started.stdout.strip() == "[]"


def test_model_directories_follow_from_their_arguments(tiny_model_dir: Callable[..., Path]) -> None:
    plain, other = tiny_model_dir(), tiny_model_dir(seed=1)
    assert tiny_model_dir("llama", seed=0, layers=2) == plain
    weights = [(path / "model.safetensors").read_bytes() for path in (plain, other)]
    assert len(weights[0]) == len(weights[1])
    assert weights[0] != weights[1]
    config = json.loads((tiny_model_dir("qwen2", heads=14, head_dim=8, context=99) / "config.json").read_text("utf-8"))
    assert (config["hidden_size"], config["max_position_embeddings"]) == (112, 99)


def test_the_tokenizer_is_small_and_takes_any_text(tiny_tokenizer_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 400
    text = "naïve 北 👩\u200d🚀 \x00\r\n\tthe north warehouse"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the north warehouse").ids) < 8
    assert tokenizer.encode("<|im_start|><think>").ids == [377, 379]
