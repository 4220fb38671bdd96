"""Calibrated filters as a file: one safetensors tensor, and what it is bound to. docs/calibration.md specifies it.

The tensor ``q_filters``, fp32 [L, Hk, D], is that of the published filters, minus sign included. The metadata entry
``kvferry.qfilters`` is a checksum, a space, and a JSON object with the fields of ``Record``; the checksum is the digest
of that object's digest and the tensor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import safetensors
from msgspec import Meta
from safetensors.numpy import save

from kvferry.core import json_records
from kvferry.core.digests import digest
from kvferry.core.errors import ContainerError, InvalidRequestError, StoreError, TooLargeError
from kvferry.core.limits import MIB
from kvferry.sender.calibration.binding import Binding, Hex, short

VERSION = 1
TENSOR = "q_filters"
ENTRY = "kvferry.qfilters"
MAX_FILE_BYTES = 64 * MIB

Count = Annotated[int, Meta(ge=0, le=2**53)]
Filters = np.ndarray[Any, np.dtype[np.float32]]
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What filters are and how they were found.

    Attributes:
        version: of this format.
        model: what they are bound to.
        sign: "negative": minus the direction is stored, so a row scores minus its key's product with the filter.
        estimator: the sign rule, or "imported" for filters that were found elsewhere.
        label: "faithful" to the official code, or "adapted".
        sequences, tokens: of the texts that were read.
        rows: queries a head that were looked at.
        seed: that chose them.
        undecided: query heads, over all layers, for which the sign rule had no answer.
        corpus: digest of the token sequences, or of the file that was imported.
    """

    version: Count
    model: Binding
    sign: Literal["negative"]
    estimator: Literal["majority", "sum", "imported"]
    label: Literal["faithful", "adapted"]
    sequences: Count
    tokens: Count
    rows: Count
    seed: Count
    undecided: Count
    corpus: Hex


@dataclass(frozen=True)
class QFilters:
    """Filters fp32 [L, Hk, D] with their record."""

    record: Record
    filters: Filters

    @cached_property
    def digest(self) -> bytes:
        """The checksum: digest of the record's digest and the tensor's."""
        return _checksum(msgspec.json.encode(self.record), self.filters.tobytes())


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def encode(calibration: QFilters) -> bytes:
    """Return the file's bytes.

    Raises:
        ContainerError: when the filters are not what the record says, not finite, or 0.
    """
    _check_shape(calibration.record, calibration.filters.shape, "file")
    _check_numbers(calibration.filters, "file")
    record = msgspec.json.encode(calibration.record)
    checksum = _checksum(record, calibration.filters.tobytes()).hex()
    # One entry, because the library writes several in any order, and equal calibrations shall be equal files.
    return save({TENSOR: np.ascontiguousarray(calibration.filters)}, {ENTRY: f"{checksum} {record.decode()}"})


def read(path: Path) -> QFilters:
    """Read calibrated filters.

    Raises:
        ContainerError: when the file is cut, damaged, of another version, or holds anything else.
        InvalidRequestError: when it holds filters that are bound to no model.
        StoreError: when it cannot be read.
        TooLargeError: when it is larger than any such file.
    """
    return decode(_bytes(path), path.name)


def decode(data: bytes, what: str) -> QFilters:
    """Return what a file's bytes hold; ``what`` names the file in errors. Raises as ``read``."""
    tensor, metadata = _tensor(data, what)
    if ENTRY not in metadata:
        raise InvalidRequestError(
            f"{what}: {TENSOR}, bound to no model; `kvferry calibrate qfilters --model MODEL --bind FILE` binds them",
            field=ENTRY,
        )
    if set(metadata) != {ENTRY}:
        named = ", ".join(sorted(metadata)[:4])
        raise ContainerError(f"{what}: metadata: {named}, expected only {ENTRY}", field="metadata")
    said, _, stated = metadata[ENTRY].partition(" ")
    text = stated.encode("utf-8", "replace")
    version = _parsed(text, _Versioned, what).version
    if version != VERSION:
        raise ContainerError(
            f"{what}: version: {version}, this kvferry reads {VERSION}",
            field="version",
            value=version,
            expected=VERSION,
        )
    record = _parsed(text, Record, what)
    _check_tensor(record, tensor, what)
    actual = _checksum(text, tensor["data"]).hex()
    if actual != said:
        raise ContainerError(
            f"{what}: checksum: {short(actual)}, the file says {short(said[: len(actual)])}",
            field="checksum",
            value=actual,
            expected=said[: len(actual)],
        )
    filters = np.frombuffer(tensor["data"], dtype="<f4").astype(np.float32).reshape(tensor["shape"])
    _check_numbers(filters, what)
    if msgspec.json.encode(record) != text:
        raise ContainerError(f"{what}: record: not in its one form", field="record")
    return QFilters(record, filters)


def read_unbound(path: Path) -> tuple[Filters, bytes]:
    """Read published filters: a tensor ``q_filters`` [L, Hk, D] with the minus sign, F32 or F16.

    Returns:
        The filters, and the digest of the file.

    Raises:
        ContainerError: when the file is cut or holds anything else.
        InvalidRequestError: when it is bound to a model already.
        StoreError, TooLargeError: as ``read``.
    """
    data = _bytes(path)
    tensor, metadata = _tensor(data, path.name)
    if ENTRY in metadata:
        raise InvalidRequestError(f"{path.name}: is bound to a model already", field=ENTRY)
    dtypes = {"F32": "<f4", "F16": "<f2"}
    if tensor["dtype"] not in dtypes or len(tensor["shape"]) != len(("L", "Hk", "D")):
        raise ContainerError(
            f"{path.name}: {TENSOR}: {tensor['dtype']} {tensor['shape']}, expected F32 or F16 [L, Hk, D]", field=TENSOR
        )
    filters = np.frombuffer(tensor["data"], dtype=dtypes[tensor["dtype"]]).reshape(tensor["shape"])
    return filters.astype(np.float32), digest(data)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
    if len(data) > MAX_FILE_BYTES:
        raise TooLargeError(
            f"{path.name}: more than {MAX_FILE_BYTES} bytes, no file of filters is that large",
            field="bytes",
            limit=MAX_FILE_BYTES,
        )
    return data


def _tensor(data: bytes, what: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the one tensor (shape, dtype, data) and the metadata."""
    try:
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ContainerError(f"{what}: no safetensors file, or cut short: {error}", field="file") from error
    if set(tensors) != {TENSOR}:
        named = ", ".join(sorted(tensors)[:4]) or "nothing"
        raise ContainerError(f"{what}: tensors: {named}, expected {TENSOR}", field="tensors")
    return tensors[TENSOR], _metadata(data, what)


def _metadata(data: bytes, what: str) -> dict[str, str]:
    # The library has checked the header, but hands its metadata out only for files on disk.
    try:
        header = json_records.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except ValueError as error:
        raise ContainerError(f"{what}: header: {error}", field="header") from error
    metadata: dict[str, str] = header.get("__metadata__") or {}
    return metadata


def _parsed(text: bytes, kind: type[_Kind], what: str) -> _Kind:
    try:
        return json_records.decode(text, kind)
    except msgspec.MsgspecError as error:
        raise ContainerError(f"{what}: record: {error}", field="record") from error


def _check_tensor(record: Record, tensor: dict[str, Any], what: str) -> None:
    if tensor["dtype"] != "F32":
        raise ContainerError(
            f"{what}: {TENSOR}: dtype {tensor['dtype']}, expected F32",
            field=TENSOR,
            value=tensor["dtype"],
            expected="F32",
        )
    _check_shape(record, tuple(tensor["shape"]), what)


def _check_shape(record: Record, shape: tuple[int, ...], what: str) -> None:
    expected = (record.model.layers, record.model.kv_heads, record.model.head_dim)
    if shape != expected:
        raise ContainerError(
            f"{what}: {TENSOR}: shape {shape}, the record says {expected} (layers, KV heads, head dimension)",
            field=TENSOR,
            value=str(shape),
            expected=str(expected),
        )


def _check_numbers(filters: Filters, what: str) -> None:
    for problem, flags in (
        ("holds a number that is not finite", ~np.isfinite(filters).all(axis=-1)),
        ("is 0", ~filters.any(axis=-1)),
    ):
        for layer, head in np.argwhere(flags):
            raise ContainerError(
                f"{what}: {TENSOR}: the filter of layer {layer}, KV head {head} {problem}",
                field=TENSOR,
                layer=int(layer),
                head=int(head),
            )


def _checksum(record: bytes, tensor: bytes) -> bytes:
    return digest(digest(record) + digest(tensor))
