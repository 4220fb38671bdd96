"""The grammars that the sender's model is kept to as it writes facts in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import regex

from kvferry.engine.constrained import Grammar
from kvferry.sender.text.sentences import CLAUSE_END
from kvferry.sender.text.word_edges import INSIDE_NUMBER

MAX_STATED = 64
"""Most facts in one answer: what ends a small model that repeats itself."""
MAX_REMARKS = 16
"""Most notes, and most unknowns."""
MAX_NAME = 80
MAX_VALUE = 100
MAX_QUOTE = 200
"""Longest entity and attribute, value, and quote, note or unknown, in code points."""

_FIRST = r'([^"\\\x00-\x1F\p{White_Space}\p{Default_Ignorable_Code_Point}]|\\["\\])'
# No \u for other characters: half of a surrogate pair would be JSON, but no text.
_NEXT = r'([^"\\\x00-\x1F]|\\(["\\bfnrt]|u00[01][0-9a-f]))'
_WORD = r"[\p{L}\p{M}\p{N}]+"
_ATTRIBUTE = rf"/{_WORD}([ _'\u{{2019}}-]{_WORD}){{0,3}}/ & /(?s:.){{1,40}}/"
_QUOTABLE = regex.compile(r"[^\x00-\x1F\p{White_Space}\p{Default_Ignorable_Code_Point}]", regex.V1)
# Where a word of UAX #29 ends and a number does not; also at a power, an index or a fraction.
_WITHIN_NUMBER = rf"""
    {INSIDE_NUMBER}
  | (?<=[\p{{L}}\p{{M}}\p{{N}}_]) \p{{No}}
  | (?<=\p{{No}}) [\p{{L}}\p{{N}}_]
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
# Also the border of a table's cell, and what stands last.
_MARK = regex.compile(CLAUSE_END + r"|[;:,]$|\|(?=\s|$)|\uff5c")


def evidence_grammar(passages: Sequence[str] | None) -> Grammar:
    """Return the grammar of evidence: ``{"facts": [{entity, attribute, value, quote}], "notes": [], "unknowns": []}``.

    JSON with one space behind every comma and colon and no other white space, every field there, in this order, and at
    least one fact: small models that may leave the list empty do so, and name facts when they may not. No string is
    empty or begins with white space or what is not seen. Lengths are limited by the constants above.

    Args:
        passages: what may be quoted, each as a whole, however long; the fact's value is then a run of words of the same
            passage. A word is what UAX #29 calls so, a number as a whole (``word_edges``), or ``MAX_VALUE`` characters
            of a very long one. JSON's own way of writing makes every character quotable. Without a passage
            in which something is seen there are no facts. None: value and quote are any text.
    """
    quotes = None if passages is None else dict(_with_words(passages))
    if quotes is None:
        bodies = ["body: " + _body("VALUE", "QUOTE"), f"VALUE: {_text(MAX_VALUE)}", f"QUOTE: {_text(MAX_QUOTE)}"]
    else:
        bodies = ["body: " + " | ".join(f"body{number}" for number in range(len(quotes)))]
        for number, (text, words) in enumerate(quotes.items()):
            bodies.append(f"body{number}: {_body(f'VALUE{number}', _literal(_escaped(text)))}")
            bodies.append(f"VALUE{number}: {_text(MAX_VALUE)} & {_part_of(words)}")
    names = r'"{\"entity\": \"" NAME "\", \"attribute\": \"" NAME "\", \"value\": \""'
    rules = (
        r'start: "{\"facts\": [" facts "], \"notes\": [" remarks "], \"unknowns\": [" remarks "]}"',
        "facts: " + ('""' if quotes == {} else f'fact (", " fact){{0,{MAX_STATED - 1}}}'),
        rf'remarks: (remark (", " remark){{0,{MAX_REMARKS - 1}}})?',
        r'remark: "\"" REMARK "\""',
        *([] if quotes == {} else [f'fact: {names} body "\\"}}"', *bodies, f"NAME: {_text(MAX_NAME)}"]),
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
    return (text for text, _ in _with_words(passages))


def _with_words(passages: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for text in dict.fromkeys(passages):
        words = _PIECE.findall(text)
        if any(map(_QUOTABLE.match, words)):
            yield text, words


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
