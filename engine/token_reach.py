"""How much text one token can stand for at most: what is far too long is then refused before it is encoded.

Only what a tokenizer's own description proves. Encoding takes a text to other characters (normaliser, pre-tokenizer)
and these to tokens (model), and a bound holds where each step loses nothing:

- the normaliser leaves at least one character for every ``shrink`` of them;
- the pre-tokenizer removes none;
- the model gives something of every character to a token, and no token more characters than its entry in the vocabulary
  has.

For any other tokenizer there is no bound. Of a byte-level vocabulary an entry's characters are bytes. Some lack a few,
mostly of control characters, and drop them: these are not counted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COMPOSED_OF = 4
"""Most code points that one composed code point stands for (Unicode Standard Annex 15, expansion factors of NFD)."""
_LOSSLESS_NORMALIZERS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_COMPOSING_NORMALIZERS = ("NFC", "NFKC")
_LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
_REMOVING_PRE_TOKENIZERS = ("Split", "Punctuation")
_Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TokenReach:
    """Most code points that one token stands for.

    Attributes:
        any_text, ascii_text: of any text, and of one that is ASCII throughout.
        dropped: characters that may make no token at all.
    """

    any_text: int
    ascii_text: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a text makes at least."""
        counted = len(text) - sum(map(text.count, self.dropped))
        return -(-counted // (self.ascii_text if text.isascii() else self.any_text))


def measure(state: Mapping[str, Any], never: Container[int]) -> TokenReach | None:
    """Return how far a tokenizer's tokens reach, None where nothing is proved.

    Args:
        state: the tokenizer as its library writes it, without added tokens.
        never: ids that no text is encoded to.
    """
    steps = flat(state["normalizer"], "normalizers")
    before = flat(state["pre_tokenizer"], "pretokenizers")
    shrink, shrink_ascii = _shrink(steps, composes=True), _shrink(steps, composes=_composes_ascii(steps))
    entries = _entries(state["model"])
    dropped = _dropped(state["model"], {entry for entry, _ in entries}, by_bytes=_ends_in_bytes(steps, before))
    longest = max((len(entry) for entry, token in entries if token not in never), default=0)
    if shrink is None or shrink_ascii is None or dropped is None or not longest or not all(map(_keeps_all, before)):
        return None
    # What is normalised may become one of those.
    return None if dropped and steps else TokenReach(shrink * longest, shrink_ascii * longest, dropped)


def flat(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of a sequence, those of sequences within it among them; ``inner`` is its name for them."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [found for part in step[inner] for found in flat(part, inner)]


def _shrink(steps: _Steps, *, composes: bool) -> int | None:
    """Return how many characters normalisation makes one of at most, None where there is no limit."""
    shrink = 1
    for step in steps:
        kind = step["type"]
        if kind in _COMPOSING_NORMALIZERS:
            shrink *= _COMPOSED_OF if composes else 1
        elif kind == "Replace":
            replaced, content = step["pattern"].get("String"), step["content"]
            if not replaced or not content:
                return None
            shrink *= -(-len(replaced) // len(content))
        elif kind not in _LOSSLESS_NORMALIZERS:
            return None
    return shrink


def _composes_ascii(steps: _Steps) -> bool:
    """Whether a composing step may meet more than ASCII in an ASCII text: behind a step that puts something in."""
    changed = False
    for step in steps:
        if changed and step["type"] in _COMPOSING_NORMALIZERS:
            return True
        changed = changed or step["type"] in ("Replace", "Prepend", "ByteLevel")
    return False


def _keeps_all(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    return kind in _LOSSLESS_PRE_TOKENIZERS or (kind in _REMOVING_PRE_TOKENIZERS and step["behavior"] != "Removed")


def _ends_in_bytes(normalizers: _Steps, pre_tokenizers: _Steps) -> bool:
    """Whether the model sees nothing but the characters that stand for bytes."""
    kinds = [step["type"] for step in pre_tokenizers]
    last = bool(normalizers) and normalizers[-1]["type"] == "ByteLevel"
    return ("ByteLevel" in kinds or last) and "Metaspace" not in kinds


def _entries(model: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return a vocabulary's entries and ids, of the kinds of models whose tokens stand for what their entries say."""
    if model["type"] == "BPE" and not model["continuing_subword_prefix"] and not model["end_of_word_suffix"]:
        return list(model["vocab"].items())
    if model["type"] == "Unigram":
        return [(entry, token) for token, (entry, _) in enumerate(model["vocab"])]
    return []


def _dropped(model: Mapping[str, Any], names: Container[str], *, by_bytes: bool) -> str | None:
    """Return the characters that may make no token; None where that, or an unknown token, may befall any text."""
    if model["type"] not in ("BPE", "Unigram"):
        return None
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return ""
    if model["type"] != "BPE" or not by_bytes:
        return None
    written = _byte_characters()

    def known(group: Iterable[int]) -> bool:
        return all(written[byte] in names for byte in group)

    # A character beyond ASCII has one of the bytes that begin one, and one or more of those that follow.
    if not known(range(0x80, 0xC0)) and not known(range(0xC2, 0xF5)):
        return None
    return "".join(chr(byte) for byte in range(0x80) if written[byte] not in names)


def _byte_characters() -> list[str]:
    """Return the characters that byte-level tokenizers write the 256 bytes as."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(code) for code in range(256, 512))
    return [chr(byte) if byte in printed else next(others) for byte in range(256)]
