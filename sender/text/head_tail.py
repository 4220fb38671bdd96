"""A2, head and tail: the beginning and the end of the document, with a mark for what is left out between them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Generator

from kvferry.core import container
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.content import ContentEncoder
from kvferry.sender.method import TextMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.assembly import Assembled, Piece, assemble
from kvferry.sender.text.counted import BudgetParameters, CountedText, budget_tokens
from kvferry.sender.text.selection import too_small

MARK = "\n...\n"
"""Between the halves, and counted: halves that touch could make a word or a number that the document does not have."""
_NOTHING = Assembled("", ())
_Way = Callable[[int], list[Piece]]


class HeadTail:
    """Sends the first and the last tokens of the budget; an odd one goes to the head."""

    info = MethodInfo(
        id="A2",
        name="head-tail",
        form="text",
        label="custom",
        aware=False,
        source="kvferry",
        summary="beginning and end of the text, half of the budget each",
    )
    parameters = BudgetParameters

    def make(self, reading: Reading, parameters: BudgetParameters) -> Generator[Progress, None, TextMaterial]:
        """Cut the middle out.

        Raises:
            InvalidRequestError: when the budget holds nothing of either end.
        """
        yield Progress("method", 0, 1)
        document = CountedText(reading.counter, reading.text)
        budget = budget_tokens(parameters.budget, document.tokens)
        made = head_and_tail(reading.counter, document, budget)
        if reading.text.strip() and not made.text:
            raise too_small(budget, _enough(reading.counter, document), "either end")
        yield Progress("method", 1, 1)
        tokens = reading.counter.count(made.text)
        return TextMaterial(made.text, kind=container.ENDS, spans=made.spans, outcome={"tokens": tokens})


def head_and_tail(counter: ContentEncoder, document: CountedText, budget: int) -> Assembled:
    """Return at most ``budget`` tokens of a document: everything, or its beginning and its end, or one of these.

    Nothing is returned of a document of which no character of either end fits.
    """
    text, mark = document.text, counter.count(MARK)
    if document.tokens <= budget:
        return assemble(text, [Piece(0, len(text))], _mark)

    def both(room: int) -> list[Piece]:
        tail = max(0, room - mark) // 2
        pieces = [_head(document, room - mark - tail), _tail(document, tail)]
        return pieces if all(text[start:end].strip() for start, end in pieces) else []

    ways: tuple[_Way, ...] = (both, lambda room: [_head(document, room)], lambda room: [_tail(document, room)])
    made = (_fitted(counter, document, budget, way) for way in ways)
    smallest = (assemble(text, [piece], _mark) for piece in _smallest(document))
    fitting = (one for one in smallest if counter.count(one.text) <= budget)
    return next((one for one in itertools.chain(made, fitting) if one.text.strip()), _NOTHING)


def _fitted(counter: ContentEncoder, document: CountedText, budget: int, way: _Way) -> Assembled:
    """Return what a way to cut makes of as many tokens as fit.

    Pieces are encoded anew, and a word that was cut may take more tokens than its part of the whole did.
    """
    room = budget
    while room > 0:
        made = assemble(document.text, way(room), _mark)
        over = counter.count(made.text) - budget
        if over <= 0:
            return made
        room -= over
    return _NOTHING


def _head(document: CountedText, tokens: int) -> Piece:
    return Piece(0, document.head(tokens))


def _tail(document: CountedText, tokens: int) -> Piece:
    return Piece(document.tail(tokens), len(document.text))


def _smallest(document: CountedText) -> tuple[Piece, Piece]:
    """Return the shortest beginning and the shortest end with something in it."""
    text, counts = document.text, range(document.tokens + 1)
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    head = bisect_right(counts, first, key=document.head)
    tail = bisect_right(counts, -last, key=lambda tokens: -document.tail(tokens))
    return _head(document, head), _tail(document, tail)


def _enough(counter: ContentEncoder, document: CountedText) -> int:
    """Return a budget that holds something."""
    return min(counter.count(document.text[start:end]) for start, end in _smallest(document))


def _mark(_: str) -> str:
    return MARK
