"""Does an artifact fit a receiver? Judged from the manifest alone, before a payload byte moves.

Only level L0 (same checkpoint, exact) is accepted for KV artifacts; every other difference is a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvferry.core import limits
from kvferry.core.errors import RefusedError
from kvferry.core.manifest import LayerLayout, Manifest, Model, Rope, Tokenizer

SUPPORTED_CACHE_CLASS = "KVCache"
_SHOWN_REASONS = 3
_CARRIED_REASONS = 12


class ReasonCode(StrEnum):
    """Why an artifact is refused. The names are those of the protocol's enum."""

    VERSION_UNSUPPORTED = "VERSION_UNSUPPORTED"
    UNKNOWN_METHOD = "UNKNOWN_METHOD"
    WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH"
    CONFIG_MISMATCH = "CONFIG_MISMATCH"
    QUANTIZATION_MISMATCH = "QUANTIZATION_MISMATCH"
    ADAPTER_MISMATCH = "ADAPTER_MISMATCH"
    TOKENIZER_MISMATCH = "TOKENIZER_MISMATCH"
    CHAT_TEMPLATE_MISMATCH = "CHAT_TEMPLATE_MISMATCH"
    PROMPT_MISMATCH = "PROMPT_MISMATCH"
    ROPE_MISMATCH = "ROPE_MISMATCH"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    LAYOUT_UNSUPPORTED = "LAYOUT_UNSUPPORTED"
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    ENCODING_UNSUPPORTED = "ENCODING_UNSUPPORTED"
    NO_MAPPER = "NO_MAPPER"
    TOO_LARGE = "TOO_LARGE"


class Reason(msgspec.Struct, frozen=True):
    """One field that does not fit, with the value of either side as text."""

    code: ReasonCode
    field: str
    artifact: str
    receiver: str

    def __str__(self) -> str:
        return f"{self.code} {self.field}: artifact {self.artifact}, receiver {self.receiver}"


class Verdict(msgspec.Struct, frozen=True):
    """Accepted when there is no reason against it."""

    reasons: tuple[Reason, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the artifact may come in."""
        return not self.reasons

    def __str__(self) -> str:
        return "accepted" if self.accepted else "; ".join(str(reason) for reason in self.reasons)


class LayerGeometry(msgspec.Struct, frozen=True):
    """A layer's cache as the receiver's own model makes it."""

    cache_class: str
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str


@dataclass(frozen=True)
class Profile:
    """What a node runs, measured on the loaded model.

    Attributes:
        rope: the proven rotation of each layer.
        layers: the cache of each layer.
        probe_error: largest relative error of the attach-time RoPE probe.
        unsupported: why this model's cache cannot be carried, or empty.
        vocabulary: how many logits the model gives; token ids are below it.
        attention: why packed rows, and heads or layers that keep different numbers, cannot be attended here, or empty.
    """

    model: Model
    tokenizer: Tokenizer
    prompt_version: int
    rope: tuple[Rope, ...]
    layers: tuple[LayerGeometry, ...]
    probe_error: float
    context_length: int
    max_payload_bytes: int
    unsupported: str = ""
    vocabulary: int = 2**32
    attention: str = ""

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes that the dense bf16 cache takes for one token."""
        return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) * 2 for layer in self.layers)


def judge(manifest: Manifest, receiver: Profile) -> Verdict:
    """Return the receiver's verdict with every reason, in the manifest's field order."""
    return Verdict(tuple(_reasons(manifest, receiver)))


def refusal(verdict: Verdict) -> RefusedError:
    """Return the error for a verdict: the first reasons in the message, more of them in the fields."""
    shown = "; ".join(str(reason) for reason in verdict.reasons[:_SHOWN_REASONS])
    more = len(verdict.reasons) - _SHOWN_REASONS
    tail = f"; and {more} more" if more > 0 else "" if shown else "the receiver gives no reason"
    carried = msgspec.json.encode(verdict.reasons[:_CARRIED_REASONS]).decode()
    return RefusedError(f"refused: {shown}{tail}", verdict_json=carried, reasons=len(verdict.reasons))


def refused_for(error: RefusedError) -> list[Reason]:
    """Return the reasons that ``refusal`` put into an error, none where it carries none that can be read."""
    try:
        return msgspec.json.decode(str(error.fields.get("verdict_json", "[]")), type=list[Reason])
    except msgspec.DecodeError:
        return []


def context_reasons(tokens: int, context_length: int, question: int) -> Iterator[Reason]:
    """Yield why a prompt leaves no room in a context; nothing when it does.

    Args:
        tokens: of the prompt up to the end of the material.
        context_length: of the model that reads it.
        question: tokens of the shortest question to come, with the header of its answer.
    """
    # One token of an answer at least.
    room = question + 1
    if tokens + room > context_length:
        context = f"context of {context_length}, {room} of it for question and answer"
        yield Reason(ReasonCode.TOO_LARGE, "prefix.tokens", str(tokens), context)


def _reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    if manifest.form == "kv":
        yield from _model_reasons(manifest, receiver)
        yield from _tokenizer_reasons(manifest, receiver)
    yield from _differs(ReasonCode.PROMPT_MISMATCH, "prompt.version", manifest.prompt.version, receiver.prompt_version)
    if manifest.method.consume == "prefill_once" and receiver.unsupported:
        # Text that is read once is kept as a cache, so it needs one that can be kept.
        yield Reason(ReasonCode.LAYOUT_UNSUPPORTED, "method.consume", "prefill_once", receiver.unsupported)
    if manifest.form == "kv":
        yield from _context_reasons(manifest, receiver)
        yield from _rope_reasons(manifest, receiver)
        yield from _layout_reasons(manifest, receiver)
    if manifest.mapper is not None:
        yield Reason(ReasonCode.NO_MAPPER, "mapper.digest", manifest.mapper.digest.hex(), "no mapper installed")
    if manifest.form == "kv":
        yield from _encoding_reasons(manifest, receiver)
    if manifest.payload.length > receiver.max_payload_bytes:
        yield Reason(
            ReasonCode.TOO_LARGE,
            "payload.length",
            str(manifest.payload.length),
            f"at most {receiver.max_payload_bytes}",
        )
    yield from _probe_reasons(manifest, receiver)


def _differs(code: ReasonCode, name: str, artifact: object, receiver: object) -> Iterator[Reason]:
    if artifact != receiver:
        yield Reason(code, name, _text(artifact), _text(receiver))


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, msgspec.Struct):
        return ", ".join(f"{name}={_text(getattr(value, name))}" for name in value.__struct_fields__)
    return str(value)


def _model_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    theirs, ours = manifest.model, receiver.model
    if theirs is None:
        return
    yield from _differs(ReasonCode.CONFIG_MISMATCH, "model.type", theirs.type, ours.type)
    yield from _differs(ReasonCode.WEIGHTS_MISMATCH, "model.weights", theirs.weights, ours.weights)
    yield from _differs(ReasonCode.CONFIG_MISMATCH, "model.config", theirs.config, ours.config)
    yield from _differs(ReasonCode.QUANTIZATION_MISMATCH, "model.quantization", theirs.quantization, ours.quantization)
    yield from _differs(ReasonCode.ADAPTER_MISMATCH, "model.adapter", theirs.adapter, ours.adapter)


def _tokenizer_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    theirs, ours = manifest.tokenizer, receiver.tokenizer
    if theirs is None:
        return
    yield from _differs(ReasonCode.TOKENIZER_MISMATCH, "tokenizer.vocab", theirs.vocab, ours.vocab)
    yield from _differs(
        ReasonCode.CHAT_TEMPLATE_MISMATCH, "tokenizer.chat_template", theirs.chat_template, ours.chat_template
    )


def _context_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    if manifest.prefix is None:
        return
    # The probe is a question like any other, and the first one that the receiver runs.
    question = len(manifest.parity.suffix) if manifest.parity else 1
    yield from context_reasons(manifest.prefix.tokens, receiver.context_length, question)


def _rope_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    if manifest.positions is None:
        return
    theirs, ours = manifest.positions.rope, receiver.rope
    if len(theirs) != len(ours):
        yield Reason(ReasonCode.ROPE_MISMATCH, "positions.rope", f"{len(theirs)} layers", f"{len(ours)} layers")
    for index, (artifact, local) in enumerate(zip(theirs, ours, strict=False)):
        for name in artifact.__struct_fields__:
            yield from _differs(
                ReasonCode.ROPE_MISMATCH,
                f"positions.rope[{index}].{name}",
                getattr(artifact, name),
                getattr(local, name),
            )


def _layout_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    layout, ours = manifest.layout or (), receiver.layers
    if receiver.unsupported:
        yield Reason(
            ReasonCode.LAYOUT_UNSUPPORTED,
            "layout",
            f"{len(layout)} layers of {_classes(layout)}",
            receiver.unsupported,
        )
    if len(layout) != len(ours):
        yield Reason(ReasonCode.LAYOUT_MISMATCH, "layout", f"{len(layout)} layers", f"{len(ours)} layers")
    for index, (artifact, local) in enumerate(zip(layout, ours, strict=False)):
        yield from _layer_reasons(f"layout[{index}]", artifact, local)
    yield from _row_reasons(manifest)
    if receiver.attention:
        yield from _uneven_reasons(layout, receiver.attention)


def _uneven_reasons(layout: tuple[LayerLayout, ...], why: str) -> Iterator[Reason]:
    """Heads or layers that keep different numbers of rows. A mask of mlx-lm's is made for all layers from the first."""
    for index, layer in enumerate(layout):
        if layer.head_rows is not None:
            yield Reason(ReasonCode.LAYOUT_UNSUPPORTED, f"layout[{index}].head_rows", "ragged heads", why)
            return
        if layer.rows != layout[0].rows:
            value = f"{layer.rows}, and {layout[0].rows} in the first layer"
            yield Reason(ReasonCode.LAYOUT_UNSUPPORTED, f"layout[{index}].rows", value, why)
            return


def _classes(layout: tuple[LayerLayout, ...]) -> str:
    return ", ".join(sorted({layer.cache_class for layer in layout}))


def _layer_reasons(path: str, artifact: LayerLayout, local: LayerGeometry) -> Iterator[Reason]:
    if artifact.cache_class != SUPPORTED_CACHE_CLASS:
        yield Reason(ReasonCode.LAYOUT_UNSUPPORTED, f"{path}.cache_class", artifact.cache_class, SUPPORTED_CACHE_CLASS)
    for name in ("kv_heads", "key_dim", "value_dim"):
        yield from _differs(ReasonCode.LAYOUT_MISMATCH, f"{path}.{name}", getattr(artifact, name), getattr(local, name))
    yield from _differs(ReasonCode.DTYPE_UNSUPPORTED, f"{path}.dtype", artifact.dtype, local.dtype)


def _row_reasons(manifest: Manifest) -> Iterator[Reason]:
    """Rows that are not of this prefix, or a logical length that is neither its own nor that of renumbered rows."""
    tokens = manifest.prefix.tokens if manifest.prefix else 0
    layout = manifest.layout or ()
    # A question continues at one position, in every layer.
    start = layout[0].offset if layout and layout[0].positions == "renumbered" else tokens
    for index, layer in enumerate(layout):
        wanted = tokens if layer.positions != "renumbered" and layer.offset != tokens else start
        yield from _differs(ReasonCode.LAYOUT_MISMATCH, f"layout[{index}].offset", layer.offset, wanted)
        if layer.positions in ("contiguous", "renumbered") and layer.rows != wanted:
            yield from _differs(ReasonCode.LAYOUT_MISMATCH, f"layout[{index}].rows", layer.rows, wanted)
        elif layer.rows > tokens:
            yield Reason(ReasonCode.LAYOUT_MISMATCH, f"layout[{index}].rows", str(layer.rows), f"at most {tokens}")


def _probe_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    if manifest.parity is None:
        return
    for name in ("suffix", "ids"):
        highest = max(getattr(manifest.parity, name), default=0)
        if highest >= receiver.vocabulary:
            yield Reason(
                ReasonCode.TOKENIZER_MISMATCH, f"parity.{name}", str(highest), f"vocabulary of {receiver.vocabulary}"
            )


def _encoding_reasons(manifest: Manifest, receiver: Profile) -> Iterator[Reason]:
    encoding = manifest.encoding
    for part in ("key", "value"):
        bits, group = getattr(encoding, f"{part}_bits"), getattr(encoding, f"{part}_group")
        for name, value, known in (
            (f"encoding.{part}_bits", bits, limits.PACKED_WIDTHS),
            (f"encoding.{part}_group", group, limits.PACKED_GROUPS),
        ):
            if value is not None and value not in known:
                yield Reason(ReasonCode.ENCODING_UNSUPPORTED, name, str(value), _listed(known))
        packed = any(getattr(layer, f"packed_{part}s") for layer in manifest.layout or ())
        if receiver.attention and packed:
            field, value = f"encoding.{part}_bits", f"packed rows of {bits} bits"
            yield Reason(ReasonCode.ENCODING_UNSUPPORTED, field, value, receiver.attention)
    yield from _differs(ReasonCode.ENCODING_UNSUPPORTED, "encoding.entropy", encoding.entropy, None)


def _listed(values: tuple[int, ...]) -> str:
    return "one of " + ", ".join(str(value) for value in values)
