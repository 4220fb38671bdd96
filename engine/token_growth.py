"""How many characters a tokenizer may make of one before it looks for tokens: what a text could need is known then.

A bound by the steps' own descriptions, and not a close one: every step is taken to meet what it makes most of.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Unicode Standard Annex 15, expansion factors; U+0130 in lower case is two; every byte may become a character.
_COMPATIBILITY, _CANONICAL, _LOWER, _BYTES = 18, 4, 2, 4
_AROUND = 3
"""A character and a space on both sides of it."""
_FORMS = {
    "NFD": _CANONICAL,
    "NFC": _CANONICAL,
    "NFKD": _COMPATIBILITY,
    "NFKC": _COMPATIBILITY,
    "Lowercase": _LOWER,
    "BertNormalizer": _CANONICAL * _AROUND,
}
"""Of what is in one of these, none makes more."""


@dataclass(frozen=True)
class TokenGrowth:
    """Most characters that may become of one: of any, and of one of ASCII."""

    any_text: int
    ascii_text: int

    def of(self, text: str) -> int:
        """Return how many characters may become of a text's."""
        in_ascii = len(text) if text.isascii() else len(text.encode("ascii", "ignore"))
        return in_ascii * self.ascii_text + (len(text) - in_ascii) * self.any_text


def measure(steps: Sequence[Mapping[str, Any]]) -> TokenGrowth:
    """Return how many characters steps may make of one.

    Args:
        steps: of normaliser and pre-tokenizer, as the library writes them, none of them a sequence.

    Raises:
        KeyError, TypeError, ValueError: when they are none that the library takes.
    """
    return TokenGrowth(_of_one(steps, is_ascii=False), _of_one(steps, is_ascii=True))


def _of_one(steps: Sequence[Mapping[str, Any]], *, is_ascii: bool) -> int:
    grown, in_forms = 1, 1
    for step in steps:
        kind = step["type"]
        if kind in _FORMS:
            # One after another they make no more than the one that makes most.
            in_forms = max(in_forms, 1 if is_ascii else _FORMS[kind])
            continue
        made, puts_in = _rewritten(step, is_ascii=is_ascii)
        if made > 1 or puts_in:
            grown, in_forms = grown * in_forms * made, 1
            is_ascii = is_ascii and puts_in.isascii()
    return grown * in_forms


def _rewritten(step: Mapping[str, Any], *, is_ascii: bool) -> tuple[int, str]:
    """Return how many characters a step makes of one, and what it puts in."""
    kind = step["type"]
    if kind == "Replace":
        content, replaced = step["content"], len(step["pattern"].get("String", ""))
        # An expression, and the empty text, may match on both sides of a character.
        return (max(1, -(-len(content) // replaced)) if replaced else 1 + 2 * len(content)), content
    if kind == "Prepend":
        return 1 + len(step["prepend"]), step["prepend"]
    if kind == "Metaspace":
        return 2, step["replacement"]
    if kind == "Precompiled":
        texts = _texts(base64.b64decode(step["precompiled_charsmap"]))
        return max(1, *map(len, texts)), "".join(texts)
    if kind == "ByteLevel":
        # As a pre-tokenizer it may put a space in front of every piece.
        return (1 + bool(step.get("add_prefix_space"))) * (1 if is_ascii else _BYTES), "\u0120"
    return 1, ""


def _texts(table: bytes) -> list[str]:
    """Return the texts of a table: its index's size, its index, texts that end with NUL."""
    size = int.from_bytes(table[:4], "little")
    return [text.decode("utf-8", "replace") for text in table[4 + size :].split(b"\0")]
