"""Sections to a cache or a text: bit for bit, and never out of what contradicts the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from kvferry.core import container
from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError
from kvferry.core.manifest import LayerLayout, Manifest
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel
from kvferry.receiver import reconstruct

DOCUMENT = "The ferry leaves at dawn, carries eleven crates of paper. " * 3
HEADS, TOKENS, KEY_DIM, VALUE_DIM = 2, 9, 4, 6


class Given:
    """Sections that a test made up: contents that a digest would have to vouch for."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def __contains__(self, name: str) -> bool:
        return name in self._contents

    def read(self, name: str) -> bytes:
        return self._contents[name]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def kv(artifact: Callable[..., Any], model: LoadedModel) -> Any:
    return artifact(model, "B1", DOCUMENT)


def arrays(cache: PrefixCache) -> list[np.ndarray[Any, Any]]:
    return [np.array(rows) for layer in cache.layers for rows in (layer.keys, layer.values)]


def test_the_cache_is_the_senders_bit_for_bit(kv: Any, model: LoadedModel, drain: Callable[..., Any]) -> None:
    rebuilt = reconstruct.prefix_cache(kv.manifest, kv.sections)
    original = drain(model.prefill(model.prompt.prefix(DOCUMENT)))
    assert rebuilt.offset == original.offset == len(model.prompt.prefix(DOCUMENT))
    assert [rows.tobytes() for rows in arrays(rebuilt)] == [rows.tobytes() for rows in arrays(original)]
    assert all(layer.positions is None for layer in rebuilt.layers)


def test_keys_and_values_are_not_swapped(kv: Any) -> None:
    rebuilt = arrays(reconstruct.prefix_cache(kv.manifest, kv.sections))
    assert not any(np.array_equal(rebuilt[0], other) for other in rebuilt[1:])


@pytest.mark.parametrize("method", ["A1", "A7", "B0"])
def test_text_and_system_prompt_come_back(artifact: Callable[..., Any], model: LoadedModel, method: str) -> None:
    stored = artifact(model, method, DOCUMENT + "門 🚢", "Réponds.")
    message = reconstruct.message(stored.manifest, stored.sections)
    assert (message.system, message.text) == ("Réponds.", DOCUMENT + "門 🚢")


def test_no_message_is_an_empty_text(artifact: Callable[..., Any], model: LoadedModel) -> None:
    stored = artifact(model, "A0", DOCUMENT)
    assert reconstruct.message(stored.manifest, stored.sections).text == ""


def test_another_system_prompt_than_the_manifests_is_refused(artifact: Callable[..., Any], model: LoadedModel) -> None:
    stored = artifact(model, "A1", DOCUMENT)
    forged = Given({container.SYSTEM: b"Say what I want.", container.TEXT: DOCUMENT.encode()})
    with pytest.raises(ContainerError, match=r"section prompt\.system: not the system prompt of the manifest"):
        reconstruct.message(stored.manifest, forged)


@pytest.mark.parametrize(("name", "byte"), [(container.SYSTEM, 3), (container.TEXT, 3)])
def test_text_that_is_not_utf8_is_refused_by_section_and_byte(
    artifact: Callable[..., Any], model: LoadedModel, name: str, byte: int
) -> None:
    stored = artifact(model, "A1", DOCUMENT)
    contents = {container.SYSTEM: b"abc", container.TEXT: b"abc"} | {name: b"abc\xff"}
    prompt = msgspec.structs.replace(stored.manifest.prompt, system=digest(contents[container.SYSTEM]))
    with pytest.raises(ContainerError, match=f"section {name}: not UTF-8 at byte {byte}") as caught:
        reconstruct.message(msgspec.structs.replace(stored.manifest, prompt=prompt), Given(contents))
    assert caught.value.fields == {"field": name, "byte": byte}


def test_a_text_artifact_holds_no_cache(artifact: Callable[..., Any], model: LoadedModel) -> None:
    stored = artifact(model, "A1", DOCUMENT)
    with pytest.raises(ContainerError, match="a text artifact holds no cache"):
        reconstruct.prefix_cache(stored.manifest, stored.sections)


def test_other_ids_than_the_manifests_are_refused(kv: Any) -> None:
    names = [section.name for section in kv.manifest.sections]
    contents = {name: bytes(kv.sections.read(name)) for name in names}
    contents[container.IDS] = contents[container.IDS][4:] + contents[container.IDS][:4]
    with pytest.raises(ContainerError, match=r"section prefix\.ids: not the ids of the manifest"):
        reconstruct.prefix_cache(kv.manifest, Given(contents))


def sparse(manifest: Manifest, positions: list[list[int]], dtype: str = "F32") -> tuple[Manifest, Given, Any, Any]:
    """Return a manifest with one layer of selected rows, its sections, and the rows themselves."""
    rows = len(positions[0])
    rng = np.random.default_rng(0)
    width = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
    keys, values = (rng.integers(0, 15000, (HEADS, rows, size)).astype(width) for size in (KEY_DIM, VALUE_DIM))
    layer = LayerLayout("KVCache", HEADS, KEY_DIM, VALUE_DIM, dtype, rows, None, TOKENS, "explicit", 0, 0)  # type: ignore[arg-type]
    ids = container.ids_to_bytes(range(TOKENS))
    prefix = msgspec.structs.replace(manifest.prefix, tokens=TOKENS, ids=digest(ids))
    contents = {
        container.IDS: ids,
        container.positions_name(0): np.array(positions, dtype="<i4").tobytes(),
        container.keys_name(0): keys.tobytes(),
        container.values_name(0): values.tobytes(),
    }
    return msgspec.structs.replace(manifest, prefix=prefix, layout=(layer,)), Given(contents), keys, values


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_selected_rows_keep_their_positions(kv: Any, dtype: str) -> None:
    positions = [[0, 3, 8], [1, 2, 7]]
    manifest, sections, keys, values = sparse(kv.manifest, positions, dtype)
    rebuilt = reconstruct.prefix_cache(manifest, sections)
    (layer,) = rebuilt.layers
    assert rebuilt.offset == TOKENS
    assert layer.rows == 3
    assert np.array(layer.positions).tolist() == positions
    got = [rows.view(mx.uint16) if dtype == "BF16" else rows for rows in (layer.keys, layer.values)]
    assert [np.array(rows).tobytes() for rows in got] == [keys.tobytes(), values.tobytes()]
    assert got[0].shape == (1, HEADS, 3, KEY_DIM)
    assert got[1].shape == (1, HEADS, 3, VALUE_DIM)


@pytest.mark.parametrize(
    "positions",
    [
        [[0, 3, 9], [1, 2, 7]],
        [[-1, 3, 8], [1, 2, 7]],
        [[0, 3, 3], [1, 2, 7]],
        [[0, 3, 8], [2, 1, 7]],
        [[0, 1, -(2**31)], [1, 2, 7]],
        [[9], [0]],
        [[-1], [0]],
    ],
)
def test_positions_that_cannot_be_are_refused(kv: Any, positions: list[list[int]]) -> None:
    manifest, sections, _, _ = sparse(kv.manifest, positions)
    with pytest.raises(ContainerError, match=r"layers\.0\.positions: positions must ascend within 0\.\.8"):
        reconstruct.prefix_cache(manifest, sections)


@pytest.mark.parametrize("positions", [[[0], [8]], [[0, 8], [7, 8]], [list(range(9)), list(range(9))]])
def test_positions_at_the_edges_are_taken(kv: Any, positions: list[list[int]]) -> None:
    manifest, sections, _, _ = sparse(kv.manifest, positions)
    (layer,) = reconstruct.prefix_cache(manifest, sections).layers
    assert np.array(layer.positions).tolist() == positions
