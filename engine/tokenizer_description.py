"""Reading a tokenizer that was written down, maybe on another machine: a closed form, and limits on what it may do.

What encodes is a library of Rust's. It ends the whole process when it cannot have the memory that it wants, so nothing
is given to it whose form is not known, or that would let a text grow beyond measure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core import json_records
from kvferry.core.errors import ModelError
from kvferry.core.limits import MIB
from kvferry.engine import token_growth, token_reach

MAX_STEPS_BYTES = MIB
"""Longest normaliser or pre-tokenizer, as JSON: the largest table that is in use takes 0.3 MiB."""
MAX_STEPS = 32
"""Most steps of both together, each of which goes over the text."""
MAX_PATTERN = 4096
"""Longest text or expression that a step looks for, in characters: compiled, one takes thousands of times its size."""
MAX_ENTRIES = 2**20
"""Largest vocabulary: four times the largest that is in use."""
MAX_ENTRY = 4096
"""Longest entry of one, in characters. The library goes down one by one, on the stack."""
MAX_AFFIX = 64
"""Longest text that is put before or behind pieces of words, in characters."""
MAX_WORD = 1000
"""Longest word that is looked up piece by piece, in time that grows with its square."""
MAX_GROWTH = 2048
"""Most characters that may become of one; ALBERT's steps could make 1,944 of one that there is not."""


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
        growth: how much a text may grow on its way to the vocabulary.
    """

    def __init__(self, description: bytes) -> None:
        """Read one.

        Raises:
            ModelError: when it is something else, or would let texts grow, take too long, or encode them another way
                each time.
        """
        with _faults():
            self._state, _ = json_records.decode(description, tuple[_State, list[int]])
            self.added_tokens = self._state.added_tokens
            self._model = json_records.decode(bytes(self._state.model), _Model)
        self._check_model()
        self._steps = {name: _steps(name, getattr(self._state, name)) for name in ("normalizer", "pre_tokenizer")}
        with _faults():
            steps = token_reach.flat(self._steps["normalizer"], "normalizers")
            steps += token_reach.flat(self._steps["pre_tokenizer"], "pretokenizers")
            _check("normalizer, pre_tokenizer: steps", len(steps), MAX_STEPS)
            patterns = (len(text) for step in steps for text in dict(step.get("pattern") or {}).values())
            _check("normalizer, pre_tokenizer: characters of a pattern", max(patterns, default=0), MAX_PATTERN)
            self.growth = token_growth.measure(steps)
        _check("normalizer, pre_tokenizer: characters that may become of one", self.growth.any_text, MAX_GROWTH)

    def plain(self) -> str:
        """Return the tokenizer for its library, with nothing but what encodes a text."""
        nothing = msgspec.Raw(b"null")
        bare = msgspec.structs.replace(self._state, added_tokens=[], post_processor=nothing, decoder=nothing)
        return msgspec.json.encode(bare).decode("utf-8")

    def reach(self, never: Container[int]) -> token_reach.TokenReach | None:
        """Return how far the tokens reach; see ``token_reach.measure``.

        Raises:
            ModelError: when the description lacks what the library fills in.
        """
        with _faults():
            return token_reach.measure({**self._steps, "model": msgspec.structs.asdict(self._model)}, never)

    def _check_model(self) -> None:
        model = self._model
        if model.dropout:
            raise ModelError(f"tokenizer: model.dropout: {model.dropout}: it would encode a text in many ways")
        entries = model.vocab if isinstance(model.vocab, dict) else [entry for entry, _ in model.vocab]
        _check("model.vocab: entries", len(entries), MAX_ENTRIES)
        _check("model.vocab: characters of an entry", max(map(len, entries), default=0), MAX_ENTRY)
        _check("model.max_input_chars_per_word", model.max_input_chars_per_word, MAX_WORD)
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            _check(f"model.{name}: characters", len(getattr(model, name) or ""), MAX_AFFIX)


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
