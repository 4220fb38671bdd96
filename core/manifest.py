"""The manifest: everything that must be known about an artifact before a byte of it is used.

Encoding: MessagePack maps whose keys stand in the order of the fields below, every field present (nil when absent),
integers in their shortest form, floats as float64. Exactly one byte string therefore stands for a manifest, and the
BLAKE3 digest of that string is the artifact's id. ``docs/wire.md`` §2 specifies it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from kvferry.core import limits
from kvferry.core.digests import DIGEST_BYTES, digest
from kvferry.core.errors import ManifestError, TooLargeError

MANIFEST_VERSION = 1
_MAX_VERSION_SHOWN = 64

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Form = Literal["text", "evidence", "references", "kv"]
Consume = Literal["inject", "prefill", "prefill_once", "look_up"]
Dtype = Literal["U8", "I32", "U32", "F16", "BF16", "F32"]
Scalar = int | float | str | bool | None
OUTCOME = "outcome."
"""Begins the names of a method's parameters that say what became of it on the document."""
Item = TypeVar("Item")
# Of whatever else there are more, a limit of its own is checked elsewhere; this one bounds what a reader builds.
Many = Annotated[tuple[Item, ...], Meta(max_length=limits.MAX_SECTIONS)]

DTYPE_BYTES: dict[str, int] = {"U8": 1, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "F32": 4}


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A closed record: an unknown key, a missing key or a wrong type is an error."""


class Quantization(_Group, frozen=True):
    """How the weights are stored: ``bits`` per weight in groups of ``group_size``."""

    bits: Positive
    group_size: Positive
    mode: Name


class Model(_Group, frozen=True):
    """The checkpoint. ``id`` and ``revision`` are for people; the digests decide."""

    id: Annotated[str, Meta(max_length=1024)]
    revision: Annotated[str, Meta(max_length=256)]
    type: Name
    weights: Digest
    config: Digest
    quantization: Quantization | None
    adapter: Digest | None


class Tokenizer(_Group, frozen=True):
    """``vocab`` covers the whole tokenizer (vocabulary, merges, normaliser, added tokens)."""

    vocab: Digest
    chat_template: Digest


class Document(_Group, frozen=True):
    """The user's text: BLAKE3 of its UTF-8 bytes, and its size in bytes and code points."""

    digest: Digest
    bytes: Count
    characters: Count


class Prompt(_Group, frozen=True):
    """Which prompt layout the prefix follows, and the digest of the system prompt's UTF-8 bytes."""

    version: Positive
    system: Digest


class Prefix(_Group, frozen=True):
    """The prefix: its length and the digest of its ids as little-endian uint32."""

    tokens: Positive
    ids: Digest


class Rope(_Group, frozen=True):
    """Rotary embedding of one layer, as proven by the probe.

    ``kind`` "none" is a layer without rotation. ``freqs`` is the digest of explicit per-pair frequencies (fp32, little
    endian); it stands in place of ``base``. ``mscale`` multiplies the rotated dimensions.
    """

    kind: Literal["rope", "none"]
    dims: Count
    traditional: bool
    base: float | None
    scale: float
    freqs: Digest | None
    mscale: float


class Positions(_Group, frozen=True):
    """Rotation per layer, and the largest relative error that the attach-time probe saw."""

    rope: Annotated[tuple[Rope, ...], Meta(min_length=1, max_length=limits.MAX_SECTIONS)]
    probe_error: Annotated[float, Meta(ge=0)]


class LayerLayout(_Group, frozen=True):
    """One layer's cache.

    ``rows`` counts those of the head that keeps most; ``head_rows`` counts every head's where they differ.
    ``positions`` is "contiguous" (rows 0..rows-1, rows = offset = the prefix), "renumbered" (the same, with fewer rows
    than the prefix has tokens), "explicit" (a section with a position a head and row) or "shared" (one a row).
    ``packed_keys`` and ``packed_values`` count the first rows that are packed; the rest is dense.
    """

    cache_class: Name
    kv_heads: Positive
    key_dim: Positive
    value_dim: Positive
    dtype: Literal["F16", "BF16", "F32"]
    rows: Positive
    head_rows: Many[Positive] | None
    offset: Positive
    positions: Literal["contiguous", "renumbered", "explicit", "shared"]
    packed_keys: Count
    packed_values: Count


class Method(_Group, frozen=True):
    """How the artifact was made. ``consume`` is what the receiver does with it.

    "inject": rebuild the cache from the payload; "prefill": read the material for every question; "prefill_once": read
    the text once, then branch; "look_up": have the sender send passages for every question, and read those.
    """

    id: Name
    label: Literal["official", "faithful", "adapted", "inspired", "custom"]
    aware: bool
    consume: Consume
    params: Annotated[dict[str, Scalar], Meta(max_length=limits.MAX_PARAMETERS)]
    seed: Count | None
    calibration: Many[Digest]

    @property
    def outcome(self) -> dict[str, Scalar]:
        """What became of the method on the document."""
        return {name.removeprefix(OUTCOME): value for name, value in self.params.items() if name.startswith(OUTCOME)}


class Mapper(_Group, frozen=True):
    """A linear map between two checkpoints, bound to both."""

    digest: Digest
    source: Digest
    target: Digest
    level: Literal["L0.5", "L2"]


class Encoding(_Group, frozen=True):
    """How K and V are stored. Bits are nil for dense tensors; ``zstd`` is the level where a section is compressed.

    ``key_axis`` says along what the groups of packed keys lie: "token" (the head dimension) or "channel" (the rows).
    """

    key_bits: Positive | None
    value_bits: Positive | None
    key_group: Positive | None
    value_group: Positive | None
    key_axis: Literal["token", "channel"] | None
    entropy: Name | None
    zstd: Annotated[int, Meta(ge=1, le=22)] | None


class Decoded(_Group, frozen=True):
    """What a compressed section decodes to."""

    length: Count
    digest: Digest


class Section(_Group, frozen=True):
    """One tensor of the payload, as stored. A compressed section is U8 and names what it decodes to."""

    name: Name
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_DIMENSIONS)]
    encoding: Literal["raw", "zstd"]
    length: Count
    digest: Digest
    decoded: Decoded | None


class Payload(_Group, frozen=True):
    """The whole payload and its chunks. ``chunks`` is one 32-byte digest a chunk, joined."""

    length: Positive
    digest: Digest
    chunk_size: Annotated[int, Meta(ge=limits.MIN_CHUNK_BYTES, le=limits.MAX_CHUNK_BYTES)]
    chunks: bytes


class Parity(_Group, frozen=True):
    """The sender's highest log-probabilities (nats) after ``suffix`` on the artifact's own cache.

    ``bound`` is the mean KL divergence in nats that the method promises to stay within; 0 promises the same numbers on
    the same back end.
    """

    suffix: Many[TokenId]
    ids: Many[TokenId]
    log_probabilities: Many[float]
    bound: Annotated[float, Meta(ge=0)]


class Runtime(_Group, frozen=True):
    """Versions that made the artifact. A difference is reported, not refused."""

    kvferry: Name
    mlx: Name
    mlx_lm: Name
    device: Name


class Manifest(_Group, frozen=True):
    """The whole identity of an artifact."""

    version: Annotated[int, Meta(ge=1)]
    form: Form
    model: Model | None
    tokenizer: Tokenizer | None
    document: Document
    prompt: Prompt
    prefix: Prefix | None
    positions: Positions | None
    layout: Many[LayerLayout] | None
    method: Method
    mapper: Mapper | None
    encoding: Encoding
    sections: Many[Section]
    payload: Payload
    parity: Parity | None
    runtime: Runtime


class _Versioned(msgspec.Struct):
    """The one key that is read before the rest is trusted to be what this version says."""

    version: msgspec.Raw = msgspec.Raw(b"\xc0")


_CONSUMED: dict[Form, tuple[Consume, ...]] = {
    "text": ("prefill", "prefill_once"),
    "evidence": ("prefill",),
    "references": ("look_up",),
    "kv": ("inject",),
}
_KV_GROUPS = ("model", "tokenizer", "prefix", "positions", "layout", "parity")


def encode(manifest: Manifest) -> bytes:
    """Return the canonical bytes of ``manifest``.

    Raises:
        ManifestError: when a value breaks the schema, is not finite, or the groups do not fit the form.
        TooLargeError: when the bytes exceed the limit.
    """
    try:
        given = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    except TypeError as error:
        raise ManifestError(f"manifest: {error}") from error
    checked = _convert(given)
    _check_groups(checked)
    plain = msgspec.to_builtins(checked, builtin_types=(bytes,))
    plain["method"]["params"] = dict(sorted(plain["method"]["params"].items()))
    try:
        packed: bytes = msgpack.packb(plain, use_bin_type=True)
    except (ValueError, OverflowError) as error:
        raise ManifestError(f"manifest: a text or an integer has no MessagePack form ({error})") from error
    _check_size(packed)
    return packed


def decode(data: bytes) -> Manifest:
    """Parse manifest bytes from a stranger.

    Raises:
        ManifestError: when the bytes are malformed, break the schema or are not the canonical form.
        TooLargeError: when there are more of them than the limit.
    """
    _check_size(data)
    try:
        _check_version(msgspec.msgpack.decode(data, type=_Versioned).version)
        # Straight into the schema: as plain objects, a stranger's two megabytes would take more than a hundred.
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ManifestError(f"manifest: {error}") from error
    _check_numbers(manifest)
    _check_groups(manifest)
    if encode(manifest) != data:
        raise ManifestError("manifest: not in canonical form (key order, number width, or a repeated key)")
    return manifest


def artifact_id(encoded: bytes) -> bytes:
    """Return the id of the artifact whose manifest has these canonical bytes."""
    return digest(encoded)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as JSON values: digests in hexadecimal, the chunks as a list of them."""
    plain = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    chunks = plain["payload"]["chunks"]
    plain["payload"]["chunks"] = [chunks[at : at + DIGEST_BYTES] for at in range(0, len(chunks), DIGEST_BYTES)]
    return {key: _readable(value) for key, value in plain.items()}


def _convert(plain: Any) -> Manifest:
    try:
        manifest = msgspec.convert(plain, Manifest, strict=True, builtin_types=(bytes,))
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise ManifestError(f"manifest: {error}") from error
    _check_numbers(manifest)
    return manifest


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return value


def _check_size(data: bytes) -> None:
    if len(data) > limits.MAX_MANIFEST_BYTES:
        raise TooLargeError(
            f"manifest: {len(data)} bytes, the limit is {limits.MAX_MANIFEST_BYTES}",
            value=len(data),
            limit=limits.MAX_MANIFEST_BYTES,
        )


def _check_version(version: msgspec.Raw) -> None:
    data = bytes(version)
    value = msgspec.msgpack.decode(data) if len(data) <= _MAX_VERSION_SHOWN else f"{len(data)} bytes"
    if value != MANIFEST_VERSION or isinstance(value, bool):
        shown = repr(value)
        raise ManifestError(
            f"version: this kvferry reads manifest version {MANIFEST_VERSION}, the artifact has {shown}",
            field="version",
            value=shown,
            expected=MANIFEST_VERSION,
        )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _check_numbers(manifest: Manifest) -> None:
    for path, value in _leaves(msgspec.to_builtins(manifest, builtin_types=(bytes,)), ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise ManifestError(f"{path}: {value} is not a finite number", field=path, value=str(value))


def _check_groups(manifest: Manifest) -> None:
    needed = manifest.form == "kv"
    for group in _KV_GROUPS:
        present = getattr(manifest, group) is not None
        if present != needed:
            verb = "needs" if needed else "must not have"
            raise ManifestError(
                f"{group}: a {manifest.form} artifact {verb} this group", field=group, form=manifest.form
            )
    if manifest.mapper is not None and not needed:
        raise ManifestError(f"mapper: a {manifest.form} artifact must not have this group", field="mapper")
    if manifest.method.consume not in _CONSUMED[manifest.form]:
        raise ManifestError(
            f"method.consume: {manifest.method.consume!r} does not fit the form {manifest.form!r}",
            field="method.consume",
        )
