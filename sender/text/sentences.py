"""A document in pieces that make sense on their own: sentences, log entries, table rows, lines of code.

The pieces follow one another without holes, so each is a slice of the document and together they are the document.
Prose follows the sentence boundaries of Unicode (UAX #29), less the full stops of abbreviations, initials and list
numbers. A line break ends a piece unless the line is wrapped prose. White space belongs to the piece before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import regex

from kvferry.core import graphemes
from kvferry.sender.text import word_edges
from kvferry.sender.text.abbreviations import BEFORE_NUMBERS, TITLES
from kvferry.sender.text.assembly import Piece

LONGEST = 600
"""Code points of a piece at most, but for a single character that is longer: what holds no sentence end is cut."""
CLAUSE_END = r"(?:[;:,](?=\s)|[\u3001\uff0c\uff1b\uff1a\u060c\u061b])"
"""What ends a clause or an entry of a list: within a number or a word the same characters do not."""

_LINE = regex.compile(r"[^\n\r\v\f\x85\u2028\u2029]*+(?:\r\n|[\n\r\v\f\x85\u2028\u2029]|$)")
# Table rows, mark-up, brackets, and lines that begin with a date or a time: taken whole.
_RECORD = regex.compile(
    r"\s*+(?: [|\[{<] | \d{4}[-/.]\d\d? | \d\d?[-/.]\d\d?[-/.]\d | \d\d?:\d\d | \p{Lu}\p{Ll}{2}\ +\d\d?\ +\d\d:\d\d)",
    regex.VERBOSE,
)
_WRAPPED_FROM = 40
_PROSE = 0.8
_STOP = regex.compile(
    r"""
      (?P<spaced> [.!?…]++ [\p{M}\p{Cf}]*+ [\p{Pe}\p{Pf}\p{Pi}"'*_`]*+ (?: \s++ | $ ) )
    | (?P<free> (?: [\p{SB=STerm}--[.!?…]] | \uff0e(?!\p{Nd}) )++ [\p{M}\p{Cf}]*+ [\p{Pe}\p{Pf}"']*+ \s*+ )
    """,
    regex.VERBOSE | regex.VERSION1,
)
_GOES_ON = regex.compile(r"""[\p{Ps}\p{Pi}"'*_`]*+\p{Ll}""")
_BEFORE = regex.compile(r"(?r)[\p{L}\p{M}\p{N}][\p{L}\p{M}\p{N}.]*")
_LIST_NUMBER = regex.compile(r"[\s\p{Ps}#>*+-]*+(?:\p{N}{1,4}(?:\.\p{N}{1,4})*+|[ivxIVX]{1,5}|\p{L})")
_LETTER_OR_SPACE = regex.compile(r"[\p{L}\p{M}\s]")
_CLAUSE = regex.compile(CLAUSE_END + r"\s*+")
_SPACE = regex.compile(r"\s++")


def pieces(text: str, longest: int = LONGEST) -> Iterator[Piece]:
    """Yield the pieces of a text in order. Every end is a grapheme boundary; only a text of white space is blank.

    A piece over ``longest`` code points is cut behind the last clause, else white space, of the window's second half;
    else behind its last whole word or number; and within one only where it fills the window.
    """
    for block in _blocks(text):
        start = block.start
        for end in _sentence_ends(text, block):
            yield from _cut(text, start, end, longest)
            start = end


def _blocks(text: str) -> Iterator[Piece]:
    """Yield lines, each with the blank ones behind it; lines of one wrapped paragraph come together."""
    start = at = 0
    last = ""
    for paragraph in _paragraphs(text):
        width = max(len(line.rstrip()) for line in paragraph)
        for line in paragraph:
            if line.strip():
                if last and not _is_wrapped(last, line, width):
                    yield Piece(start, at)
                    start = at
                last = line
            at += len(line)
        # Nothing is wrapped into a blank line.
        last = "\n" if last else ""
    if start < len(text):
        yield Piece(start, len(text))


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Yield runs of lines: text, then the blank ones behind it."""
    lines: list[str] = []
    for match in _LINE.finditer(text):
        line = match.group()
        if lines and line.strip() and not lines[-1].strip():
            yield lines
            lines = []
        lines.append(line)
    if lines:
        yield lines


def _is_wrapped(line: str, following: str, width: int) -> bool:
    """Whether a line of prose goes on in the next one, because the next word would not have fitted."""
    plain = line.rstrip()
    if len(plain) < _WRAPPED_FROM or _RECORD.match(plain) or not following[0].isalnum():
        return False
    if len(_LETTER_OR_SPACE.findall(plain)) < _PROSE * len(plain):
        return False
    return following[0].islower() or len(plain) + len(following.split(maxsplit=1)[0]) >= width


def _sentence_ends(text: str, block: Piece) -> Iterator[int]:
    if not _RECORD.match(text, block.start, block.end):
        start = boundary = block.start
        for match in _STOP.finditer(text, block.start, block.end):
            end = match.end()
            # A character may hold many stops: it is looked through once.
            if boundary <= end < block.end and _ends_here(text, start, match):
                boundary = graphemes.ceil(text, end, boundary)
                if boundary == end:
                    yield end
                    start = end
    yield block.end


def _ends_here(text: str, start: int, stop: regex.Match[str]) -> bool:
    if stop["free"]:
        return True
    if _GOES_ON.match(text, stop.end()):
        return False
    if not stop["spaced"].startswith(".") or stop["spaced"].startswith(".."):
        return True
    before = _BEFORE.match(text, start, stop.start())
    word = before.group().casefold() if before else ""
    if word in TITLES or (word in BEFORE_NUMBERS and text[stop.end()].isnumeric()):
        return False
    initial = before is not None and len(word) == 1 and before.group().isupper()
    return not initial and not _LIST_NUMBER.fullmatch(text, start, stop.start())


def _cut(text: str, start: int, end: int, longest: int) -> Iterator[Piece]:
    while end - start > longest:
        at = _cut_place(text, start, longest)
        if at >= end:
            break
        yield Piece(start, at)
        start = at
    yield Piece(start, end)


def _cut_place(text: str, start: int, longest: int) -> int:
    """Return where to cut a piece that is too long: behind a clause, or a word, or at least between characters."""
    limit = start + longest
    for pattern in (_CLAUSE, _SPACE):
        ends = [match.end() for match in pattern.finditer(text, start + longest // 2, limit)]
        whole = [end for end in ends if not word_edges.is_inside(text, end)]
        if whole:
            at = graphemes.floor(text, whole[-1], start)
            break
    else:
        at = _behind_a_word(text, start, limit)
    return at if at > start else graphemes.ceil(text, limit, start)


def _behind_a_word(text: str, start: int, limit: int) -> int:
    """Return the last place between words or numbers, or where there is none between characters."""
    at = word_edges.floor(text, limit, start)
    return at if text[start:at].strip() else graphemes.floor(text, limit, start)
