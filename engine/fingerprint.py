"""What a model directory *is*: digests of its weights, configuration, tokenizer, chat template and adapter."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from platformdirs import user_cache_path

from kvferry.core import json_records
from kvferry.core.digests import Hasher, digest, file_digest
from kvferry.core.errors import ModelError
from kvferry.core.files import write_atomic
from kvferry.core.manifest import Quantization, Tokenizer

# Written by whoever saved the checkpoint and read by no model: equal checkpoints may differ in them.
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_CACHE_FILE = "file-digests.json"


class _Known(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    digest: bytes


def weights_digest(model_path: Path) -> bytes:
    """Digest the contents of every weight file: names and digests of ``model*.safetensors`` in order of name.

    Raises:
        ModelError: when there is no weight file or one cannot be read.
    """
    return _files_digest(model_path, "model*.safetensors", "weights")


def adapter_digest(adapter_path: Path) -> bytes:
    """Digest an adapter: its ``*.safetensors`` files and its configuration.

    Raises:
        ModelError: when there is no adapter file or one cannot be read.
    """
    files = _files_digest(adapter_path, "*.safetensors", "adapter")
    return digest(files + config_digest(_read_json(adapter_path / "adapter_config.json")))


def config_digest(config: Mapping[str, Any]) -> bytes:
    """Digest a configuration as sorted JSON without the keys that no model reads."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG}
    return digest(json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str).encode())


def quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the weights' quantisation as mlx-lm's configuration states it."""
    stated = config.get("quantization")
    if not isinstance(stated, Mapping):
        return None
    return Quantization(int(stated["bits"]), int(stated["group_size"]), str(stated.get("mode", "affine")))


def describe_tokenizer(tokenizer: Any) -> bytes:
    """Return an mlx-lm tokenizer, written down: JSON [whole tokenizer, sorted ids of ends of turn], keys sorted, ASCII.

    Raises:
        ModelError: when the tokenizer has no fast back end.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("tokenizer: only models with a tokenizer.json (a fast tokenizer) are supported")
    state = json.loads(backend.to_str())
    # Whoever encoded last may have left these set; they are no part of the vocabulary.
    state.pop("truncation", None)
    state.pop("padding", None)
    ends = sorted(int(item) for item in tokenizer.eos_token_ids)
    return json.dumps([state, ends], sort_keys=True, separators=(",", ":")).encode("ascii")


def tokenizer_identity(description: bytes, chat_template: Any) -> Tokenizer:
    """Digest a tokenizer: what ``describe_tokenizer`` writes, and the chat template, one or several by name."""
    shown = chat_template if isinstance(chat_template, str) else json.dumps(chat_template, sort_keys=True)
    return Tokenizer(digest(description), digest(shown.encode("utf-8", "surrogatepass")))


def _files_digest(folder: Path, pattern: str, field: str) -> bytes:
    files = sorted(folder.glob(pattern))
    if not files:
        raise ModelError(f"{field}: no {pattern} in {folder}", field=field, path=str(folder))
    hasher = Hasher()
    for name, content in zip((file.name for file in files), _cached_digests(files), strict=True):
        hasher.update(name.encode() + b"\0" + content)
    return hasher.digest()


def _cached_digests(files: Iterable[Path]) -> list[bytes]:
    """Digest files, trusting an earlier result while path, size and modification time are unchanged."""
    cache_path = user_cache_path("kvferry") / _CACHE_FILE
    known = _read_cache(cache_path)
    found: list[bytes] = []
    changed = False
    for file in files:
        real = file.resolve()
        try:
            status = real.stat()
            entry = known.get(str(real))
            if entry is None or (entry.size, entry.mtime_ns) != (status.st_size, status.st_mtime_ns):
                entry = _Known(status.st_size, status.st_mtime_ns, file_digest(real))
                known[str(real)] = entry
                changed = True
        except OSError as error:
            raise ModelError(f"weights: {real}: {error.strerror}", path=str(real)) from error
        found.append(entry.digest)
    if changed:
        # The cache only saves time: a home that cannot be written must not stop a daemon.
        with contextlib.suppress(OSError):
            cache_path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cache_path, msgspec.json.encode(known))
    return found


def _read_cache(path: Path) -> dict[str, _Known]:
    try:
        return json_records.decode(path.read_bytes(), dict[str, _Known])
    except (OSError, msgspec.MsgspecError):
        return {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json_records.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name}: {error}", path=str(path)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name}: expected a JSON object, got {type(content).__name__}", path=str(path))
    return content
