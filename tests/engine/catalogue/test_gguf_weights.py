"""Row order, rounding and layout of converted weights, against formulas written from the definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import llama, qwen2
from mlx_lm.utils import load_model

from kvferry.core.digests import file_digest
from kvferry.core.errors import ModelError
from kvferry.engine.gguf_config import build_config
from kvferry.engine.gguf_file import GgufFile
from kvferry.engine.gguf_models import convert_gguf
from kvferry.engine.gguf_weights import plan_weights, to_bfloat16_bits, unpermute_rows, write_weights

IDS = [1, 70, 5, 200, 33, 33, 262, 2, 91, 17]
SOURCE = {"name": "tiny"}


def rotate(row: npt.NDArray[np.float64], position: int, pairs: list[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Rotate each pair of dimensions by position * 100 ** (-2i/D), from the definition of RoPE."""
    result = row.copy()
    for index, (first, second) in enumerate(pairs):
        angle = position * 100.0 ** (-2 * index / row.size)
        cos, sin = np.cos(angle), np.sin(angle)
        result[first] = row[first] * cos - row[second] * sin
        result[second] = row[first] * sin + row[second] * cos
    return result


def build(module: Any, config: dict[str, Any], weights: dict[str, Any]) -> Any:
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    return model


def logits(model: Any) -> npt.NDArray[np.float32]:
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([IDS])))


@pytest.mark.parametrize(("heads", "head_dim", "columns"), [(1, 2, 3), (3, 8, 5), (9, 64, 1)])
def test_unpermuting_undoes_the_element_by_element_order(
    interleaved: Any, heads: int, head_dim: int, columns: int
) -> None:
    rows = np.arange(heads * head_dim * columns).reshape(heads * head_dim, columns)
    np.testing.assert_array_equal(unpermute_rows(interleaved(rows, heads), heads), rows)
    vector = rows[:, 0]
    np.testing.assert_array_equal(unpermute_rows(interleaved(vector, heads), heads), vector)


def test_unpermuted_rows_give_the_scores_of_neighbour_rotation() -> None:
    rng = np.random.default_rng(1)
    head_dim = 8
    query, key = rng.normal(size=(2, head_dim))
    neighbours = [(2 * i, 2 * i + 1) for i in range(head_dim // 2)]
    halves = [(i, i + head_dim // 2) for i in range(head_dim // 2)]
    expected = rotate(query, 7, neighbours) @ rotate(key, 3, neighbours)
    moved_query, moved_key = unpermute_rows(query, 1), unpermute_rows(key, 1)
    assert rotate(moved_query, 7, halves) @ rotate(moved_key, 3, halves) == pytest.approx(expected, abs=1e-12)
    assert rotate(query, 7, halves) @ rotate(key, 3, halves) != pytest.approx(expected, abs=1e-3)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_rounding_is_that_of_mlx(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    expected = np.array(mx.array(array).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(to_bfloat16_bits(array), expected)


def test_ties_round_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808001], dtype=np.uint32).view(np.float32)
    assert to_bfloat16_bits(ties).tolist() == [0x3F80, 0x3F82, 0xBF81]


def test_llama_gives_the_logits_of_the_published_weights(
    tmp_path: Path, tiny: Any, published: Any, tiny_config: dict[str, Any]
) -> None:
    convert_gguf(tiny().write(tmp_path / "tiny.gguf"), tmp_path / "model", SOURCE)
    converted, config = load_model(tmp_path / "model")
    assert {key: config[key] for key in tiny_config} == tiny_config
    reference = build(llama, tiny_config, published("llama"))
    np.testing.assert_allclose(logits(converted), logits(reference), atol=1e-5, rtol=0)


def test_llama_gives_the_logits_of_the_file_order_under_neighbour_rotation(
    tmp_path: Path, tiny: Any, published: Any, interleaved: Any, tiny_config: dict[str, Any]
) -> None:
    convert_gguf(tiny().write(tmp_path / "tiny.gguf"), tmp_path / "model", SOURCE)
    heads = {"q_proj": 4, "k_proj": 2}
    as_in_file = {
        name: interleaved(value, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else value
        for name, value in published("llama").items()
    }
    reference = build(llama, tiny_config | {"rope_traditional": True}, as_in_file)
    np.testing.assert_allclose(logits(load_model(tmp_path / "model")[0]), logits(reference), atol=1e-4, rtol=0)


def test_qwen2_keeps_rows_and_carries_biases(
    tmp_path: Path, tiny: Any, published: Any, tiny_config: dict[str, Any]
) -> None:
    convert_gguf(tiny("qwen2", "qwen2").write(tmp_path / "tiny.gguf"), tmp_path / "model", SOURCE)
    converted, config = load_model(tmp_path / "model")
    assert config["model_type"] == "qwen2"
    reference = build(qwen2, tiny_config | {"model_type": "qwen2"}, published("qwen2"))
    np.testing.assert_allclose(logits(converted), logits(reference), atol=1e-5, rtol=0)


def test_an_untied_head_is_used(tmp_path: Path, tiny: Any, published: Any, tiny_config: dict[str, Any]) -> None:
    weights = published("llama")
    weights["lm_head.weight"] = np.ascontiguousarray(weights["model.embed_tokens.weight"][::-1])
    convert_gguf(tiny(weights=weights).write(tmp_path / "tiny.gguf"), tmp_path / "model", SOURCE)
    converted, config = load_model(tmp_path / "model")
    assert config["tie_word_embeddings"] is False
    reference = build(llama, tiny_config | {"tie_word_embeddings": False}, weights)
    np.testing.assert_allclose(logits(converted), logits(reference), atol=1e-5, rtol=0)


def test_quantised_rows_come_out_as_the_values_they_encode(tmp_path: Path, tiny: Any, published: Any) -> None:
    source = tiny(quantise=True).write(tmp_path / "tiny.gguf")
    assert GgufFile(source).tensors["blk.0.attn_q.weight"].quantisation.name == "Q8_0"
    convert_gguf(source, tmp_path / "model", SOURCE)
    found = mx.load(str(tmp_path / "model" / "model.safetensors"))
    assert found.keys() == published("llama").keys()
    for name, values in published("llama").items():
        assert mx.array_equal(found[name].astype(mx.float32), mx.array(values)), name


def test_the_file_is_canonical_and_the_record_names_its_digest(tmp_path: Path, tiny: Any) -> None:
    source = tiny().write(tmp_path / "tiny.gguf")
    for name in ("one", "two"):
        convert_gguf(source, tmp_path / name, SOURCE)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    length = int.from_bytes(one[:8], "little")
    header = json.loads(one[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "mlx"}
    assert list(header) == sorted(header)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    offsets = [entry["data_offsets"] for entry in header.values()]
    assert [begin for begin, _ in offsets] == [0, *(end for _, end in offsets[:-1])]
    assert (length % 8, 8 + length + offsets[-1][1]) == (0, len(one))
    record = json.loads((tmp_path / "one" / "kvferry-model.json").read_text())
    for name, entry in record["files"].items():
        path = tmp_path / "one" / name
        assert (entry["bytes"], entry["blake3"]) == (path.stat().st_size, file_digest(path).hex())
    assert record["name"] == "tiny"


def test_progress_ends_at_the_whole(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine.gguf_weights.BLOCK_VALUES", 64)
    file = GgufFile(tiny().write(tmp_path / "tiny.gguf"))
    seen: list[tuple[int, int]] = []
    planned = plan_weights(file, build_config(file))
    size, digest = write_weights(planned, tmp_path / "small.safetensors", lambda *step: seen.append(step))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 2 * sum(int(np.prod(tensor.shape)) for tensor in planned)
    monkeypatch.undo()
    assert write_weights(planned, tmp_path / "large.safetensors") == (size, digest)


def shorter_embedding(tiny: Any, published: Callable[[str], dict[str, Any]]) -> Any:
    weights = published("llama")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:-1]
    return tiny(weights=weights)


def not_finite(tiny: Any, published: Callable[[str], dict[str, Any]]) -> Any:
    weights = published("llama")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = np.inf
    return tiny(weights=weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiny, _: tiny(drop=("blk.1.attn_k.weight",)), r"lacks the tensor blk\.1\.attn_k\.weight"),
        (
            lambda tiny, _: tiny(extra_tensors={"rope_freqs.weight": np.ones(4, np.float32)}),
            r"holds the tensor rope_freqs\.weight",
        ),
        (shorter_embedding, r"token_embd\.weight has shape \[269, 32\], the metadata says \[270, 32\]"),
        (not_finite, r"blk\.0\.ffn_up\.weight holds NaN or infinite"),
    ],
)
def test_wrong_tensors_are_refused_and_leave_nothing(
    tmp_path: Path, tiny: Any, published: Any, change: Any, message: str
) -> None:
    source = change(tiny, published).write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=message):
        convert_gguf(source, tmp_path / "model", SOURCE)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
