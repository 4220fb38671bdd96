"""Answers that follow a grammar: the tokens that would leave it are masked out, and what must follow is not asked for.

llguidance says which tokens those are; everything else is here. The bit mask is made on the CPU and applied as one
array operation, not by the library's own kernels, so every back end gives the same answer.

Control tokens are never part of an answer: neither the special ones, nor those that are only added to the vocabulary.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import regex
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvferry.core.errors import ModelError
from kvferry.engine.content import ContentEncoder

MAX_FACTS = 64
"""Most facts in one answer: what ends a small model that repeats itself."""
MAX_REMARKS = 16
"""Most notes, and most unknowns."""
MAX_NAME = 80
MAX_VALUE = 100
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
    max_items_in_row=10**5,
    max_lexer_states=10**6,
    max_grammar_size=10**9,
    verbose_errors=False,
)
# No \u: half of a surrogate pair would be JSON, but no text.
_ESCAPES = 'nrtbf\\"'
_FIRST = r'([^"\\\x00-\x1F\p{White_Space}\p{Default_Ignorable_Code_Point}]|\\["\\])'
_NEXT = r'([^"\\\x00-\x1F]|\\(["\\bfnrt]|u00[01][0-9a-f]))'
_WORD = r"[\p{L}\p{M}\p{N}]+"
_ATTRIBUTE = rf"/{_WORD}([ _'\u{{2019}}-]{_WORD}){{0,3}}/ & /(?s:.){{1,40}}/"
_QUOTABLE = regex.compile(r"[^\x00-\x1F\p{White_Space}\p{Default_Ignorable_Code_Point}]", regex.V1)
# Where a word of UAX #29 ends and a number does not: in a time, behind a sign, at a power, an index or a fraction.
_WITHIN_NUMBER = r"""
    (?<=\p{Nd}) [:\uff1a]\p{Nd}
  | (?<=\p{Nd}[:\uff1a]) \p{Nd}
  | (?<= (?<! [\p{L}\p{M}\p{N}_] ) [\p{Pd}\u2212] ) \p{Nd}
  | (?<=[\p{L}\p{M}\p{N}_]) \p{No}
  | (?<=\p{No}) [\p{L}\p{N}_]
"""
# Words, numbers and white space of any language, cut where no value could hold them. Flags stand apart because a word
# boundary among them is counted from the first one.
_PIECE = regex.compile(
    rf"""
      \p{{RI}}{{2}}
    | .{{1,{MAX_VALUE - 1}}}? (?: (?=\p{{RI}}) | \b (?! {_WITHIN_NUMBER} ) )
    | .{{1,{MAX_VALUE}}}
    """,
    regex.V1 | regex.S | regex.W | regex.X,
)

# What a clause, a list's entry or a table's cell ends at. Scripts without spaces leave none behind theirs.
_MARK = regex.compile(r"[,;:|،؛](?=\s|$)|[、\uff0c\uff1b\uff1a\uff5c]", regex.V1)


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

    def __init__(self, tokenizer: Any) -> None:
        """Build from an mlx-lm tokenizer.

        Raises:
            ModelError: when the library does not know its kind.
        """
        self._encoder = ContentEncoder(tokenizer)
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

    def compile_schema(self, schema: Mapping[str, Any]) -> GrammarConstraint:
        """Return a constraint for one answer that is JSON without white space, keys in the schema's order.

        Raises:
            ModelError: when the schema is wrong, or asks for what cannot be kept.
        """
        options = {"whitespace_flexible": False, "json_allowed_escapes": _ESCAPES}
        return self.compile(Grammar(f"start: %json {json.dumps({**schema, 'x-guidance': options})}"))


def evidence_grammar(passages: Sequence[str] | None) -> Grammar:
    """Return the grammar of evidence: ``{"facts": [{entity, attribute, value, quote}], "notes": [], "unknowns": []}``.

    JSON with one space behind every comma and colon and no other white space, every field there, in this order, and at
    least one fact: small models that may leave the list empty do so, and name facts when they may not. No string is
    empty or begins with white space or what is not seen. Lengths are limited by the constants above.

    Args:
        passages: what may be quoted, each as a whole, however long; the fact's value is then a run of words of the same
            passage. A word is what UAX #29 calls so, a number with its sign and a time as a whole, or ``MAX_VALUE``
            characters of a very long one. JSON's own way of writing makes every character quotable. Without a passage
            in which something is seen there are no facts. None: value and quote are any text.
    """
    quotable = None if passages is None else _quotable(passages)
    if quotable is None:
        bodies = ["body: " + _body("VALUE", "QUOTE"), f"VALUE: {_text(MAX_VALUE)}", f"QUOTE: {_text(MAX_QUOTE)}"]
    else:
        bodies = ["body: " + " | ".join(f"body{number}" for number in range(len(quotable)))]
        for number, (text, words) in enumerate(quotable.items()):
            bodies.append(f"body{number}: {_body(f'VALUE{number}', _literal(_escaped(text)))}")
            bodies.append(f"VALUE{number}: {_text(MAX_VALUE)} & {_part_of(words)}")
    names = r'"{\"entity\": \"" NAME "\", \"attribute\": \"" NAME "\", \"value\": \""'
    rules = (
        r'start: "{\"facts\": [" facts "], \"notes\": [" remarks "], \"unknowns\": [" remarks "]}"',
        "facts: " + ('""' if quotable == {} else f'fact (", " fact){{0,{MAX_FACTS - 1}}}'),
        rf'remarks: (remark (", " remark){{0,{MAX_REMARKS - 1}}})?',
        r'remark: "\"" REMARK "\""',
        *([] if quotable == {} else [f'fact: {names} body "\\"}}"', *bodies, f"NAME: {_text(MAX_NAME)}"]),
        f"REMARK: {_text(MAX_QUOTE)}",
    )
    return Grammar("\n".join(rules))


def fact_grammar(passage: str, before: str) -> Grammar:
    """Return the grammar of one fact of a passage: ``before``, then ``{"quote", "entity", "attribute", "value"}``.

    The quote is the passage, so that the model has it before its eyes as it says what it is about. An attribute is one
    to four words, 40 code points at most: what small models repeat without an end. A value ends where its clause does:
    they copy to the end of what they are given. Everything else is as in ``evidence_grammar``.

    Args:
        passage: what is quoted, one of ``quotable``.
        before: JSON that the text begins with.
    """
    head = _literal(f'{before}{{"quote": "{_escaped(passage)}", "entity": "')
    rest = r'NAME "\", \"attribute\": \"" ATTRIBUTE "\", \"value\": \"" VALUE "\"}"'
    rules = (
        f"start: {head} {rest}",
        f"NAME: {_text(MAX_NAME)}",
        f"ATTRIBUTE: {_ATTRIBUTE}",
        f"VALUE: {_text(MAX_VALUE)} & ({' | '.join(map(_part_of, _clauses(passage)))})",
    )
    return Grammar("\n".join(rules))


def literal_grammar(text: str) -> Grammar:
    """Return the grammar of one text."""
    return Grammar(f"start: {_literal(text)}")


def quotable(passages: Iterable[str]) -> Iterator[str]:
    """Yield the passages that hold a value, each once."""
    return (text for text in dict.fromkeys(passages) if any(map(_QUOTABLE.match, _PIECE.findall(text))))


def _quotable(passages: Iterable[str]) -> dict[str, list[str]]:
    """Return the passages that hold a value, with their words."""
    return {text: _PIECE.findall(text) for text in quotable(passages)}


def _clauses(passage: str) -> list[list[str]]:
    """Return the words of each clause that holds a value; of the passage, where only its marks could be one."""
    clauses: list[list[str]] = [[]]
    for piece in _PIECE.finditer(passage):
        if _MARK.match(passage, piece.start()):
            clauses.append([])
        else:
            clauses[-1].append(piece.group())
    return [words for words in clauses if any(map(_QUOTABLE.match, words))] or [_PIECE.findall(passage)]


def _body(value: str, quote: str) -> str:
    return rf'{value} "\", \"quote\": \"" {quote}'


def _text(most: int) -> str:
    return f"/{_FIRST}{_NEXT}{{0,{most - 1}}}/"


def _part_of(pieces: Sequence[str]) -> str:
    return f'%regex {{"substring_chunks": {json.dumps(list(map(_escaped, pieces)), ensure_ascii=False)}}}'


def _escaped(text: str) -> str:
    """Return a text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _literal(text: str) -> str:
    """Return a text as a grammar holds it."""
    # Not as it is: a delete character is an error there.
    return json.dumps(text)
