"""Reads the header of a GGUF file, versions 2 and 3: metadata and the places of the tensors.

The header may come from a download, so every count and length is checked against the bytes that are left before
anything is read or allocated. All numbers are little-endian::

    "GGUF"  u32 version  u64 tensors  u64 pairs
    pair    string key, u32 type, value           string = u64 length, UTF-8 bytes
    array   u32 type, u64 count, values           (no arrays of arrays)
    tensor  string name, u32 dimensions, u64 sizes (fastest first), u32 format, u64 offset
    padding to the alignment, then tensor data

Source: the GGUF specification.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvferry.core.errors import ModelError

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
BOOLEAN, STRING, ARRAY = 7, 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""Type code of a number to its struct letter."""

SMALLEST_PAIR_BYTES = 8 + 4 + 1
SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies.

    Attributes:
        name: its name.
        shape: logical shape, rows first; one or two dimensions.
        quantisation: its block format.
        offset: first byte, from the start of the file.
        size: bytes.
    """

    name: str
    shape: tuple[int, ...]
    quantisation: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data."""

    metadata: dict[str, Value]
    tensors: dict[str, TensorPlace]


class _Cursor:
    """Walks over the bytes and refuses to leave them."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def expect(self, count: int, smallest: int, what: str) -> None:
        """Refuse ``count`` items of at least ``smallest`` bytes when fewer bytes are left."""
        left = len(self.data) - self.position
        if count * smallest > left:
            raise ModelError(
                f"not a readable GGUF file: {count} {what} at byte {self.position}, but {left} bytes are left",
                position=self.position,
            )

    def take(self, size: int, what: str) -> memoryview:
        self.expect(size, 1, what)
        self.position += size
        return self.data[self.position - size : self.position]

    def number(self, letter: str) -> int | float:
        size = struct.calcsize(letter)
        value: int | float = struct.unpack("<" + letter, self.take(size, "bytes of a number"))[0]
        return value

    def whole(self, letter: str) -> int:
        return int(self.number(letter))

    def text(self) -> str:
        raw = self.take(self.whole("Q"), "bytes of text")
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(
                f"not a readable GGUF file: text before byte {self.position} is not UTF-8",
                position=self.position,
            ) from error

    def values(self, kind: int, count: int) -> list[Scalar]:
        """Read ``count`` values of one type that is no array."""
        if kind == STRING:
            self.expect(count, 8, "texts")
            return [self.text() for _ in range(count)]
        if kind == BOOLEAN:
            return [byte != 0 for byte in self.take(count, "flags")]
        if kind in NUMBERS:
            size = struct.calcsize(NUMBERS[kind])
            self.expect(count, size, "numbers")
            return list(struct.unpack(f"<{count}{NUMBERS[kind]}", self.take(count * size, "bytes of numbers")))
        raise ModelError(
            f"not a readable GGUF file: unknown value type {kind} before byte {self.position}",
            position=self.position,
        )


def _metadata(cursor: _Cursor, pairs: int) -> dict[str, Value]:
    cursor.expect(pairs, SMALLEST_PAIR_BYTES, "metadata pairs")
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key, kind = cursor.text(), cursor.whole("I")
        if key in metadata:
            raise ModelError(f"not a readable GGUF file: the key {key!r} comes twice", key=key)
        if kind == ARRAY:
            kind = cursor.whole("I")
            metadata[key] = cursor.values(kind, cursor.whole("Q"))
        else:
            metadata[key] = cursor.values(kind, 1)[0]
    return metadata


def _place(cursor: _Cursor) -> TensorPlace:
    """Read one tensor's entry; its offset still counts from the start of the tensor data."""
    name, dimensions = cursor.text(), cursor.whole("I")
    if dimensions not in (1, 2):
        raise ModelError(f"tensor {name} has {dimensions} dimensions; only 1 and 2 are supported", tensor=name)
    shape = tuple(cursor.whole("Q") for _ in range(dimensions))[::-1]
    code, offset = cursor.whole("I"), cursor.whole("Q")
    try:
        quantisation = GGMLQuantizationType(code)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError) as error:
        raise ModelError(f"tensor {name} has the unknown format {code}", tensor=name, format=code) from error
    if 0 in shape or shape[-1] % block or (dimensions == 1 and block != 1):
        raise ModelError(f"tensor {name}: shape {list(shape)} does not fit {quantisation.name}", tensor=name)
    return TensorPlace(name, shape, quantisation, offset, math.prod(shape) // block * block_bytes)


def _places(cursor: _Cursor, count: int, metadata: dict[str, Value]) -> dict[str, TensorPlace]:
    cursor.expect(count, SMALLEST_TENSOR_BYTES, "tensors")
    relative = [_place(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"GGUF general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    places: dict[str, TensorPlace] = {}
    for tensor in relative:
        if tensor.name in places:
            raise ModelError(f"not a readable GGUF file: tensor {tensor.name} comes twice", tensor=tensor.name)
        end = start + tensor.offset + tensor.size
        if end > len(cursor.data):
            raise ModelError(
                f"not a readable GGUF file: tensor {tensor.name} ends at byte {end} of {len(cursor.data)}",
                tensor=tensor.name,
            )
        places[tensor.name] = TensorPlace(
            tensor.name, tensor.shape, tensor.quantisation, start + tensor.offset, tensor.size
        )
    return places


def read_header(data: memoryview) -> GgufHeader:
    """Read the header of a whole GGUF file.

    Args:
        data: the file's bytes, usually a memory map.

    Raises:
        ModelError: when the bytes are no GGUF file, or speak of more than there is.
    """
    cursor = _Cursor(data)
    if cursor.take(len(MAGIC), "bytes of magic") != MAGIC:
        raise ModelError("not a GGUF file: it does not start with GGUF")
    version = cursor.whole("I")
    if version not in VERSIONS:
        raise ModelError(f"GGUF version {version} is not supported, only 2 and 3", version=version)
    tensors, pairs = cursor.whole("Q"), cursor.whole("Q")
    metadata = _metadata(cursor, pairs)
    return GgufHeader(metadata, _places(cursor, tensors, metadata))
