"""The model of a configuration: is it there, is it whole, does it fit the memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.cli import output
from kvferry.cli.checks.findings import Finding
from kvferry.cli.checks.memory import Memory
from kvferry.cli.checks.system import System
from kvferry.core import json_records
from kvferry.core.config import NodeConfig
from kvferry.core.errors import ModelError

WEIGHTS = "model*.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_WIDENED = ("F16", "BF16")

Resolve = Callable[[str], Path | str]


def locate(config: NodeConfig, resolve: Resolve) -> tuple[Path | None, Finding]:
    """Find the model's directory.

    Args:
        config: names the model.
        resolve: turns a user's word into a directory or a hub id.

    Returns:
        The directory, None when there is none yet, and what that means.
    """
    try:
        found = resolve(config.model)
    except ModelError as error:
        return None, Finding("model", "problem", error.message, "give a directory, or a name of `kvferry models list`")
    if isinstance(found, Path):
        return found, Finding("model", "ok", f"{config.model} is in {found}")
    if found.count("/") != 1:
        return None, Finding(
            "model",
            "problem",
            f"{found!r} is neither a directory nor a hub id (owner/name)",
            "see `kvferry models list` for what can be added by name",
        )
    cached = _cached(found, config.revision)
    if cached is None:
        return None, Finding(
            "model",
            "warning",
            f"{found} is not on this disk; the daemon fetches it when it starts",
            f"fetch it while the network is there: hf download {found}",
        )
    return cached, Finding("model", "ok", f"{found} is in {cached}")


def files(path: Path) -> Finding:
    """Check that config.json, a tokenizer and every weight file are there and whole."""
    again = f"fetch the model again; what is in {path} cannot be used"
    try:
        _read_object(path / "config.json")
        wanted = _weight_files(path)
        if not any((path / name).is_file() for name in _TOKENIZERS):
            return Finding("model files", "problem", f"{path}: no {' and no '.join(_TOKENIZERS)}", again)
        total = sum(_check_weights(file) for file in wanted)
    except (OSError, ValueError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return Finding("model files", "problem", text, again)
    return Finding("model files", "ok", f"{len(wanted)} weight file(s), {output.size(total)}, tokenizer, config.json")


def adapter(config: NodeConfig) -> Finding | None:
    """Check the LoRA adapter's files; None without one."""
    if not config.adapter:
        return None
    path = Path(config.adapter).expanduser()
    missing = [name for name in ("adapter_config.json", "adapters.safetensors") if not (path / name).is_file()]
    if missing:
        text = f"adapter {path}: no {' and no '.join(missing)}"
        return Finding("adapter", "problem", text, "give the directory that mlx_lm.lora wrote, or none")
    return Finding("adapter", "ok", f"adapter in {path}")


def fits(path: Path, memory: Memory | None, system: System) -> Finding:
    """Compare the weights as they are held with the memory that is free."""
    try:
        held = sum(_held_bytes(file, widen=not system.is_macos) for file in _weight_files(path))
    except (OSError, ValueError):
        return Finding("memory", "warning", "not compared: the weights cannot be read", "see the finding on files")
    text = f"the weights take {output.size(held)}" + ("" if system.is_macos else " as float32")
    if memory is None:
        return Finding("memory", "warning", f"{text}; the system does not tell what is free", "compare them yourself")
    text += f"; {output.size(memory.available)} of {output.size(memory.total)} are free"
    if held > memory.total:
        return Finding("memory", "problem", text, "take a smaller or a quantised model, or a larger machine")
    if held > memory.available:
        return Finding("memory", "warning", text, "close other programs first, or take a smaller or a quantised model")
    return Finding("memory", "ok", text)


def _cached(hub_id: str, revision: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        # It comes with mlx-lm, and another finding says that this is missing.
        return None
    try:
        found = try_to_load_from_cache(hub_id, "config.json", revision=revision or None)
    except ValueError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json_records.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object")  # noqa: TRY004  (the file is wrong, not an argument)
    return content


def _weight_files(path: Path) -> list[Path]:
    """Return the files with weights: those that an index names, else all.

    Raises:
        ValueError: when there is none, or one that the index names is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"{index}: holds no weight_map")
        found = sorted({path / str(name) for name in names.values()})
    else:
        found = sorted(path.glob(WEIGHTS))
    if not found:
        raise ValueError(f"{path}: no {WEIGHTS}")
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        raise ValueError(f"{path}: {len(missing)} of {len(found)} weight files are missing, {missing[0]} first")
    return found


def _check_weights(path: Path) -> int:
    """Return a weight file's size.

    Raises:
        ValueError: when it is not as long as its own header says.
    """
    header, start = _header(path)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    size = path.stat().st_size
    if size != end:
        raise ValueError(f"{path}: {size} bytes, its header says {end}; a download was probably cut short")
    return size


def _held_bytes(path: Path, *, widen: bool) -> int:
    header, _ = _header(path)
    return sum(
        (entry["data_offsets"][1] - entry["data_offsets"][0]) * (2 if widen and entry["dtype"] in _WIDENED else 1)
        for entry in header.values()
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the tensors that a safetensors file describes, and where its data start."""
    with path.open("rb") as file:
        raw = file.read(_HEADER_LENGTH.size)
        length = _HEADER_LENGTH.unpack(raw)[0] if len(raw) == _HEADER_LENGTH.size else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path}: no safetensors file")
        try:
            header = json_records.loads(file.read(length))
            header.pop("__metadata__", None)
            _ = [(int(first), int(last)) for first, last in (entry["data_offsets"] for entry in header.values())]
            _ = [str(entry["dtype"]) for entry in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: its safetensors header cannot be read") from error
    return header, _HEADER_LENGTH.size + length
