"""Reading a tokenizer that was written down, maybe on another machine: a closed form, and limits on what it may do.

What encodes is a library of Rust's. It ends the whole process when it cannot have the memory that it wants, so nothing
is given to it whose form is not known, or that would let a text grow beyond measure.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core import json_records
from kvferry.core.errors import ModelError
from kvferry.core.limits import MIB
from kvferry.engine import token_reach

MAX_STEPS_BYTES = MIB
"""Longest normaliser or pre-tokenizer, as JSON: the largest table that is in use takes 0.3 MiB."""
MAX_GROWTH = 64
"""Most characters that the texts of a description make of one. U+FDFA becomes 18 in the tables that are in use."""
MAX_ENTRIES = 2**20
"""Largest vocabulary: four times the largest that is in use."""
MAX_WORD = 1000
"""Longest word that is looked up piece by piece, in time that grows with its square."""
_BYTES_OF_A_CHARACTER = 4


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the vocabulary."""

    id: Annotated[int, Meta(ge=0, lt=2**32)]
    content: str
    special: bool


class _Model(msgspec.Struct, frozen=True):
    """Of a model, what is looked at here; merges are left to the library."""

    type: str
    vocab: dict[str, int] | list[tuple[str, float]]
    byte_fallback: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 0
    dropout: float | None = None


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: msgspec.Raw
    added_tokens: list[AddedToken]
    normalizer: msgspec.Raw
    pre_tokenizer: msgspec.Raw
    post_processor: msgspec.Raw
    decoder: msgspec.Raw
    model: msgspec.Raw


class TokenizerDescription:
    """What ``fingerprint.describe_tokenizer`` wrote.

    Attributes:
        added_tokens: tokens beside the vocabulary.
    """

    def __init__(self, description: bytes) -> None:
        """Read one.

        Raises:
            ModelError: when it is something else.
        """
        with _faults():
            self._state, _ = json_records.decode(description, tuple[_State, list[int]])
            self.added_tokens = self._state.added_tokens
            self._model = json_records.decode(bytes(self._state.model), _Model)
        _check("model.vocab: entries", len(self._model.vocab), MAX_ENTRIES)
        self._steps = {name: _steps(name, getattr(self._state, name)) for name in ("normalizer", "pre_tokenizer")}

    def plain(self) -> str:
        """Return the tokenizer for its library, without added tokens and without what is put around a text."""
        bare = msgspec.structs.replace(self._state, added_tokens=[], post_processor=msgspec.Raw(b"null"))
        return msgspec.json.encode(bare).decode("utf-8")

    def reach(self, never: Container[int]) -> token_reach.TokenReach | None:
        """Return how far the tokens reach; see ``token_reach.measure``.

        Raises:
            ModelError: when the description lacks what the library fills in.
        """
        with _faults():
            return token_reach.measure({**self._steps, "model": msgspec.structs.asdict(self._model)}, never)

    def check(self) -> None:
        """Refuse what would let texts grow, take too long, or encode them another way each time.

        Raises:
            ModelError: naming what it is, and the limit.
        """
        model = self._model
        if model.dropout:
            raise ModelError(f"tokenizer: model.dropout: {model.dropout}: it would encode a text in many ways")
        _check("model.max_input_chars_per_word", model.max_input_chars_per_word, MAX_WORD)
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            _check(f"model.{name}", len(getattr(model, name) or ""), MAX_GROWTH)
        with _faults():
            grown = growth(self._steps["normalizer"])
        _check("normalizer: characters that may become of one", grown, MAX_GROWTH)


def growth(normalizer: Mapping[str, Any] | None) -> int:
    """Return how many characters a normaliser's own texts may make of one. Unicode's forms are not counted."""
    grown = 1
    for step in token_reach.flat(normalizer, "normalizers"):
        kind = step["type"]
        if kind == "Replace":
            replaced = len(step["pattern"].get("String", ""))
            # A pattern, and the empty text, may match on both sides of a character.
            grown *= max(1, -(-len(step["content"]) // replaced)) if replaced else 1 + 2 * len(step["content"])
        elif kind == "Prepend":
            grown *= 1 + len(step["prepend"])
        elif kind == "Precompiled":
            grown *= _longest_entry(base64.b64decode(step["precompiled_charsmap"]))
        elif kind == "ByteLevel":
            grown *= _BYTES_OF_A_CHARACTER
    return grown


def _longest_entry(table: bytes) -> int:
    """Return the characters of the longest text in a table: its index's size, its index, texts that end with NUL."""
    size = int.from_bytes(table[:4], "little")
    return max(1, *(len(entry.decode("utf-8", "replace")) for entry in table[4 + size :].split(b"\0")))


def _steps(name: str, written: msgspec.Raw) -> Any:
    data = bytes(written)
    _check(f"{name}: bytes", len(data), MAX_STEPS_BYTES)
    with _faults():
        return json_records.loads(data)


def _check(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise ModelError(f"tokenizer: {what}: {value}, the limit is {limit}", value=value, limit=limit)


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, msgspec.DecodeError) as error:
        raise ModelError(f"tokenizer: its description is not one: {error!r}") from error
