"""A text measured in the tokens that it takes in the receiver's prompt, and where those tokens let it be cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.core import graphemes
from kvferry.core.shares import share
from kvferry.engine.content import ContentEncoder
from kvferry.sender.text.assembly import Piece

Budget = (
    Annotated[int, Meta(ge=1, description="tokens from 1")]
    | Annotated[float, Meta(gt=0.0, le=1.0, description="a fraction above 0 up to 1")]
)


class BudgetParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``budget``: most tokens of the material in the receiver's prompt, or as many as a fraction of the document's."""

    budget: Budget = 0.25


def budget_tokens(given: float, document: int) -> int:
    """Return a budget in tokens, at least 1; ``document`` counts the document's."""
    return max(1, share(given, document)) if isinstance(given, float) else given


class CountedText:
    """A text and its tokens, as the prompt encodes it: on its own, with control strings as text."""

    def __init__(self, counter: ContentEncoder, text: str) -> None:
        self.text = text
        ranges = np.array(counter.offsets(text), dtype=np.int64).reshape(-1, 2)
        # A tokenizer that rewrites its input may give ranges that step back.
        self._starts = np.maximum.accumulate(ranges[:, 0])
        self._ends = np.maximum.accumulate(ranges[:, 1])

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._starts)

    def head(self, tokens: int) -> int:
        """Return where to end so that about the first ``tokens`` tokens are kept, between characters."""
        if tokens >= self.tokens:
            return len(self.text)
        if tokens < 1:
            return 0
        # Of a character that the next token continues, nothing is kept.
        end = min(int(self._ends[tokens - 1]), int(self._starts[tokens]))
        return graphemes.floor(self.text, end)

    def tail(self, tokens: int) -> int:
        """Return where to start so that about the last ``tokens`` tokens are kept, between characters."""
        if tokens >= self.tokens:
            return 0
        if tokens < 1:
            return len(self.text)
        first = self.tokens - tokens
        start = max(int(self._starts[first]), int(self._ends[first - 1]))
        return graphemes.ceil(self.text, start)

    def costs(self, pieces: Sequence[Piece]) -> list[int]:
        """Return how many tokens begin in each of the pieces, which follow one another through the whole text."""
        edges = np.searchsorted(self._starts, [piece.start for piece in pieces]).tolist()
        return [end - start for start, end in itertools.pairwise([*edges, self.tokens])]


def within(counter: ContentEncoder, text: str, budget: int) -> str:
    """Return the longest beginning of a text that is cut between characters and takes at most ``budget`` tokens.

    It is the longest up to what shorter text gains by being encoded anew.
    """
    allowed = budget
    while True:
        counted = CountedText(counter, text)
        if counted.tokens <= budget:
            return text
        text = text[: counted.head(allowed)]
        allowed -= 1
