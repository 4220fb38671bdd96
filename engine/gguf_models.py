"""Converts one GGUF file into an mlx-lm model directory, visible as a whole or not at all."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvferry.core.digests import digest
from kvferry.core.errors import ModelError
from kvferry.core.files import fsync_directory, write_atomic
from kvferry.engine.catalogue import PARTIAL_PREFIX, RECORD_NAME
from kvferry.engine.gguf_config import STORED_DTYPE, build_config
from kvferry.engine.gguf_file import GgufFile
from kvferry.engine.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from kvferry.engine.gguf_weights import plan_weights, write_weights

CONVERTER_VERSION = 1
"""Raised whenever the same GGUF file would give other bytes."""

WEIGHTS_NAME = "model.safetensors"


def _write_text(path: Path, text: str) -> dict[str, Any]:
    data = text.encode()
    write_atomic(path, data)
    return {"bytes": len(data), "blake3": digest(data).hex()}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _fill(gguf: GgufFile, stage: Path, source: Mapping[str, Any], progress: Callable[[int, int], None] | None) -> None:
    config = build_config(gguf)
    tokenizer = build_tokenizer(gguf)
    planned = plan_weights(gguf, config)
    tokenizer_config = build_tokenizer_config(gguf, config["max_position_embeddings"])
    files = {
        "config.json": _write_text(stage / "config.json", _json(config)),
        "tokenizer.json": _write_text(stage / "tokenizer.json", tokenizer.to_str()),
        "tokenizer_config.json": _write_text(stage / "tokenizer_config.json", _json(tokenizer_config)),
    }
    size, weights_digest = write_weights(planned, stage / WEIGHTS_NAME, progress)
    files[WEIGHTS_NAME] = {"bytes": size, "blake3": weights_digest.hex()}
    record = {"converter_version": CONVERTER_VERSION, "dtype": STORED_DTYPE, **source, "files": files}
    _write_text(stage / RECORD_NAME, _json(record))


def convert_gguf(
    gguf_path: Path,
    directory: Path,
    source: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert ``gguf_path`` and publish the result as ``directory``.

    The files are written beside ``directory`` under a hidden name, pushed to the disk and renamed in one
    step: a crash at any moment leaves either no directory or the whole one. The same GGUF file gives the same
    bytes everywhere.

    Args:
        gguf_path: a llama or qwen2 model with a byte-level BPE tokenizer.
        directory: the model directory to make; its parent exists.
        source: where the file came from; copied into ``kvferry-model.json``.
        progress: called with weight bytes written so far and in all.

    Raises:
        ModelError: when ``directory`` exists, or the file is damaged or needs something unsupported.
    """
    if directory.exists():
        raise ModelError(f"{directory} exists already", path=str(directory))
    stage = directory.parent / f"{PARTIAL_PREFIX}{directory.name}-{secrets.token_hex(4)}"
    stage.mkdir()
    try:
        _fill(GgufFile(gguf_path), stage, source, progress)
        fsync_directory(stage)
        stage.rename(directory)
        fsync_directory(directory.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
