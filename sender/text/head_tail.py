"""A2, head and tail: the beginning and the end of the document, with a mark for what is left out between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator

from kvferry.core import container
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.prompt import PromptBuilder
from kvferry.sender.method import TextMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.assembly import Assembled, Piece, assemble
from kvferry.sender.text.counted import BudgetParameters, CountedText, budget_tokens
from kvferry.sender.text.selection import too_small

MARK = "\n...\n"
"""Between the halves, and counted: halves that touch could make a word or a number that the document does not have."""


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
        document = CountedText(reading.model.prompt, reading.text)
        budget = budget_tokens(parameters.budget, document.tokens)
        made = head_and_tail(reading.model.prompt, document, budget)
        if reading.text.strip() and not _says_something(made):
            raise too_small(budget, _enough(reading.model.prompt, document, budget), "either end")
        yield Progress("method", 1, 1)
        tokens = reading.model.prompt.count(made.text)
        return TextMaterial(made.text, kind=container.ENDS, spans=made.spans, outcome={"tokens": tokens})


def head_and_tail(prompt: PromptBuilder, document: CountedText, budget: int) -> Assembled:
    """Return at most ``budget`` tokens of a document: everything, or its beginning and its end."""
    text = document.text
    if document.tokens <= budget:
        return assemble(text, [Piece(0, len(text))], _mark)
    mark = prompt.count(MARK)
    room = budget
    while True:
        # Where mark and tail do not fit beside the head, the head has everything.
        tail = max(0, room - mark) // 2
        head = room - mark - tail if tail else room
        pieces = [Piece(0, document.head(head)), Piece(document.tail(tail), len(text))]
        made = assemble(text, pieces, _mark)
        # Pieces are encoded anew, and a word that was cut may take more tokens than its part of the whole did.
        over = prompt.count(made.text) - budget
        if over <= 0:
            return made
        room -= over


def _says_something(made: Assembled) -> bool:
    return any(made.text[at : at + end - start].strip() for at, start, end in made.spans)


def _enough(prompt: PromptBuilder, document: CountedText, budget: int) -> int:
    """Return the smallest budget that holds something, above one that does not."""
    larger = range(budget + 1, document.tokens)

    def suffices(tokens: int) -> bool:
        return _says_something(head_and_tail(prompt, document, tokens))

    return budget + 1 + bisect_left(larger, 1, key=suffices)


def _mark(_: str) -> str:
    return MARK
