"""Material to payload sections and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import mlx.core as mx

from kvferry.core import container, evidence, spans
from kvferry.core.container import Content, raw_section, zstd_section
from kvferry.core.errors import ModelError
from kvferry.core.evidence import Evidence
from kvferry.core.manifest import LayerLayout
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.layers import Layer
from kvferry.engine.packed import PackedLayer, PackedTensor
from kvferry.engine.ragged import RaggedLayer
from kvferry.engine.tensors import dtype_name, to_bytes
from kvferry.sender.method import EvidenceMaterial, TextMaterial


def text_contents(material: TextMaterial, system: str) -> Iterator[Content]:
    """Yield the sections of a text artifact: the system prompt, then the text if there is any, and its spans."""
    yield _text_section(container.SYSTEM, system, None)
    if material.text is not None:
        yield _text_section(material.kind, material.text, material.zstd)
        if material.kind in container.SHORTENED:
            shape = (len(material.spans), spans.WIDTH)
            yield raw_section(container.SPANS, "U32", shape, spans.to_bytes(material.spans))


def evidence_contents(material: EvidenceMaterial, system: str) -> Iterator[Content]:
    """Yield the sections of an artifact of evidence or of references: the system prompt, then the message.

    Raises:
        ContainerError: when a text or a list of the message is over its limit.
    """
    yield _text_section(container.SYSTEM, system, None)
    name = container.EVIDENCE if isinstance(material.message, Evidence) else container.REFERENCES
    data = evidence.to_bytes(material.message)
    yield raw_section(name, "U8", (len(data),), data)


def kv_contents(cache: PrefixCache, layout: tuple[LayerLayout, ...], ids: list[int]) -> Iterator[Content]:
    """Yield the sections of a KV artifact: the ids, then layer by layer positions, keys and values.

    Raises:
        ModelError: when a key or value is not finite.
    """
    yield raw_section(container.IDS, "U32", (len(ids),), container.ids_to_bytes(ids))
    for index, (layer, described) in enumerate(zip(cache.layers, layout, strict=True)):
        if described.positions in ("explicit", "shared"):
            yield _positions(container.positions_name(index), layer, described)
        heads = _heads(layer)
        for name, parts in (
            (container.keys_name(index), [head.keys for head in heads]),
            (container.values_name(index), [head.values for head in heads]),
        ):
            for suffix, array in _parts(parts):
                yield _tensor(name + suffix, array)


def kv_layout(cache: PrefixCache, tokens: int) -> tuple[LayerLayout, ...]:
    """Return the manifest's description of a cache of a prefix of ``tokens`` tokens."""
    return tuple(_layer_layout(layer, cache.offset, tokens) for layer in cache.layers)


def _layer_layout(layer: Layer, offset: int, tokens: int) -> LayerLayout:
    head = _heads(layer)[0]
    packed = (head.keys.packed_rows, head.values.packed_rows) if isinstance(head, PackedLayer) else (0, 0)
    if isinstance(layer, RaggedLayer):
        # Ragged rows are packed all or not at all, so every head says the same.
        packed = (layer.rows if packed[0] else 0, layer.rows if packed[1] else 0)
    keys, values = (part.tail if isinstance(part, PackedTensor) else part for part in (head.keys, head.values))
    return LayerLayout(
        cache_class="KVCache",
        kv_heads=layer.kv_heads,
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        dtype=dtype_name(keys),  # type: ignore[arg-type]  # the schema refuses integer dtypes
        rows=layer.rows,
        head_rows=layer.row_counts if isinstance(layer, RaggedLayer) else None,
        offset=offset,
        positions=_positions_kind(layer, offset, tokens),
        packed_keys=packed[0],
        packed_values=packed[1],
    )


def _heads(layer: Layer) -> tuple[DenseLayer | PackedLayer, ...]:
    """Return what is stored together: the heads of a ragged layer, or all of a layer as one."""
    if isinstance(layer, RaggedLayer):
        return layer.heads
    if isinstance(layer, DenseLayer | PackedLayer):
        return (layer,)
    raise ModelError(f"layer: {type(layer).__name__} cannot be stored")


def _positions_kind(
    layer: Layer, offset: int, tokens: int
) -> Literal["contiguous", "renumbered", "explicit", "shared"]:
    if layer.positions is None:
        return "contiguous" if offset == tokens else "renumbered"
    if isinstance(layer, RaggedLayer) or not mx.all(layer.positions == layer.positions[:1]).item():
        return "explicit"
    return "shared"


def _positions(name: str, layer: Layer, described: LayerLayout) -> Content:
    held = layer.positions
    if held is None:
        raise ModelError(f"{name}: the layer has none")
    if described.positions == "shared" or described.head_rows is not None:
        held = held[0]
    return _tensor(name, held)


def _parts(heads: Sequence[mx.array | PackedTensor]) -> Iterator[tuple[str, mx.array]]:
    """Yield what a layer's keys or values are stored as; heads of a ragged layer stand one after another."""
    first = heads[0]
    if isinstance(first, mx.array) or first.packed is None:
        yield "", _joined([head if isinstance(head, mx.array) else head.tail for head in heads])
        return
    packed = [head.packed for head in heads if isinstance(head, PackedTensor) and head.packed is not None]
    for suffix, place in ((".codes", 0), (".scales", 1), (".biases", 2)):
        yield suffix, _joined([head.arrays[place] for head in packed])
    if first.tail.shape[2]:
        yield ".tail", first.tail[0]


def _joined(heads: list[mx.array]) -> mx.array:
    """Return [Hk, R, D] of one array [1, Hk, R, D], or [S, D] of one array [1, 1, R, D] a head."""
    return heads[0][0] if len(heads) == 1 else mx.concatenate([head[0, 0] for head in heads], axis=0)


def _tensor(name: str, array: mx.array) -> Content:
    if array.dtype not in (mx.int32, mx.uint32) and not mx.all(mx.isfinite(array)).item():
        raise ModelError(f"{name}: holds numbers that are not finite; the cache is not sent", field=name)
    return raw_section(name, dtype_name(array), tuple(array.shape), to_bytes(array))


def _text_section(name: str, text: str, level: int | None) -> Content:
    data = text.encode("utf-8")
    return raw_section(name, "U8", (len(data),), data) if level is None else zstd_section(name, data, level)
