"""Which pieces a budget takes: the best first, in exact tokens of the text that they make together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import Progress
from kvferry.engine.content import ContentEncoder
from kvferry.sender.text.assembly import Assembled, Piece, assemble, line_break
from kvferry.sender.text.counted import CountedText

_STEP = 1024


@dataclass(frozen=True)
class Selection:
    """What a budget took: the text, its tokens, and how many pieces it holds."""

    made: Assembled
    tokens: int
    pieces: int


def select(
    counter: ContentEncoder, document: CountedText, pieces: Sequence[Piece], order: Sequence[int], budget: int
) -> Generator[Progress, None, Selection]:
    """Take pieces in order while they fit; one that does not is skipped.

    Of a document that says something, something is taken. A piece is weighed by its own tokens. Pieces take fewer
    together than one by one, so what is taken is counted exactly once, when the first one does not fit: every count
    takes as long as encoding it.

    Args:
        counter: encodes as the receiver's prompt does.
        document: which the pieces make up.
        pieces: in the order of the document.
        order: their numbers, best first.
        budget: tokens.

    Yields:
        How many pieces were looked at.

    Returns:
        A text of at most ``budget`` tokens.

    Raises:
        InvalidRequestError: when not one piece fits the budget.
    """
    costs = document.costs(pieces)
    taken: list[int] = []
    used, counted = 0, False
    for seen, number in enumerate(order):
        if seen % _STEP == 0:
            yield Progress("method", seen, len(order))
        if used + costs[number] > budget and not counted:
            used, counted = counter.count(_join(document.text, pieces, taken).text), True
        if used + costs[number] <= budget:
            taken.append(number)
            used += costs[number]
    made = _join(document.text, pieces, taken)
    # The other way round is rare: cut out of its surroundings, a piece may take more tokens than it did there.
    while (tokens := counter.count(made.text)) > budget:
        taken.pop()
        made = _join(document.text, pieces, taken)
    if document.text.strip() and not made.text.strip():
        taken = [_first_alone(counter, document.text, pieces, order, budget)]
        made = _join(document.text, pieces, taken)
        tokens = counter.count(made.text)
    yield Progress("method", len(order), len(order))
    return Selection(made, tokens, len(taken))


def too_small(budget: int, smallest: int, what: str) -> InvalidRequestError:
    """Return the error for a budget in tokens that holds nothing of a document; ``smallest`` is one that does."""
    return InvalidRequestError(
        f"budget: {budget} tokens do not suffice for {what} of this document, which takes {smallest}",
        field="budget",
        value=budget,
        minimum=smallest,
    )


def _first_alone(counter: ContentEncoder, text: str, pieces: Sequence[Piece], order: Sequence[int], budget: int) -> int:
    """Return the best piece that fits by itself: within the document it may have taken more tokens, or others' place.

    Raises:
        InvalidRequestError: when there is none.
    """
    passages = {number: text[pieces[number].start : pieces[number].end] for number in order}
    alone = {number: counter.count(passage) for number, passage in passages.items() if passage.strip()}
    fitting = next((number for number, tokens in alone.items() if tokens <= budget), None)
    if fitting is None:
        raise too_small(budget, min(alone.values()), "the shortest piece")
    return fitting


def _join(document: str, pieces: Sequence[Piece], taken: Sequence[int]) -> Assembled:
    return assemble(document, (pieces[number] for number in taken), line_break)
