"""Material to payload sections and layout."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from kvferry.core import container
from kvferry.core.container import Content, raw_section, zstd_section
from kvferry.core.errors import ModelError
from kvferry.core.manifest import LayerLayout
from kvferry.engine.cache import PrefixCache, PrefixLayer
from kvferry.engine.tensors import dtype_name, to_bytes
from kvferry.sender.method import TextMaterial


def text_contents(material: TextMaterial, system: str) -> Iterator[Content]:
    """Yield the sections of a text artifact: the system prompt, then the text if there is any."""
    yield _text_section(container.SYSTEM, system, None)
    if material.text is not None:
        yield _text_section(container.TEXT, material.text, material.zstd)


def kv_contents(cache: PrefixCache, ids: list[int]) -> Iterator[Content]:
    """Yield the sections of a KV artifact: the ids, then layer by layer positions, keys and values.

    Raises:
        ModelError: when a key or value is not finite.
    """
    yield raw_section(container.IDS, "U32", (len(ids),), container.ids_to_bytes(ids))
    for index, layer in enumerate(cache.layers):
        if layer.positions is not None:
            yield _tensor(container.positions_name(index), layer.positions)
        for name, rows in ((container.keys_name(index), layer.keys), (container.values_name(index), layer.values)):
            if not mx.all(mx.isfinite(rows)).item():
                raise ModelError(f"{name}: holds numbers that are not finite; the cache is not sent", field=name)
            yield _tensor(name, rows[0])


def kv_layout(cache: PrefixCache) -> tuple[LayerLayout, ...]:
    """Return the manifest's description of a dense cache."""
    return tuple(_layer_layout(layer, cache.offset) for layer in cache.layers)


def _layer_layout(layer: PrefixLayer, offset: int) -> LayerLayout:
    return LayerLayout(
        cache_class="KVCache",
        kv_heads=layer.keys.shape[1],
        key_dim=layer.keys.shape[3],
        value_dim=layer.values.shape[3],
        dtype=dtype_name(layer.keys),  # type: ignore[arg-type]  # the schema refuses integer dtypes
        rows=layer.rows,
        offset=offset,
        positions="contiguous" if layer.positions is None else "explicit",
    )


def _tensor(name: str, array: mx.array) -> Content:
    return raw_section(name, dtype_name(array), tuple(array.shape), to_bytes(array))


def _text_section(name: str, text: str, level: int | None) -> Content:
    data = text.encode("utf-8")
    return raw_section(name, "U8", (len(data),), data) if level is None else zstd_section(name, data, level)
