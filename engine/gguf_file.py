"""Reads a GGUF file: typed metadata and raw tensor rows, with one clear error for whatever is missing or odd.

Source: the GGUF specification, version 3, as implemented by the ``gguf`` package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from kvferry.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as it lies in the file.

    Attributes:
        name: the file's name for it, such as ``blk.0.attn_q.weight``.
        shape: logical shape, rows first: [out, in] for a matrix, [n] for a vector.
        quantisation: the block format of the rows.
        rows: the file's bytes, mapped: [out, bytes per row], or the values themselves for the unquantised
            formats.
    """

    name: str
    shape: tuple[int, ...]
    quantisation: GGMLQuantizationType
    rows: npt.NDArray[Any]

    def values(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return float32 values of some of this tensor's raw rows (blocks never cross rows).

        Raises:
            ModelError: when the block format is unknown, or a value is NaN or infinite.
        """
        try:
            values = dequantize(rows, self.quantisation)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {self.name}: format {self.quantisation.name} is not supported", tensor=self.name
            ) from error
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {self.name} holds NaN or infinite values", tensor=self.name)
        return values.astype(np.float32, copy=False)


class GgufFile:
    """A GGUF file opened for reading; nothing but the header is in memory.

    Raises:
        ModelError: when ``path`` is not a readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
        except (ValueError, KeyError, IndexError, OverflowError) as error:
            raise ModelError(f"{path.name} is not a readable GGUF file: {error}") from error
        self.path = path
        self._fields = reader.fields
        self.tensors = {
            tensor.name: GgufTensor(
                tensor.name,
                tuple(int(size) for size in reversed(tensor.shape.tolist())),
                tensor.tensor_type,
                tensor.data,
            )
            for tensor in reader.tensors
        }
        self.architecture = self.text("general.architecture")

    def _value(self, key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
        field = self._fields.get(key)
        if field is None:
            raise ModelError(f"the GGUF file has no {key}, which is needed ({wanted})", key=key)
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise ModelError(f"GGUF {key} cannot be read: {error}", key=key) from error
        # bool is a subclass of int, and a flag where a number belongs is a damaged file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"GGUF {key}: expected {wanted}, found {type(value).__name__}", key=key)
        return value

    def has(self, key: str) -> bool:
        """Say whether the metadata holds ``key``."""
        return key in self._fields

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
        """Return a float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self._value(key, (float, int), "a number"))))

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
