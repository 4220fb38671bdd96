"""Refusal before a payload byte: one field differs, the verdict names it with both values, and nothing was carried."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors import numpy as safetensors

from kvferry.core import container, errors
from kvferry.core import manifest as manifests
from kvferry.core.container import Content
from kvferry.core.manifest import Manifest, Quantization
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import common_pb2
from kvferry.receiver.service import ReceiverServicer

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? "
SLIDING = {"sliding_window": 32, "sliding_window_pattern": 2}
OTHER = b"\x5a" * 32


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls of Put that reach a receiver in this process."""
    calls: list[str] = []
    put = ReceiverServicer.Put

    async def counted(self: ReceiverServicer, request_iterator: Any, context: Any) -> Any:
        calls.append("Put")
        async for response in put(self, request_iterator, context):
            yield response

    monkeypatch.setattr(ReceiverServicer, "Put", counted)
    return calls


def nothing_stored(root: Path) -> bool:
    return not [path for name in ("artifacts", "partial", "aside") for path in (root / name).iterdir()]


def one_value(path: Path) -> None:
    weights = safetensors.load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += np.float32(1e-3)
    safetensors.save_file(weights, path / "model.safetensors", {"format": "mlx"})


def swapped_layers(path: Path) -> None:
    weights = safetensors.load_file(path / "model.safetensors")
    pairs = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    renamed = {pairs.get(name[:15], name[:15]) + name[15:]: value for name, value in weights.items()}
    safetensors.save_file(renamed, path / "model.safetensors", {"format": "mlx"})


def other_merges(path: Path) -> None:
    state = json.loads((path / "tokenizer.json").read_text())
    merges = state["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    (path / "tokenizer.json").write_text(json.dumps(state))


def other_template(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("<|im_end|>", "<|im_end|> ", 1)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


CHANGED_FILES = {
    "one changed value": (one_value, {"model.weights": "WEIGHTS_MISMATCH"}),
    "layers in another order": (swapped_layers, {"model.weights": "WEIGHTS_MISMATCH"}),
    "tokenizer": (other_merges, {"tokenizer.vocab": "TOKENIZER_MISMATCH"}),
    "chat template": (other_template, {"tokenizer.chat_template": "CHAT_TEMPLATE_MISMATCH"}),
}
OTHER_MODELS: dict[str, tuple[dict[str, Any], dict[str, str], tuple[str, str, str]]] = {
    "rope theta": (
        {"config": {"rope_theta": 20000.0}},
        {"model.config": "CONFIG_MISMATCH", "positions.rope[1].base": "ROPE_MISMATCH"},
        ("positions.rope[0].base", "10000.0", "20000.0"),
    ),
    "layer count": (
        {"layers": 3},
        {"model.weights": "WEIGHTS_MISMATCH", "layout": "LAYOUT_MISMATCH", "positions.rope": "ROPE_MISMATCH"},
        ("layout", "2 layers", "3 layers"),
    ),
    "kv heads": (
        {"kv_heads": 4},
        {"layout[0].kv_heads": "LAYOUT_MISMATCH", "layout[1].kv_heads": "LAYOUT_MISMATCH"},
        ("layout[1].kv_heads", "2", "4"),
    ),
    "head dimension": (
        {"heads": 2, "head_dim": 32},
        {"layout[0].key_dim": "LAYOUT_MISMATCH", "layout[1].value_dim": "LAYOUT_MISMATCH"},
        ("layout[0].key_dim", "16", "32"),
    ),
    "architecture": (
        {"model_type": "qwen3"},
        {"model.type": "CONFIG_MISMATCH", "model.weights": "WEIGHTS_MISMATCH"},
        ("model.type", "llama", "qwen3"),
    ),
    "dtype of the weights": ({"dtype": "bfloat16"}, {"model.weights": "WEIGHTS_MISMATCH"}, ("", "", "")),
    "sliding windows": (
        {"model_type": "gemma3_text", "config": SLIDING},
        {"layout": "LAYOUT_UNSUPPORTED"},
        ("layout", "2 layers of KVCache", "RotatingKVCache"),
    ),
}


def reasons_of(error: errors.RefusedError) -> list[dict[str, str]]:
    reasons: list[dict[str, str]] = json.loads(str(error.fields["verdict_json"]))
    assert all(reason["artifact"] != reason["receiver"] for reason in reasons)
    return reasons


@pytest.fixture
def refused(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path], tmp_path: Path, puts: Any
) -> Callable[[Path], list[dict[str, str]]]:
    """Return a function: send to a receiver with another model, and return the reasons of its refusal."""

    def send(model: Path) -> list[dict[str, str]]:
        sender, receiver = here("sender", tiny_model_dir()), here("receiver", model)
        driver = peers(sender.address, receiver.address)
        with pytest.raises(errors.RefusedError) as caught:
            driver.send(DOCUMENT, "B1")
        assert puts == []
        assert nothing_stored(tmp_path / "receiver")
        assert driver.listed() == set()
        assert driver.healthy(receiver.address)
        assert "refused: " in caught.value.message
        return reasons_of(caught.value)

    return send


@pytest.mark.parametrize("case", CHANGED_FILES)
def test_a_checkpoint_that_differs_in_one_thing(
    refused: Callable[[Path], Any], tiny_model_dir: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    change, expected = CHANGED_FILES[case]
    shutil.copytree(tiny_model_dir(), tmp_path / "model")
    change(tmp_path / "model")
    reasons = refused(tmp_path / "model")
    assert {reason["field"]: reason["code"] for reason in reasons} == expected
    for reason in reasons:
        # Both digests in full, so that an operator can find out which file is whose.
        assert len(bytes.fromhex(reason["artifact"])) == len(bytes.fromhex(reason["receiver"])) == 32


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_another_model(refused: Callable[[Path], Any], tiny_model_dir: Callable[..., Path], case: str) -> None:
    options, expected, (field, artifact, receiver) = OTHER_MODELS[case]
    reasons = refused(tiny_model_dir(**options))
    codes = {reason["field"]: reason["code"] for reason in reasons}
    assert codes.items() >= expected.items()
    if field:
        values = [(reason["artifact"], reason["receiver"]) for reason in reasons if reason["field"] == field]
        assert any(artifact in one and receiver in other for one, other in values)


def test_the_same_checkpoint_in_another_folder_is_accepted(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir(), tmp_path / "renamed")
    driver = peers(here("sender", tiny_model_dir()).address, here("receiver", tmp_path / "renamed").address)
    assert driver.send(DOCUMENT, "B1").artifact_id in driver.listed()


@pytest.mark.parametrize("method", ["A0", "A1", "A7"])
def test_text_goes_to_any_model(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path], method: str
) -> None:
    sliding = tiny_model_dir("gemma3_text", config=SLIDING)
    driver = peers(here("sender", tiny_model_dir()).address, here("receiver", sliding).address)
    assert driver.ask(driver.send(DOCUMENT, method).artifact_id, "What?", 2).ids


def test_a_text_that_must_be_kept_as_a_cache_does_not(
    refused: Callable[[Path], Any],
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    puts: list[str],
) -> None:
    sliding = tiny_model_dir("gemma3_text", config=SLIDING)
    driver = peers(here("sender", tiny_model_dir()).address, here("receiver", sliding).address)
    with pytest.raises(errors.RefusedError) as caught:
        driver.send(DOCUMENT, "B0")
    (reason,) = reasons_of(caught.value)
    assert (reason["code"], reason["field"]) == ("LAYOUT_UNSUPPORTED", "method.consume")
    assert "RotatingKVCache" in reason["receiver"]
    assert puts == []


def change(struct: Any, **values: Any) -> Any:
    return msgspec.structs.replace(struct, **values)


def at(items: tuple[Any, ...], index: int, **values: Any) -> tuple[Any, ...]:
    return tuple(change(item, **values) if number == index else item for number, item in enumerate(items))


FORGERIES: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "model.type": (lambda m: change(m, model=change(m.model, type="qwen2")), "CONFIG_MISMATCH"),
    "model.weights": (lambda m: change(m, model=change(m.model, weights=OTHER)), "WEIGHTS_MISMATCH"),
    "model.config": (lambda m: change(m, model=change(m.model, config=OTHER)), "CONFIG_MISMATCH"),
    "model.quantization": (
        lambda m: change(m, model=change(m.model, quantization=Quantization(4, 64, "affine"))),
        "QUANTIZATION_MISMATCH",
    ),
    "model.adapter": (lambda m: change(m, model=change(m.model, adapter=OTHER)), "ADAPTER_MISMATCH"),
    "tokenizer.vocab": (lambda m: change(m, tokenizer=change(m.tokenizer, vocab=OTHER)), "TOKENIZER_MISMATCH"),
    "tokenizer.chat_template": (
        lambda m: change(m, tokenizer=change(m.tokenizer, chat_template=OTHER)),
        "CHAT_TEMPLATE_MISMATCH",
    ),
    "prompt.version": (lambda m: change(m, prompt=change(m.prompt, version=99)), "PROMPT_MISMATCH"),
    "positions.rope": (
        lambda m: change(m, positions=change(m.positions, rope=m.positions.rope[:1])),  # type: ignore[union-attr]
        "ROPE_MISMATCH",
    ),
    **{
        f"positions.rope[1].{name}": (
            lambda m, name=name, value=value: change(  # type: ignore[misc]
                m, positions=change(m.positions, rope=at(m.positions.rope, 1, **{name: value}))
            ),
            "ROPE_MISMATCH",
        )
        for name, value in {
            "kind": "none",
            "dims": 8,
            "traditional": True,
            "base": 10000.5,
            "scale": 2.0,
            "freqs": OTHER,
            "mscale": 1.5,
        }.items()
    },
    "layout[1].cache_class": (
        lambda m: change(m, layout=at(m.layout, 1, cache_class="MambaCache")),  # type: ignore[arg-type]
        "LAYOUT_UNSUPPORTED",
    ),
    "layout[0].offset": (
        lambda m: change(m, layout=at(m.layout, 0, offset=m.prefix.tokens + 1)),  # type: ignore[arg-type, union-attr]
        "LAYOUT_MISMATCH",
    ),
    "encoding.key_bits": (
        lambda m: change(m, encoding=change(m.encoding, key_bits=7, key_group=32, key_axis="channel")),
        "ENCODING_UNSUPPORTED",
    ),
    "encoding.entropy": (lambda m: change(m, encoding=change(m.encoding, entropy="range")), "ENCODING_UNSUPPORTED"),
    "mapper.digest": (
        lambda m: change(m, mapper=manifests.Mapper(OTHER, OTHER, m.model.weights, "L2")),  # type: ignore[union-attr]
        "NO_MAPPER",
    ),
}


@pytest.fixture
def stored(artifact: Callable[..., Stored], tiny_model: Callable[..., LoadedModel]) -> Stored:
    return artifact(tiny_model(), "B1", DOCUMENT)


def verdict_of(driver: Any, encoded: bytes) -> dict[str, tuple[str, str, str]]:
    response = driver.offer(encoded)
    assert not response.verdict.accepted
    assert list(response.missing) == []
    assert not response.committed
    return {
        reason.field: (
            common_pb2.ReasonCode.Name(reason.code).removeprefix("REASON_CODE_"),
            reason.artifact_value,
            reason.receiver_value,
        )
        for reason in response.verdict.reasons
    }


def test_each_field_alone_is_enough(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    stored: Stored,
) -> None:
    receiver = here("receiver", tiny_model_dir())
    driver = peers(receiver=receiver.address)
    for field, (forge, code) in FORGERIES.items():
        forged = manifests.encode(forge(stored.manifest))
        verdict = verdict_of(driver, forged)
        assert list(verdict) == [field]
        assert verdict[field][0] == code
        assert verdict[field][1] != verdict[field][2]
        with pytest.raises(errors.NotFoundError, match="not offered here"):
            driver.commit(manifests.artifact_id(forged))
    assert nothing_stored(tmp_path / "receiver")
    # What was refused all those times is accepted as soon as it is itself.
    assert driver.offer(stored.encoded).verdict.accepted


def in_dtype(stored: Stored, dtype: Any, name: str) -> bytes:
    """Return the manifest of the same cache in another dtype, with sizes and digests to match."""
    contents = []
    for section in stored.manifest.sections:
        data = bytes(stored.sections.read(section.name))
        if section.name == container.IDS:
            contents.append(Content(section.name, section.dtype, section.shape, data))
            continue
        rows = mx.array(np.frombuffer(data, dtype="<f4").reshape(section.shape)).astype(dtype)
        words = np.array(rows.view(mx.uint16)).tobytes()
        contents.append(container.raw_section(section.name, name, section.shape, words))  # type: ignore[arg-type]
    sections, payload = container.write_payload(contents, lambda _: None, 1024)
    layout = tuple(change(layer, dtype=name) for layer in stored.manifest.layout or ())
    return manifests.encode(change(stored.manifest, layout=layout, sections=sections, payload=payload))


@pytest.mark.parametrize(("dtype", "name"), [(mx.float16, "F16"), (mx.bfloat16, "BF16")], ids=["F16", "BF16"])
def test_a_cache_in_another_dtype(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    stored: Stored,
    dtype: Any,
    name: str,
) -> None:
    own = (stored.manifest.layout or ())[0].dtype
    if own == name:
        pytest.skip(f"the models compute in {name} here")
    driver = peers(receiver=here("receiver", tiny_model_dir()).address)
    verdict = verdict_of(driver, in_dtype(stored, dtype, name))
    assert verdict == {f"layout[{index}].dtype": ("DTYPE_UNSUPPORTED", name, own) for index in range(2)}


def test_a_layer_that_is_missing_or_twice_there_does_not_hold_together(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path], stored: Stored
) -> None:
    driver = peers(receiver=here("receiver", tiny_model_dir()).address)
    layout = stored.manifest.layout or ()
    for forged in (layout[:1], layout * 2):
        with pytest.raises(errors.ManifestError, match=r"^sections\[\d+\]: .* but the layout asks for"):
            driver.offer(manifests.encode(change(stored.manifest, layout=forged)))


@pytest.mark.parametrize(("form", "consume"), [("evidence", "prefill"), ("references", "look_up")])
def test_a_form_whose_sections_are_those_of_another(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    artifact: Callable[..., Stored],
    tiny_model: Callable[..., LoadedModel],
    form: str,
    consume: str,
) -> None:
    driver = peers(receiver=here("receiver", tiny_model_dir()).address)
    text = artifact(tiny_model(), "A1", DOCUMENT).manifest
    forged = change(text, form=form, method=change(text.method, consume=consume))
    with pytest.raises(errors.ManifestError, match=rf"^sections: prompt.system, document.text, but {form} is one of"):
        driver.offer(manifests.encode(forged))


def test_a_payload_over_the_receivers_limit(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    stored: Stored,
) -> None:
    limit = stored.manifest.payload.length - 1
    driver = peers(receiver=here("receiver", tiny_model_dir(), max_payload_bytes=limit).address)
    expected = ("TOO_LARGE", str(limit + 1), f"at most {limit}")
    assert verdict_of(driver, stored.encoded) == {"payload.length": expected}
    assert nothing_stored(tmp_path / "receiver")


def test_a_prefix_that_fills_the_receivers_context(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path], stored: Stored
) -> None:
    tokens = stored.manifest.prefix.tokens if stored.manifest.prefix else 0
    driver = peers(receiver=here("receiver", tiny_model_dir(context=tokens)).address)
    verdict = verdict_of(driver, stored.encoded)
    room = len(stored.manifest.parity.suffix) + 1 if stored.manifest.parity else 2
    told = f"context of {tokens}, {room} of it for question and answer"
    assert verdict["prefix.tokens"] == ("TOO_LARGE", str(tokens), told)
