"""Document and question text to token ids that can never be control tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

from tokenizers import Encoding, Tokenizer

from kvferry.core.digests import digest
from kvferry.core.errors import ModelError
from kvferry.engine import fingerprint
from kvferry.engine.tokenizer_description import TokenizerDescription


class ContentEncoder:
    """Encodes text as text: an added token's string inside it stays ordinary characters.

    The tokenizer is rebuilt without its added tokens, special or not, because the library's own switch still matches
    added tokens that are not marked special. Where the model's vocabulary itself holds such a string as one piece, the
    text is cut inside it.

    Attributes:
        description: what it was built from.
    """

    def __init__(self, description: bytes) -> None:
        """Build from what ``fingerprint.describe_tokenizer`` writes, here or on another machine.

        Raises:
            ModelError: when it is something else, or the library here does not know its kind.
        """
        self.description = description
        written = TokenizerDescription(description)
        self._forbidden = frozenset(
            # Some tokenizers list runs of white space as added tokens; those are text, and carry no structure.
            token.id
            for token in written.added_tokens
            if token.special or token.content.strip()
        )
        with _faults_of_the_library():
            self._plain = Tokenizer.from_str(written.plain())
        self._growth = written.growth
        self._reach = written.reach(self._forbidden)

    @classmethod
    def of(cls, tokenizer: Any) -> ContentEncoder:
        """Build from an mlx-lm tokenizer.

        Raises:
            ModelError: when the tokenizer has no fast back end.
        """
        return cls(fingerprint.describe_tokenizer(tokenizer))

    @cached_property
    def vocab(self) -> bytes:
        """The digest of the description, as manifests name the tokenizer."""
        return digest(self.description)

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids of added tokens: none of them ever appears in encoded content."""
        return self._forbidden

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``.

        Raises:
            ModelError: when a piece of the text can only be encoded as a control token.
        """
        return [token for _, encoding in self._encodings(text) for token in encoding.ids]

    def count(self, text: str) -> int:
        """Return how many ids ``encode`` gives.

        Raises:
            ModelError: as ``encode``.
        """
        return sum(len(encoding) for _, encoding in self._encodings(text))

    def least(self, text: str) -> int:
        """Return a number of ids that ``encode`` gives at least, without encoding: 0 where nothing is proved."""
        return self._reach.least_tokens(text) if self._reach else 0

    def grown(self, text: str) -> int:
        """Return how many characters encoding may make of a text's before it finds tokens: memory is taken for them."""
        return self._growth.of(text)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the code points of ``text`` that every one of its tokens stands for, as half-open ranges.

        Tokens that share a character have the same one in their ranges.

        Raises:
            ModelError: as ``encode``.
        """
        found: list[tuple[int, int]] = []
        for at, encoding in self._encodings(text):
            found += encoding.offsets if at == 0 else [(at + start, at + end) for start, end in encoding.offsets]
        return found

    def _encodings(self, text: str) -> Iterator[tuple[int, Encoding]]:
        """Yield the pieces that the text is encoded in: where each begins, and its encoding."""
        # A list and no recursion: a document may hold any number of such strings.
        # Of nothing there are no tokens, whatever a tokenizer puts in front of a text.
        pending = [(0, text)] if text else []
        while pending:
            at, piece = pending.pop()
            # Of a batch, because the library lets other threads run meanwhile, which it does not for a single text.
            with _faults_of_the_library():
                [encoding] = self._plain.encode_batch([piece], add_special_tokens=False)
            cuts = self._cuts(piece, encoding)
            if cuts:
                parts = reversed(list(pairwise([0, *cuts, len(piece)])))
                pending.extend((at + start, piece[start:end]) for start, end in parts)
            else:
                yield at, encoding

    def _cuts(self, piece: str, encoding: Encoding) -> list[int]:
        # Nearly always, and offsets are what takes time.
        if self._forbidden.isdisjoint(encoding.ids):
            return []
        cuts = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self._forbidden:
                continue
            if end - start <= 1:
                raise ModelError(
                    f"document: {piece[start:end]!r} can only be encoded as a control token of the tokenizer "
                    f"{self.vocab.hex()[:16]}…"
                )
            cuts.append(start + 1)
        return cuts


@contextlib.contextmanager
def _faults_of_the_library() -> Iterator[None]:
    """Turn what the tokenizers library raises into our error: ``Exception`` itself, or a panic of Rust's.

    A description may come from another machine, and a panic is no Exception: nothing else would catch it.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ModelError(f"tokenizer: the library here makes nothing of it: {error}") from error
        raise
