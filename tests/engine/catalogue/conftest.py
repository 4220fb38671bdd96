"""A tiny GGUF file: two layers, byte-level vocabulary, weights kept in the order in which they would be published."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers.pre_tokenizers import ByteLevel

import kvferry.engine  # noqa: F401  (a real BLAS, before the tests here import MLX)

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
THETA, EPS, CONTEXT = 5000.0, 1e-5, 512

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "Ã ©"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> tuple[list[str], list[int]]:
    """Return tokens and token types: control, bytes, merges, one user-defined, one unused."""
    plain = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    return [*CONTROL, *plain, "<tool>", "[PAD9]"], [3] * len(CONTROL) + [1] * len(plain) + [4, 5]


def published_weights(architecture: str, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Return random weights under mlx-lm names, every value exact in bfloat16."""
    rng = np.random.default_rng(seed)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(vocabulary()[0]), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (HIDDEN,)
        for name, count in rows.items():
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (count, HIDDEN)
            if architecture == "qwen2":
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (count,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    # Multiples of 1/64 below 1 need six bits, and bfloat16 has eight.
    return {name: (rng.integers(-63, 64, shape) / 64).astype(np.float32) for name, shape in sorted(shapes.items())}


SHORT_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder rows as a GGUF writer does for llama, element by element: the oracle of the way back."""
    head_dim = rows.shape[0] // heads
    result = np.empty_like(rows)
    for head in range(heads):
        for pair in range(head_dim // 2):
            for half in range(2):
                result[head * head_dim + 2 * pair + half] = rows[head * head_dim + half * (head_dim // 2) + pair]
    return result


def file_tensors(architecture: str, weights: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[Any]]:
    """Rename published weights, and reorder them for llama, as a GGUF writer does."""
    renamed = {}
    for name, value in weights.items():
        if name == "model.embed_tokens.weight":
            renamed["token_embd.weight"] = value
        elif name == "model.norm.weight":
            renamed["output_norm.weight"] = value
        elif name == "lm_head.weight":
            renamed["output.weight"] = value
        else:
            _, _, layer, rest = name.split(".", 3)
            module, _, kind = rest.rpartition(".")
            short = SHORT_NAMES[module]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
            reordered = interleave(value, heads) if heads and architecture == "llama" else value
            renamed[f"blk.{layer}.{short}.{kind}"] = reordered
    return renamed


def eight_bit_blocks(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Encode multiples of 1/64 as Q8_0 without loss: for 32 values a half-precision scale, then signed bytes."""
    codes = (values * 64).astype(np.int8).reshape(-1, 32)
    scales = np.full((codes.shape[0], 1), 1 / 64, dtype="<f2")
    blocks = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return blocks.reshape(values.shape[0], -1)


@dataclass
class TinyGguf:
    """What goes into the file; a test changes a field and writes.

    ``extra`` holds writer calls (method name, arguments); ``drop`` names tensors to leave out.
    """

    architecture: str = "llama"
    pre: str = "smollm"
    weights: dict[str, npt.NDArray[np.float32]] | None = None
    extra: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    extra_tensors: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    quantise: bool = False
    template: str | None = TEMPLATE
    eps: float = EPS

    def write(self, path: Path) -> Path:
        """Write the file and return its path."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_rope_freq_base(THETA)
        self._write_tokenizer(writer)
        for method, arguments in self.extra:
            getattr(writer, method)(*arguments)
        self._write_tensors(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _write_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        tokens, kinds = vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(value=False)
        if self.template is not None:
            writer.add_chat_template(self.template)

    def _write_tensors(self, writer: gguf.GGUFWriter) -> None:
        weights = self.weights if self.weights is not None else published_weights(self.architecture)
        tensors = file_tensors(self.architecture, weights) | self.extra_tensors
        for name, value in tensors.items():
            if name in self.drop:
                continue
            if self.quantise and value.ndim == 2:
                writer.add_tensor(name, eight_bit_blocks(value), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, value)


@pytest.fixture
def tiny() -> type[TinyGguf]:
    """Give the class that writes tiny GGUF files."""
    return TinyGguf


@pytest.fixture
def published() -> Callable[[str], dict[str, npt.NDArray[np.float32]]]:
    """Give the weights that :class:`TinyGguf` writes by default, under mlx-lm names."""
    return published_weights


@pytest.fixture
def interleaved() -> Callable[[npt.NDArray[Any], int], npt.NDArray[Any]]:
    """Give the element-by-element reordering of a GGUF writer."""
    return interleave


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    """Give what config.json must say about the tiny llama file, written by hand."""
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_scaling": None,
        "rope_traditional": False,
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(vocabulary()[0]),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": [2, 0],
        "bos_token_id": 1,
        "pad_token_id": 2,
    }


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """Write a wheel that pip accepts, with ``files`` stored uncompressed."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def make_wheel() -> Callable[..., Path]:
    """Give the function that writes wheels."""
    return write_wheel
