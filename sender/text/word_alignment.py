"""Where the words that a compressor kept stand in the document.

A compressor hands out words as its tokenizer rewrote them: in compatibility form, with other white space, and without
what it does not know. Both texts are therefore walked through in a folded copy, and only what is the same to the letter
in the end gets a span.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import regex

from kvferry.core.spans import Span

_CHARACTER = regex.compile(r"\X")
_ANCHOR = 4
"""Behind something that is no word of the list the walk goes on where so many of the next words stand, or fewer."""
_AHEAD = 4096
"""Most code points that it looks ahead."""


class Word(NamedTuple):
    """A word of the document as the compressor sees it, and whether it was kept."""

    text: str
    kept: bool


def copied(document: str, compressed: str, words: Sequence[Word]) -> tuple[Span, ...]:
    """Return the passages of a compressed text that stand in the document just so.

    Neighbours in both texts make one span. What cannot be found has none.

    Args:
        document: the whole text.
        compressed: its kept words in order, with whatever between them.
        words: all words of the document in order, the dropped ones too: they tell apart which "the" was kept.
    """
    places = zip(words, _places(document, [word.text for word in words]), strict=True)
    sources = [place for word, place in places if word.kept]
    targets = _places(compressed, [word.text for word in words if word.kept])
    spans: list[Span] = []
    for source, target in zip(sources, targets, strict=True):
        if source and target and document[slice(*source)] == compressed[slice(*target)]:
            _append(spans, Span(target[0], *source), document, compressed)
    return tuple(spans)


def beginning(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    """Return the spans of a text that was cut to its first ``length`` code points."""
    left = [Span(at, start, min(end, start + length - at)) for at, start, end in spans]
    return tuple(span for span in left if span.start < span.end)


def _append(spans: list[Span], span: Span, document: str, compressed: str) -> None:
    if spans:
        last = spans[-1]
        free = last.at + last.end - last.start
        # Words may share a character as a reader sees it, and the first of them has it.
        if span.at < free:
            return
        if compressed[free : span.at] == document[last.end : span.start]:
            spans[-1] = Span(last.at, last.start, span.end)
            return
    spans.append(span)


def _places(text: str, words: Sequence[str]) -> Iterator[tuple[int, int] | None]:
    """Yield the range of each word, in order; None where it is not found."""
    folded, starts, ends = _folded(text)
    wanted = [_fold(word) for word in words]
    at = 0
    for index, word in enumerate(wanted):
        found = at if folded.startswith(word, at) else _resume(folded, at, wanted[index : index + _ANCHOR])
        if not word or found < 0:
            yield None
            continue
        at = found + len(word)
        yield starts[found], ends[at - 1]


def _resume(folded: str, at: int, words: Sequence[str]) -> int:
    """Return where the walk goes on with the first of these words; -1 when it has to pass over it."""
    for anchor in reversed(list(itertools.accumulate(words))):
        # The fewer letters, the nearer they must be: a single one stands everywhere.
        found = folded.find(anchor, at, at + min(4 ** len(anchor), _AHEAD))
        if found >= 0:
            return found
    return -1


def _folded(text: str) -> tuple[str, list[int], list[int]]:
    """Return a text folded, and of each code point where the character that it comes from starts and ends."""
    parts: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for match in _CHARACTER.finditer(text):
        part = _fold(match.group())
        parts.append(part)
        starts += [match.start()] * len(part)
        ends += [match.end()] * len(part)
    return "".join(parts), starts, ends


def _fold(text: str) -> str:
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return "".join(plain.split())
