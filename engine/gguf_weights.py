"""Turns the tensors of a GGUF file into one model.safetensors with the names and row order of mlx-lm.

Stored type: bfloat16, the type in which these models were published, at half the size of float32. mlx-lm
computes in the type of the weights; float16 would round finer (2**-11 against 2**-9 relative) but overflows
above 65504, which the residual stream of some models reaches. Measured on the SmolLM2 file against exact
float32: norms come back unchanged, the rounding of matrices has 1.6 % of the rms of the file's own 4-bit
rounding, next-token KL divergence is 5e-5.

Rounding is done here, to nearest even, and tensors are written in one order, so that every machine makes the
same bytes and the digest of the weights identifies the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.core.digests import Hasher
from kvferry.core.errors import ModelError
from kvferry.engine.gguf_file import GgufFile, GgufTensor

BLOCK_VALUES = 1 << 22
"""Most values that are dequantised at a time: 16 MiB of float32."""

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the result.

    Attributes:
        name: its name in mlx-lm.
        shape: its shape, the same in the source.
        source: the tensor of the file.
        permuted_heads: number of heads whose rows GGUF interleaved, or None where it left the rows alone.
    """

    name: str
    shape: tuple[int, ...]
    source: GgufTensor
    permuted_heads: int | None


def unpermute_rows(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo GGUF's reordering of the q and k rows of a llama model.

    GGUF rotates neighbours (2i, 2i+1) of a head, mlx-lm rotates the halves (i, i + D/2); a GGUF writer
    therefore interleaves the two halves of each head. Works on raw quantised rows as well, since no block
    crosses a row.

    Args:
        rows: [heads * D, ...], D even.
        heads: number of heads.

    Returns:
        An array of the same shape whose row h*D + t*D/2 + i is row h*D + 2i + t of the input.
    """
    halves = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to bfloat16, ties to even, and return the bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (query, hidden),
        "attn_k.weight": (key, hidden),
        "attn_v.weight": (key, hidden),
        "attn_output.weight": (hidden, query),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if config["attention_bias"]:
        shapes |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if config["model_type"] == "llama":
            shapes["attn_output.bias"] = (hidden,)
    return shapes


def _expected(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int | None]]:
    """Map each tensor name of the file to the mlx-lm name, the shape and the number of permuted heads."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    expected: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocabulary, hidden), None),
        "output_norm.weight": ("model.norm.weight", (hidden,), None),
    }
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = ("lm_head.weight", (vocabulary, hidden), None)
    # Only the llama converter permutes; qwen2 files keep the rows as published.
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for suffix, shape in _layer_shapes(config).items():
            heads = permuted.get(suffix.partition(".")[0]) if config["model_type"] == "llama" else None
            expected[f"blk.{layer}.{suffix}"] = (f"model.layers.{layer}.{LAYER_NAMES[suffix]}", shape, heads)
    return expected


def plan_weights(gguf: GgufFile, config: Mapping[str, Any]) -> list[PlannedTensor]:
    """Match the file's tensors with what ``config`` needs, sorted by their new names.

    Raises:
        ModelError: when a tensor is missing, unknown, or of another shape than the metadata says.
    """
    expected = _expected(config)
    for missing in sorted(expected.keys() - gguf.tensors.keys()):
        raise ModelError(f"the GGUF file lacks the tensor {missing}", tensor=missing)
    for unknown in sorted(gguf.tensors.keys() - expected.keys()):
        raise ModelError(f"the GGUF file holds the tensor {unknown}, which has no place here", tensor=unknown)
    planned = []
    for source_name, (name, shape, heads) in expected.items():
        source = gguf.tensors[source_name]
        if source.shape != shape:
            raise ModelError(
                f"tensor {source_name} has shape {list(source.shape)}, the metadata says {list(shape)}",
                tensor=source_name,
            )
        planned.append(PlannedTensor(name, shape, source, heads))
    return sorted(planned, key=lambda tensor: tensor.name)


def _blocks(tensor: PlannedTensor) -> Iterator[npt.NDArray[np.uint16]]:
    rows = tensor.source.rows
    if tensor.permuted_heads is not None:
        rows = unpermute_rows(rows, tensor.permuted_heads)
    step = max(1, BLOCK_VALUES // int(np.prod(tensor.shape[1:], dtype=np.int64)))
    for start in range(0, rows.shape[0], step):
        yield to_bfloat16_bits(tensor.source.values(rows[start : start + step]))


def _header(planned: list[PlannedTensor]) -> tuple[bytes, int]:
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in planned:
        end = offset + 2 * int(np.prod(tensor.shape, dtype=np.int64))
        entries[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padding keeps the data aligned to 8 bytes, as the safetensors format asks.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


def write_weights(
    planned: list[PlannedTensor], path: Path, progress: Callable[[int, int], None] | None = None
) -> tuple[int, bytes]:
    """Write a safetensors file, a block of rows at a time, and push it to the disk.

    Args:
        planned: the tensors, in the order of the file.
        path: where; must not exist.
        progress: called with tensor bytes written so far and in all.

    Returns:
        The size and the BLAKE3 digest of the file.
    """
    header, total = _header(planned)
    hasher = Hasher()
    written = 0
    with path.open("xb") as out:
        hasher.update(header)
        out.write(header)
        for tensor in planned:
            for block in _blocks(tensor):
                data = block.astype("<u2", copy=False).tobytes()
                hasher.update(data)
                out.write(data)
                written += len(data)
                if progress is not None:
                    progress(written, total)
        out.flush()
        os.fsync(out.fileno())
    if written != total:
        raise ModelError(f"{path.name}: wrote {written} tensor bytes, planned {total}", written=written)
    return len(header) + total, hasher.digest()
