"""Answers that follow a grammar: the tokens that would leave it are masked out, and what must follow is not asked for.

llguidance says which tokens those are; everything else is here. The bit mask is made on the CPU and applied as one
array operation, not by the library's own kernels, so every back end gives the same answer.

Control tokens are never part of an answer: neither the special ones, nor those that are only added to the vocabulary.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.core.errors import ModelError
from kvferry.engine.content import ContentEncoder

# Every token by which the text can go on is left. Without this, where only one text can follow, it is only the token by
# which the library would spell that text, and it might take a control token's string in it for the token.
_HEADER = '%llguidance {"no_forcing": true}'
# The library's own limits stop it at long documents to quote from.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=10**10,
    step_lexer_fuel=10**8,
    step_max_items=10**6,
    max_items_in_row=10**5,
    max_lexer_states=10**6,
    max_grammar_size=10**9,
    verbose_errors=False,
)


@dataclass(frozen=True)
class Grammar:
    """A grammar in Lark's syntax as llguidance reads it."""

    source: str


class Constraint(Protocol):
    """What keeps one answer to something, token by token."""

    @property
    def finished(self) -> bool:
        """Whether the answer is whole and nothing can follow."""

    def mask(self, logits: mx.array) -> mx.array:
        """Return logits [V], minus infinity for every token that must not come next."""

    def accept(self, token: int) -> None:
        """Go on after a token."""

    def accept_forced(self, most: int) -> list[int]:
        """Go on by tokens that nobody needs to be asked for, and return them: at most ``most``."""


class GrammarConstraint:
    """Keeps one answer within a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: tuple[int, ...], encoder: ContentEncoder) -> None:
        """Begin an answer; ``GrammarCompiler`` does."""
        self._matcher = matcher
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._ends = np.array(ends, dtype=np.int64)
        self._ended = False

    @property
    def finished(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def mask(self, logits: mx.array) -> mx.array:
        """Return logits [V] of the same dtype, minus infinity for every token that would leave the grammar.

        The tokens that end a turn are left exactly where the answer may end. V may exceed the tokenizer's vocabulary.

        Raises:
            ModelError: when no token is left, as for a character that the tokenizer cannot spell.
        """
        allowed = np.zeros(max(logits.shape[-1], self._vocabulary), dtype=np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed[: self._vocabulary] = np.unpackbits(bits, count=self._vocabulary, bitorder="little")
        allowed[self._ends] = self._matcher.is_accepting()
        allowed = allowed[: logits.shape[-1]]
        if self._matcher.is_error() or not allowed.any():
            raise ModelError(f"grammar: no token of this model continues the answer ({self._matcher.stop_reason()})")
        return mx.where(mx.array(allowed), logits, mx.array(-mx.inf, dtype=logits.dtype))

    def accept(self, token: int) -> None:
        """Go on after a token.

        Raises:
            ModelError: when the grammar does not allow it; the constraint cannot be used any more.
        """
        if token in self._ends and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise ModelError(f"grammar: token {token} leaves it")

    def accept_forced(self, most: int) -> list[int]:
        """Go on by what only one text can follow, as the tokenizer spells it, and return the ids: at most ``most``.

        The last token of that text is left to the model, which may spell it together with what comes then.
        """
        forced = b"" if self._ended else self._matcher.compute_ff_bytes()
        try:
            # Half a character at the end is held back.
            text = codecs.getincrementaldecoder("utf-8")().decode(forced)
            ids = self._encoder.encode(text)[:-1][:most]
        except (UnicodeDecodeError, ModelError):
            # The text before ends within a character, and the next token is no text by itself; or some of it can only
            # be spelt as a control token, and the model must go around that step by step.
            return []
        if self._matcher.validate_tokens(ids) < len(ids):
            # A tokenizer that normalises, or puts a space before every text, spells another one.
            return []
        for token in ids:
            self.accept(token)
        return ids


class Chain:
    """Keeps one answer to grammars one after the other, each made when the text before it is known."""

    def __init__(self, compiler: GrammarCompiler, grammars: Generator[Grammar, str, None]) -> None:
        """Begin an answer.

        Args:
            compiler: of the model that answers.
            grammars: yields each grammar, at least one, and is sent the whole text so far. All but the last must end
                where nothing can follow; nothing follows the last.

        Raises:
            ModelError: when a grammar is wrong, here and later.
        """
        self._compiler = compiler
        self._grammars = grammars
        self._ids: list[int] = []
        self._current = compiler.compile(next(grammars))
        self._ended = False

    @property
    def finished(self) -> bool:
        """Whether the last grammar's text is whole."""
        return self._ended

    def mask(self, logits: mx.array) -> mx.array:
        """Return the logits under the grammar of now; see ``GrammarConstraint.mask``."""
        return self._current.mask(logits)

    def accept(self, token: int) -> None:
        """Go on after a token, to the next grammar where it ends one.

        Raises:
            ModelError: when the grammar does not allow it.
        """
        self._current.accept(token)
        self._ids.append(token)
        if self._current.finished:
            try:
                self._current = self._compiler.compile(self._grammars.send(self._compiler.spell(self._ids)))
            except StopIteration:
                self._ended = True

    def accept_forced(self, most: int) -> list[int]:
        """Go on by what only one text can follow; see ``GrammarConstraint.accept_forced``."""
        ids = [] if self._ended else self._current.accept_forced(most)
        self._ids += ids
        return ids


class GrammarCompiler:
    """Makes constraints for one model. Building it reads the whole vocabulary, which takes a second or two."""

    def __init__(self, tokenizer: Any, content: ContentEncoder) -> None:
        """Build from an mlx-lm tokenizer and what encodes content with it.

        Raises:
            ModelError: when the library does not know its kind.
        """
        self._encoder = content
        backend = tokenizer.backend_tokenizer
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            # The library takes for text what is not special.
            token["special"] = token["id"] in self._encoder.forbidden
        state["truncation"] = state["padding"] = None
        # A configuration may name ends that the tokenizer lacks.
        self._ends = tuple(sorted(end for end in tokenizer.eos_token_ids if backend.id_to_token(end) is not None))
        try:
            # Without these slices of the vocabulary a mask within a string takes twenty times as long.
            self._tokens = LLTokenizer(json.dumps(state), eos_token=list(self._ends), slices=LLTokenizer.json_slices())
        except ValueError as error:
            raise ModelError(f"tokenizer: no grammar can be applied to it: {error}") from error

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, half a character at its end left out."""
        return codecs.getincrementaldecoder("utf-8")().decode(self._tokens.decode_bytes(list(ids)))

    def compile(self, grammar: Grammar) -> GrammarConstraint:
        """Return a constraint for one answer.

        Raises:
            ModelError: when the grammar is wrong.
        """
        matcher = LLMatcher(self._tokens, f"{_HEADER}\n{grammar.source}", log_level=0, limits=_LIMITS)
        if matcher.is_error():
            # What follows on other lines is the grammar, which may hold a document.
            raise ModelError(f"grammar: {matcher.get_error().partition(chr(10))[0]}")
        return GrammarConstraint(matcher, self._tokens.vocab_size, self._ends, self._encoder)
