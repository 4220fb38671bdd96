"""Payload sections to a cache, or to text. Everything here was declared by the manifest and verified by digest."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvferry.core import container
from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError
from kvferry.core.manifest import LayerLayout, Manifest
from kvferry.core.payloads import Sections
from kvferry.engine.cache import PrefixCache, PrefixLayer
from kvferry.engine.tensors import from_bytes


@dataclass(frozen=True)
class Message:
    """The text of a text artifact: the system prompt and the material, "" when nothing was sent."""

    system: str
    text: str


def message(manifest: Manifest, sections: Sections) -> Message:
    """Return a text artifact's text.

    Raises:
        ContainerError: when it is not UTF-8 or not the text that the manifest speaks of.
    """
    system = bytes(sections.read(container.SYSTEM))
    if digest(system) != manifest.prompt.system:
        raise ContainerError(
            f"section {container.SYSTEM}: not the system prompt of the manifest", field="prompt.system"
        )
    return Message(
        _decode(container.SYSTEM, system),
        _decode(container.TEXT, bytes(sections.read(container.TEXT)) if container.TEXT in sections else b""),
    )


def prefix_ids(manifest: Manifest, sections: Sections) -> list[int]:
    """Return the prefix's token ids.

    Raises:
        ContainerError: when they are damaged or not those of the manifest.
    """
    if manifest.prefix is None:
        raise ContainerError(f"form: a {manifest.form} artifact holds no token ids", field="form")
    data = sections.read(container.IDS)
    if digest(data) != manifest.prefix.ids:
        raise ContainerError(f"section {container.IDS}: not the ids of the manifest", field="prefix.ids")
    return container.ids_from_bytes(data)


def prefix_cache(manifest: Manifest, sections: Sections) -> PrefixCache:
    """Rebuild a dense or sparse cache.

    Raises:
        ContainerError: when ids or positions contradict the manifest.
    """
    if manifest.prefix is None or manifest.layout is None:
        raise ContainerError(f"form: a {manifest.form} artifact holds no cache", field="form")
    prefix_ids(manifest, sections)
    layers = tuple(_layer(index, layout, sections) for index, layout in enumerate(manifest.layout))
    mx.eval([(layer.keys, layer.values) for layer in layers])
    return PrefixCache(layers, manifest.prefix.tokens)


def _layer(index: int, layout: LayerLayout, sections: Sections) -> PrefixLayer:
    keys = from_bytes(
        sections.read(container.keys_name(index)), layout.dtype, (1, layout.kv_heads, layout.rows, layout.key_dim)
    )
    values = from_bytes(
        sections.read(container.values_name(index)), layout.dtype, (1, layout.kv_heads, layout.rows, layout.value_dim)
    )
    if layout.positions == "contiguous":
        return PrefixLayer(keys, values)
    name = container.positions_name(index)
    positions = from_bytes(sections.read(name), "I32", (layout.kv_heads, layout.rows))
    ascending = mx.all(positions[:, 1:] > positions[:, :-1]).item() if layout.rows > 1 else True
    inside = mx.all((positions >= 0) & (positions < layout.offset)).item()
    if not (ascending and inside):
        raise ContainerError(f"section {name}: positions must ascend within 0..{layout.offset - 1}", field=name)
    return PrefixLayer(keys, values, positions)


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContainerError(
            f"section {name}: not UTF-8 at byte {error.start}", field=name, byte=error.start
        ) from error
