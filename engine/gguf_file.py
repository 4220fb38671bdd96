"""A GGUF file as a converter wants it: typed metadata and tensor rows, one clear error for what is missing or odd."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize

from kvferry.core.errors import ModelError
from kvferry.engine.gguf_header import read_header


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as it lies in the file.

    Attributes:
        name: the file's name for it, such as ``blk.0.attn_q.weight``.
        shape: logical shape, rows first: [out, in] for a matrix, [n] for a vector.
        quantisation: the block format of the rows.
        rows: the file's bytes, mapped: [out, bytes a row], or [n, bytes a value].
    """

    name: str
    shape: tuple[int, ...]
    quantisation: GGMLQuantizationType
    rows: npt.NDArray[np.uint8]

    def values(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return float32 values of some of this tensor's rows (blocks never cross rows).

        Raises:
            ModelError: when the block format is unknown, or a value is NaN or infinite.
        """
        try:
            values = dequantize(np.ascontiguousarray(rows), self.quantisation)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {self.name}: format {self.quantisation.name} is not supported", tensor=self.name
            ) from error
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {self.name} holds NaN or infinite values", tensor=self.name)
        return values.astype(np.float32, copy=False).reshape(rows.shape[0], *self.shape[1:])


class GgufFile:
    """A GGUF file opened for reading; tensors stay on the disk until their rows are asked for.

    Raises:
        ModelError: when ``path`` is not a readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        if path.stat().st_size == 0:
            raise ModelError(f"{path.name} is empty", path=str(path))
        data = np.memmap(path, dtype=np.uint8, mode="r")
        header = read_header(data.data)
        self.path = path
        self._metadata = header.metadata
        self.tensors = {
            place.name: GgufTensor(
                place.name,
                place.shape,
                place.quantisation,
                data[place.offset : place.offset + place.size].reshape(place.shape[0], -1),
            )
            for place in header.tensors.values()
        }
        self.architecture = self.text("general.architecture")

    def _value(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        if key not in self._metadata:
            raise ModelError(f"the GGUF file has no {key}, which is needed ({wanted})", key=key)
        value = self._metadata[key]
        # bool is a subclass of int, and a flag where a number belongs is a damaged file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"GGUF {key}: expected {wanted}, found {type(value).__name__}", key=key)
        return value

    def has(self, key: str) -> bool:
        """Say whether the metadata holds ``key``."""
        return key in self._metadata

    def text(self, key: str) -> str:
        """Return a string. Raises ModelError when it is missing or another type, like all getters here."""
        return str(self._value(key, str, "a string"))

    def integer(self, key: str) -> int:
        """Return a whole number."""
        return int(self._value(key, int, "a whole number"))

    def count(self, key: str) -> int:
        """Return a whole number above zero."""
        value = self.integer(key)
        if value < 1:
            raise ModelError(f"GGUF {key}: expected a number above zero, found {value}", key=key, value=value)
        return value

    def token_id(self, key: str, vocabulary: int) -> int:
        """Return a whole number that is the id of one of ``vocabulary`` tokens."""
        value = self.integer(key)
        if not 0 <= value < vocabulary:
            raise ModelError(f"GGUF {key} is {value}, but there are {vocabulary} tokens", key=key, value=value)
        return value

    def decimal(self, key: str) -> float:
        """Return a positive float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
        # A double beyond float32 becomes infinity here, and is refused below.
        with np.errstate(over="ignore"):
            value = float(str(np.float32(self._value(key, (float, int), "a number"))))
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"GGUF {key}: expected a number above zero, found {value}", key=key, value=value)
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        return bool(self._value(key, bool, "a flag"))

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        return self._items(key, str, "a list of strings")

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers."""
        return self._items(key, int, "a list of whole numbers")

    def _items(self, key: str, kind: type, wanted: str) -> list[Any]:
        values: list[Any] = self._value(key, list, wanted)
        for value in values:
            if not isinstance(value, kind):
                raise ModelError(f"GGUF {key}: expected {wanted}, found {type(value).__name__} in it", key=key)
        return values
