"""Builds the config.json of an mlx-lm model directory from GGUF metadata.

Two architectures are known: ``llama`` and ``qwen2``. Whatever the file asks for beyond them (partial rotary,
YaRN, sliding windows, experts, frequency tables) is refused by name, because mlx-lm would run it and answer
wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.core.errors import ModelError

if TYPE_CHECKING:
    from kvferry.engine.gguf_file import GgufFile

CLASS_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

STORED_DTYPE = "bfloat16"

CONTROL_TOKEN = 3
"""Token type of GGUF for a token that steers the model and is no text."""

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")
"""Control tokens that end an answer even where the file names only one of them: a chat model that falls back
to its pre-training habits ends with the document separator, and would otherwise run on."""

UNSUPPORTED_KEYS = (
    "attention.sliding_window",
    "expert_count",
    "attention.logit_softcapping",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)


def end_token_ids(gguf: GgufFile) -> list[int]:
    """Return the ids that end an answer, the file's own end token first."""
    tokens = gguf.texts("tokenizer.ggml.tokens")
    kinds = gguf.integers("tokenizer.ggml.token_type")
    ids = [gguf.token_id("tokenizer.ggml.eos_token_id", len(tokens))]
    if gguf.has("tokenizer.ggml.eot_token_id"):
        ids.append(gguf.token_id("tokenizer.ggml.eot_token_id", len(tokens)))
    control = {token: index for index, token in enumerate(tokens) if kinds[index : index + 1] == [CONTROL_TOKEN]}
    ids.extend(control[token] for token in END_TOKENS if token in control)
    return list(dict.fromkeys(ids))


def _refuse_unsupported(gguf: GgufFile) -> None:
    for suffix in UNSUPPORTED_KEYS:
        key = f"{gguf.architecture}.{suffix}"
        if gguf.has(key):
            raise ModelError(f"the GGUF file sets {key}, which this conversion does not support", key=key)


def _rope_scaling(gguf: GgufFile) -> dict[str, Any] | None:
    prefix = f"{gguf.architecture}.rope.scaling"
    kind = gguf.text(f"{prefix}.type") if gguf.has(f"{prefix}.type") else "none"
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": gguf.decimal(f"{prefix}.factor")}
    raise ModelError(f"RoPE scaling {kind!r} is not supported, only 'none' and 'linear'", scaling=kind)


def _attention(gguf: GgufFile) -> dict[str, int]:
    """Return hidden size, heads and head dimension, once they fit together."""
    prefix = gguf.architecture
    hidden, heads = gguf.count(f"{prefix}.embedding_length"), gguf.count(f"{prefix}.attention.head_count")
    kv_key, dim_key = f"{prefix}.attention.head_count_kv", f"{prefix}.attention.key_length"
    kv_heads = gguf.count(kv_key) if gguf.has(kv_key) else heads
    head_dim = gguf.count(dim_key) if gguf.has(dim_key) else hidden // heads
    if heads % kv_heads or head_dim % 2 or head_dim == 0:
        raise ModelError(f"{heads} query heads, {kv_heads} KV heads and a head dimension of {head_dim} do not fit")
    # mlx-lm has no head_dim for qwen2: it divides.
    if prefix == "qwen2" and head_dim * heads != hidden:
        raise ModelError(f"qwen2 needs {heads} heads of {head_dim} to fill the hidden size {hidden}")
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if gguf.has(key) and gguf.integer(key) != head_dim:
            raise ModelError(
                f"GGUF {key} is {gguf.integer(key)}, but the head dimension is {head_dim}: not supported",
                key=key,
            )
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _rope(gguf: GgufFile) -> dict[str, Any]:
    key = f"{gguf.architecture}.rope.freq_base"
    return {
        # 10000 is what GGUF readers assume when the file does not say.
        "rope_theta": gguf.decimal(key) if gguf.has(key) else 10000.0,
        "rope_traditional": False,
        "rope_scaling": _rope_scaling(gguf),
    }


def _token_ids(gguf: GgufFile, vocabulary: int) -> dict[str, Any]:
    end_ids = end_token_ids(gguf)
    ids: dict[str, Any] = {"eos_token_id": end_ids if len(end_ids) > 1 else end_ids[0]}
    for ours, theirs in (("bos", "bos"), ("pad", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        if gguf.has(key):
            ids[f"{ours}_token_id"] = gguf.token_id(key, vocabulary)
    return ids


def build_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        ModelError: when a needed value is missing or the model uses something that mlx-lm would not honour.
    """
    prefix = gguf.architecture
    if prefix not in CLASS_NAMES:
        raise ModelError(
            f"GGUF architecture {prefix!r} is not supported, only {', '.join(sorted(CLASS_NAMES))}",
            architecture=prefix,
        )
    _refuse_unsupported(gguf)
    layers = gguf.count(f"{prefix}.block_count")
    if layers > len(gguf.tensors):
        raise ModelError(f"the GGUF file speaks of {layers} layers but holds {len(gguf.tensors)} tensors")
    vocabulary = len(gguf.texts("tokenizer.ggml.tokens"))
    return {
        "architectures": [CLASS_NAMES[prefix]],
        "model_type": prefix,
        **_attention(gguf),
        "intermediate_size": gguf.count(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": gguf.decimal(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": gguf.count(f"{prefix}.context_length"),
        **_rope(gguf),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": prefix == "qwen2" or "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": False,
        **_token_ids(gguf, vocabulary),
        "torch_dtype": STORED_DTYPE,
    }
