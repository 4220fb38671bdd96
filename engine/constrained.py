"""Answers that follow a grammar: at each step the tokens that would leave it are masked out.

llguidance says which tokens those are; everything else is here. The bit mask is made on the CPU and applied as one
array operation, not by the library's own kernels, so every back end gives the same answer.

Control tokens are never part of an answer: neither the special ones, nor those that are only added to the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import regex
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.core.errors import ModelError

MAX_FACTS = 64
"""Most facts in one answer: what ends a small model that repeats itself."""
MAX_REMARKS = 16
"""Most notes, and most unknowns."""
MAX_NAME = 80
MAX_VALUE = 160
MAX_QUOTE = 200
"""Longest entity and attribute, value, and quote, note or unknown, in code points."""

# Every token by which the text can go on is left. Without this, where only one text can follow, it is only the token by
# which the library would spell that text, and it might take a control token's string in it for the token.
_HEADER = '%llguidance {"no_forcing": true}'
# The library's own limits stop it at long documents to quote from.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=10**10,
    step_lexer_fuel=10**8,
    step_max_items=10**6,
    max_lexer_states=10**6,
    max_grammar_size=10**9,
    verbose_errors=False,
)
# No \u: half of a surrogate pair would be JSON, but no text.
_ESCAPES = 'nrtbf\\"'
_FIRST = r'([^"\\\x00-\x1F\p{White_Space}]|\\["\\])'
_NEXT = r'([^"\\\x00-\x1F]|\\(["\\bfnrt]|u00[01][0-9a-f]))'
_QUOTABLE = regex.compile(r"[^\x00-\x1F\p{White_Space}]", regex.VERSION1)
# Words, numbers and white space of any language (UAX #29), cut where they are very long. Flags stand apart because a
# word boundary among them is counted from the first one.
_PIECE = regex.compile(r"\p{RI}{2} | .{1,39}? (?: (?=\p{RI}) | \b ) | .{1,40}", regex.V1 | regex.S | regex.W | regex.X)


@dataclass(frozen=True)
class Grammar:
    """A grammar in Lark's syntax as llguidance reads it."""

    source: str


class Constraint:
    """Keeps one answer within a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: tuple[int, ...]) -> None:
        """Begin an answer; ``GrammarCompiler`` does."""
        self._matcher = matcher
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


class GrammarCompiler:
    """Makes constraints for one model. Building it reads the whole vocabulary, which takes a second or two."""

    def __init__(self, tokenizer: Any) -> None:
        """Build from an mlx-lm tokenizer.

        Raises:
            ModelError: when the library does not know its kind.
        """
        backend = tokenizer.backend_tokenizer
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            # The library takes the others for text. Runs of white space are text, as ``ContentEncoder`` has it.
            token["special"] = token["special"] or bool(token["content"].strip())
        state["truncation"] = state["padding"] = None
        # A configuration may name ends that the tokenizer lacks.
        self._ends = tuple(sorted(end for end in tokenizer.eos_token_ids if backend.id_to_token(end) is not None))
        try:
            # Without these slices of the vocabulary a mask within a string takes twenty times as long.
            self._tokens = LLTokenizer(json.dumps(state), eos_token=list(self._ends), slices=LLTokenizer.json_slices())
        except ValueError as error:
            raise ModelError(f"tokenizer: no grammar can be applied to it: {error}") from error

    def compile(self, grammar: Grammar) -> Constraint:
        """Return a constraint for one answer.

        Raises:
            ModelError: when the grammar is wrong.
        """
        matcher = LLMatcher(self._tokens, f"{_HEADER}\n{grammar.source}", log_level=0, limits=_LIMITS)
        if matcher.is_error():
            # What follows on other lines is the grammar, which may hold a document.
            raise ModelError(f"grammar: {matcher.get_error().partition(chr(10))[0]}")
        return Constraint(matcher, self._tokens.vocab_size, self._ends)

    def compile_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """Return a constraint for one answer that is JSON without white space, keys in the schema's order.

        Raises:
            ModelError: when the schema is wrong, or asks for what cannot be kept.
        """
        options = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
        return self.compile(Grammar(f"start: %json {json.dumps({**schema, 'x-guidance': options})}"))


def evidence_grammar(document: str | None, *, may_be_empty: bool = False) -> Grammar:
    """Return the grammar of evidence: ``{"facts":[{entity, attribute, value, quote}],"notes":[],"unknowns":[]}``.

    JSON without white space, every field there, in this order. No string is empty or begins with white space. Lengths
    are limited by the constants above.

    Args:
        document: where quotes are copied from, character by character, at most ``MAX_QUOTE`` of them; or None, and
            quotes are any text. A quote begins and ends where a word or number does (UAX #29), or every 40 characters
            within a very long one. It is written as JSON writes it, so all characters can be quoted. Without anything
            to quote there are no facts. Compiling takes about a second for 300,000 characters of prose, or for 100,000
            where every character is a word.
        may_be_empty: whether there may be no facts although there is something to quote. Small models that may leave
            the list empty do so, and name the facts when they may not.
    """
    pieces = [] if document is None else _PIECE.findall(document)
    quotable = document is None or any(map(_QUOTABLE.match, pieces))
    facts = _list("fact", MAX_FACTS, may_be_empty=may_be_empty) if quotable else '"[]"'
    kinds = {"entity": "NAME", "attribute": "NAME", "value": "VALUE", "quote": "QUOTE"}
    fields = ",".join(rf'\"{name}\":\"" {kind} "\"' for name, kind in kinds.items())
    rules = (
        r'start: "{\"facts\":" facts ",\"notes\":" remarks ",\"unknowns\":" remarks "}"',
        f"facts: {facts}",
        f"remarks: {_list('remark', MAX_REMARKS, may_be_empty=True)}",
        r'remark: "\"" REMARK "\""',
        f'fact: "{{{fields}}}"',
        f"NAME: {_text(MAX_NAME)}",
        f"VALUE: {_text(MAX_VALUE)}",
        f"REMARK: {_text(MAX_QUOTE)}",
        f"QUOTE: {_text(MAX_QUOTE)}{'' if document is None else f' & {_part_of(pieces)}'}",
    )
    return Grammar("\n".join(rules))


def _list(item: str, most: int, *, may_be_empty: bool) -> str:
    return f'"[" ({item} ("," {item}){{0,{most - 1}}}){"?" * may_be_empty} "]"'


def _text(most: int) -> str:
    return f"/{_FIRST}{_NEXT}{{0,{most - 1}}}/"


def _part_of(pieces: list[str]) -> str:
    chunks = [json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces]
    return f'%regex {{"substring_chunks": {json.dumps(chunks, ensure_ascii=False)}}}'
