"""What the metadata of a GGUF file becomes, and what is refused because mlx-lm would not honour it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core.errors import ModelError
from kvferry.engine.gguf_config import build_config
from kvferry.engine.gguf_file import GgufFile
from kvferry.engine.gguf_models import convert_gguf


def config_of(tiny_file: Any, tmp_path: Path) -> dict[str, Any]:
    return build_config(GgufFile(tiny_file.write(tmp_path / "tiny.gguf")))


def test_float32_values_become_the_decimals_they_came_from(tmp_path: Path, tiny: Any) -> None:
    assert config_of(tiny(eps=1e-6), tmp_path)["rms_norm_eps"] == 1e-6


def test_linear_scaling_is_passed_on(tmp_path: Path, tiny: Any) -> None:
    extra = [("add_string", ("llama.rope.scaling.type", "linear")), ("add_float32", ("llama.rope.scaling.factor", 4.0))]
    assert config_of(tiny(extra=extra), tmp_path)["rope_scaling"] == {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([("add_sliding_window", (64,))], "attention.sliding_window"),
        ([("add_expert_count", (8,))], "llama.expert_count"),
        ([("add_string", ("llama.rope.scaling.type", "yarn"))], "RoPE scaling 'yarn' is not supported"),
        ([("add_rope_dimension_count", (4,))], "rope.dimension_count is 4, but the head dimension is 8"),
    ],
)
def test_what_mlx_lm_would_ignore_is_refused_by_name(tmp_path: Path, tiny: Any, extra: list[Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tiny(extra=extra), tmp_path)


def test_another_architecture_is_refused_by_name(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(ModelError, match="architecture 'gemma3' is not supported, only llama, qwen2"):
        config_of(tiny("gemma3"), tmp_path)


def test_a_missing_value_and_a_wrong_type_are_named(tmp_path: Path, tiny: Any) -> None:
    file = GgufFile(tiny(extra=[("add_string", ("llama.odd", "4"))]).write(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelError, match=r"no llama\.vocab_size, which is needed \(a whole number\)"):
        file.integer("llama.vocab_size")
    with pytest.raises(ModelError, match=r"llama\.odd: expected a whole number, found str"):
        file.integer("llama.odd")
    with pytest.raises(ModelError, match=r"add_bos_token: expected a whole number, found bool"):
        file.integer("tokenizer.ggml.add_bos_token")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_or_converted_but_never_half_written(
    folder: Path, tiny: Any, data: st.DataObject
) -> None:
    intact = folder / "intact.gguf"
    if not intact.exists():
        tiny().write(intact)
    content = bytearray(intact.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        # The header is where a flipped byte changes sizes and types.
        content[data.draw(st.integers(0, 4000))] ^= data.draw(st.integers(1, 255))
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(content)
    target = folder / "model"
    try:
        convert_gguf(damaged, target, {})
    except ModelError:
        assert not target.exists()
    else:
        assert (target / "kvferry-model.json").is_file()
        target.rename(folder / f"good-{len(list(folder.iterdir()))}")
    assert not list(folder.glob(".partial-*"))
