"""A4, abstractive summary: what the sender's own model writes about the document, never longer than the budget."""

from __future__ import annotations

from collections.abc import Generator

from kvferry.core import container
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.prompt import SUMMARY_AWARE, SUMMARY_BLIND, SUMMARY_SYSTEM
from kvferry.sender.method import TextMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.counted import BudgetParameters, budget_tokens
from kvferry.sender.text.generating import Generated, generate, outcome


class Summary:
    """A4 without the question: everything concrete."""

    info = MethodInfo(
        id="A4",
        name="summary",
        form="text",
        label="custom",
        aware=False,
        source="kvferry",
        summary="a summary by the sender's model",
    )
    parameters = BudgetParameters

    def make(self, reading: Reading, parameters: BudgetParameters) -> Generator[Progress, None, TextMaterial]:
        """Summarise without looking at the question.

        Raises:
            InvalidRequestError: when the budget holds nothing of what the model writes.
            ModelError: when the model writes nothing.
        """
        return (yield from _summarise(reading, parameters, SUMMARY_BLIND))


class SummaryAware:
    """A4 for one question."""

    info = MethodInfo(
        id="A4-aware",
        name="summary-aware",
        form="text",
        label="custom",
        aware=True,
        source="kvferry",
        summary="a summary by the sender's model, written for the question",
    )
    parameters = BudgetParameters

    def make(self, reading: Reading, parameters: BudgetParameters) -> Generator[Progress, None, TextMaterial]:
        """Summarise for the question.

        Raises:
            InvalidRequestError: when there is none, or the budget holds nothing of what the model writes.
            ModelError: when the model writes nothing.
        """
        return (yield from _summarise(reading, parameters, SUMMARY_AWARE + reading.asked(self.info.id)))


def _summarise(
    reading: Reading, parameters: BudgetParameters, instruction: str
) -> Generator[Progress, None, TextMaterial]:
    made = Generated("", 0, cap_hit=False)
    yield Progress("tokenise", 0, len(reading.text))
    # Asked to summarise nothing, a model makes something up.
    if reading.text.strip():
        reading.check_length()
        budget = budget_tokens(parameters.budget, reading.receiver_tokens)
        made = yield from generate(reading, SUMMARY_SYSTEM, instruction, budget)
        if not made.text:
            raise _nothing(made, budget)
    return TextMaterial(made.text, kind=container.SUMMARY, outcome=outcome(reading, made))


def _nothing(made: Generated, budget: int) -> InvalidRequestError | ModelError:
    if made.cap_hit:
        return InvalidRequestError(
            f"budget: {budget} tokens do not suffice for a character of what the sender's model writes",
            field="budget",
            value=budget,
        )
    return ModelError(
        f"the sender's model wrote nothing about this document: it ended its summary after {made.generated} tokens"
    )
