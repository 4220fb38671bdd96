"""Texts to token sequences for calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kvferry.core.container import ids_to_bytes
from kvferry.core.digests import Hasher
from kvferry.core.errors import InvalidRequestError
from kvferry.engine.model import LoadedModel

SHORTEST = 32
"""Tokens below which the rest of a text is not used."""


@dataclass(frozen=True)
class Corpus:
    """Token sequences, each read from position 0."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def digest(self) -> bytes:
        """Digest of every sequence's length and ids."""
        hasher = Hasher()
        for ids in self.sequences:
            hasher.update(len(ids).to_bytes(8, "little") + ids_to_bytes(ids))
        return hasher.digest()


def cut(model: LoadedModel, texts: Sequence[str], tokens: int, count: int, least: int) -> Corpus:
    """Cut texts into sequences.

    First comes the beginning of every text, then what follows it, and so on. Sequences of full length go before shorter
    ones, of which those below ``SHORTEST`` are left out. Each begins as the model's tokenizer begins a text.

    Args:
        model: whose tokenizer is used.
        texts: read as text: what looks like a control token is none.
        tokens: of a full sequence.
        count: most sequences.
        least: tokens that there must be in all.

    Raises:
        ContextOverflowError: when ``tokens`` exceed the context.
        InvalidRequestError: when the texts hold fewer than ``least`` tokens.
    """
    model.check_context(tokens, 0, 1)
    opening = _opening(model.tokenizer)
    windows = [_windows(model.prompt.content.encode(text), opening, tokens) for text in texts]
    found = [window for turn in zip_longest(*windows) for window in turn if window is not None]
    full = [window for window in found if len(window) == tokens]
    shorter = [window for window in found if len(window) < tokens]
    corpus = Corpus(tuple((full + shorter)[:count]))
    if corpus.tokens < least:
        raise InvalidRequestError(
            f"texts: {corpus.tokens} tokens in {len(corpus.sequences)} sequences, at least {least} are needed; "
            "give more or longer texts",
            field="texts",
            value=corpus.tokens,
            minimum=least,
        )
    return corpus


def _windows(ids: Sequence[int], opening: tuple[int, ...], tokens: int) -> Iterator[tuple[int, ...]]:
    step = max(tokens - len(opening), 1)
    for start in range(0, len(ids), step):
        window = (*opening, *ids[start : start + step])
        if len(window) >= min(SHORTEST, tokens):
            yield window


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that the tokenizer itself puts before a text, such as a beginning-of-text token."""
    encoding = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    marks = encoding.special_tokens_mask
    return tuple(encoding.ids[: marks.index(0)]) if 0 in marks else ()
