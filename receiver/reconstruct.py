"""Payload sections to a cache, or to text. Everything here was declared by the manifest and verified by digest."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvferry.core import container, evidence, spans
from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError
from kvferry.core.evidence import References
from kvferry.core.layout import Tensor, layer_sections, tensors
from kvferry.core.manifest import Dtype, Encoding, LayerLayout, Manifest
from kvferry.core.payloads import Sections
from kvferry.core.spans import Span
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.layers import Layer
from kvferry.engine.packed import PackedLayer, PackedTensor
from kvferry.engine.packing import Packed
from kvferry.engine.prompt import evidence_text
from kvferry.engine.ragged import RaggedLayer
from kvferry.engine.tensors import from_bytes


@dataclass(frozen=True)
class Message:
    """What an artifact without a cache gives the receiver's model to read.

    Attributes:
        system: the system prompt.
        text: the material, "" when nothing was sent.
        kind: what the material is: the name of its section, a key of ``engine.prompt.LABELS``.
        spans: which passages of a shortened document are the document's own; empty for the document itself.
    """

    system: str
    text: str
    kind: str = container.TEXT
    spans: tuple[Span, ...] = ()


def message(manifest: Manifest, sections: Sections) -> Message:
    """Return the material of a text or of evidence.

    Raises:
        ContainerError: when it is not what the manifest speaks of, or its places are not in the document.
    """
    if manifest.form == "references":
        raise ContainerError("form: a references artifact holds no material of its own", field="form")
    instructions = system(manifest, sections)
    characters = manifest.document.characters
    if container.EVIDENCE in sections:
        found = evidence.evidence_from_bytes(container.EVIDENCE, sections.read(container.EVIDENCE), characters)
        return Message(instructions, evidence_text(found), container.EVIDENCE)
    kind = next((name for name in (container.TEXT, *container.SHORTENED) if name in sections), None)
    if kind is None:
        return Message(instructions, "")
    text = _decode(kind, bytes(sections.read(kind)))
    if kind == container.TEXT:
        return Message(instructions, text)
    data = sections.read(container.SPANS)
    return Message(instructions, text, kind, spans.from_bytes(container.SPANS, data, len(text), characters))


def system(manifest: Manifest, sections: Sections) -> str:
    """Return the system prompt of an artifact without a cache.

    Raises:
        ContainerError: when it is not UTF-8, or not that of the manifest.
    """
    data = bytes(sections.read(container.SYSTEM))
    if digest(data) != manifest.prompt.system:
        raise ContainerError(
            f"section {container.SYSTEM}: not the system prompt of the manifest", field="prompt.system"
        )
    return _decode(container.SYSTEM, data)


def references(manifest: Manifest, sections: Sections) -> References:
    """Return the references of an artifact.

    Raises:
        ContainerError: when they are not what the manifest speaks of, or not in the document.
    """
    if manifest.form != "references":
        raise ContainerError(f"form: a {manifest.form} artifact holds no references", field="form")
    data = sections.read(container.REFERENCES)
    return evidence.references_from_bytes(container.REFERENCES, data, manifest.document.characters)


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
    """Rebuild a cache: dense or packed, of all rows or of some.

    Raises:
        ContainerError: when ids or positions contradict the manifest.
    """
    if manifest.prefix is None or manifest.layout is None:
        raise ContainerError(f"form: a {manifest.form} artifact holds no cache", field="form")
    prefix_ids(manifest, sections)
    layers = tuple(
        _layer(_Source(index, layout, manifest.encoding, sections)) for index, layout in enumerate(manifest.layout)
    )
    cache = PrefixCache(layers, manifest.layout[0].offset)
    mx.eval(cache.arrays)
    return cache


@dataclass(frozen=True)
class _Source:
    """A layer's sections and what the manifest says of them."""

    index: int
    layout: LayerLayout
    encoding: Encoding
    sections: Sections

    def read(self, name: str, dtype: Dtype, shape: tuple[int, ...]) -> mx.array:
        return from_bytes(self.sections.read(name), dtype, shape)


def _layer(source: _Source) -> Layer:
    layout = source.layout
    expected = {item.name: item for item in layer_sections(source.index, layout, source.encoding)}
    arrays = {name: source.read(*item) for name, item in expected.items()}
    positions = arrays.get(container.positions_name(source.index))
    keys, values = tensors(source.index, layout, source.encoding)
    if layout.head_rows is None:
        if positions is not None:
            # In rows of its own for every head, whether the wire shared them or not.
            positions = mx.contiguous(mx.broadcast_to(positions, (layout.kv_heads, layout.rows)))
            _check_positions(source, positions)
        return _build(_tensor(keys, arrays), _tensor(values, arrays), positions)
    if positions is None:
        raise ContainerError(f"layout[{source.index}].positions: a ragged layer has explicit ones", field="layout")
    heads = []
    start = 0
    for count in layout.head_rows:
        rows = slice(start, start + count)
        one = {name: array[None, rows] for name, array in arrays.items()}
        _check_positions(source, positions[None, rows])
        heads.append(_build(_tensor(keys, one), _tensor(values, one), positions[None, rows]))
        start += count
    return RaggedLayer(tuple(heads))


def _build(
    keys: mx.array | PackedTensor, values: mx.array | PackedTensor, positions: mx.array | None
) -> DenseLayer | PackedLayer:
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        return DenseLayer(keys, values, positions)
    return PackedLayer(_as_packed(keys), _as_packed(values), positions)


def _as_packed(part: mx.array | PackedTensor) -> PackedTensor:
    return PackedTensor(None, part) if isinstance(part, mx.array) else part


def _tensor(tensor: Tensor, arrays: dict[str, mx.array]) -> mx.array | PackedTensor:
    """Return rows [1, Hk, R, D] from arrays [Hk, R, ...], dense or packed."""
    if not tensor.packed or tensor.bits is None or tensor.group is None:
        return arrays[tensor.name][None]
    tail = arrays.get(f"{tensor.name}.tail")
    codes, scales, biases = (arrays[f"{tensor.name}.{part}"][None] for part in ("codes", "scales", "biases"))
    packed = Packed(codes, scales, biases, tensor.bits, tensor.group, tensor.axis)
    none = mx.zeros((1, codes.shape[1], 0, tensor.dim), dtype=scales.dtype)
    return PackedTensor(packed, none if tail is None else tail[None])


def _check_positions(source: _Source, positions: mx.array) -> None:
    limit, name = source.layout.offset, container.positions_name(source.index)
    ascending = mx.all(positions[:, 1:] > positions[:, :-1]).item() if positions.shape[1] > 1 else True
    inside = mx.all((positions >= 0) & (positions < limit)).item()
    if not (ascending and inside):
        raise ContainerError(f"section {name}: positions must ascend within 0..{limit - 1}", field=name)


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContainerError(
            f"section {name}: not UTF-8 at byte {error.start}", field=name, byte=error.start
        ) from error
