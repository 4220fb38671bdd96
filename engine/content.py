"""Document and question text to token ids that can never be control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from kvferry.core.errors import ModelError


class ContentEncoder:
    """Encodes text as text: an added token's string inside it stays ordinary characters.

    The tokenizer is rebuilt without its added tokens, special or not, because the library's own switch still matches
    added tokens that are not marked special. Where the model's vocabulary itself holds such a string as one piece, the
    text is cut inside it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Build from an mlx-lm tokenizer."""
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        self._forbidden = frozenset(int(token["id"]) for token in state["added_tokens"])
        state["added_tokens"] = []
        state["post_processor"] = None
        state["truncation"] = None
        state["padding"] = None
        self._plain = Tokenizer.from_str(json.dumps(state))

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids of added tokens: none of them ever appears in encoded content."""
        return self._forbidden

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``.

        Raises:
            ModelError: when a piece of the text can only be encoded as a control token.
        """
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids = list(encoding.ids)
        if self._forbidden.isdisjoint(ids):
            return ids
        return self._encode_around(text, ids, encoding.offsets)

    def _encode_around(self, text: str, ids: list[int], offsets: Iterable[tuple[int, int]]) -> list[int]:
        start, end = next(
            span for token, span in zip(ids, offsets, strict=True) if token in self._forbidden and span[1] > span[0]
        )
        if end - start == 1:
            raise ModelError(f"document: {text[start:end]!r} can only be encoded as a control token of this model")
        middle = start + 1
        return self.encode(text[:middle]) + self.encode(text[middle:])
