"""A8, learned prompt compression: the words that LLMLingua-2's token classifier keeps.

The rule keeps about a rate of the words, passage by passage, counted in tokens of another tokenizer. So the rate is the
budget over the document's tokens, and what comes out is counted in the receiver's tokens and cut to the budget.

Kept words stand far apart, and a span for each run of them takes more bytes than they do. So none travel: the text is
marked as generated.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from kvferry.core import container
from kvferry.core.errors import InvalidRequestError
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress, relay
from kvferry.core.wire import MethodInfo
from kvferry.engine.model import LoadedModel
from kvferry.sender.method import TextMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.counted import BudgetParameters, budget_tokens, within
from kvferry.sender.text.llmlingua_package import Compressor, Compressors, identity

Model = Literal["llmlingua-2-xlm-roberta-large-meetingbank", "llmlingua-2-bert-base-multilingual-cased-meetingbank"]


class LLMLingua2Parameters(BudgetParameters, frozen=True, forbid_unknown_fields=True):
    """``budget``, and ``model``: which of the released compressors chooses."""

    model: Model = "llmlingua-2-xlm-roberta-large-meetingbank"


class LLMLingua2:
    """Sends kept words in order. The compressor is loaded by the first document that needs it and stays loaded."""

    info = MethodInfo(
        id="A8",
        name="llmlingua-2",
        form="text",
        label="official",
        aware=False,
        source="LLMLingua-2, arXiv 2403.12968; microsoft/LLMLingua 0.2.2",
        summary="the words that a trained classifier keeps; needs kvferry[llmlingua] and a downloaded model",
    )
    parameters = LLMLingua2Parameters

    def __init__(self) -> None:
        self._compressors = Compressors()

    def shaped_by(self, model: LoadedModel, parameters: LLMLingua2Parameters) -> tuple[str, ...]:
        """Return which package and weights choose: both may be replaced by others."""
        return identity(parameters.model)

    def make(self, reading: Reading, parameters: LLMLingua2Parameters) -> Generator[Progress, None, TextMaterial]:
        """Compress without looking at the question.

        Raises:
            InvalidRequestError: when the budget holds no word that the rule keeps at its rate.
            ModelError: when package, model or encoding is missing, or the package cannot rank a passage.
        """
        counter, text = reading.counter, reading.text
        yield Progress("tokenise", 0, len(text))
        tokens = reading.receiver_tokens
        budget = budget_tokens(parameters.budget, tokens)
        if tokens <= budget:
            return TextMaterial(text, kind=container.COMPRESSED, outcome=_outcome(tokens, tokens))
        if not text.strip():
            return TextMaterial("", kind=container.COMPRESSED, outcome=_outcome(0, tokens))
        yield Progress("method", 0, tokens)
        compressor = self._compressors.get(parameters.model)
        made = yield from _compress(compressor, text, budget / tokens)
        kept = within(counter, made, budget)
        if not kept.strip():
            raise InvalidRequestError(
                f"budget: {budget} tokens do not suffice for a word of this document: at that rate of its {tokens} "
                f"the compressor keeps {len(made.split())} words",
                field="budget",
                value=budget,
            )
        outcome = _outcome(counter.count(kept), tokens, cap_hit=kept != made)
        chosen_by = {"package": compressor.package, "checkpoint": compressor.checkpoint}
        return TextMaterial(kept, kind=container.COMPRESSED, outcome=outcome | chosen_by)


def _compress(compressor: Compressor, text: str, rate: float) -> Generator[Progress, None, str]:
    total = len(compressor.tokens(text))
    steps = compressor.compress(text, rate)
    # Marks of beginning and end are classified as well, and passages are tokenised anew.
    made = yield from relay(steps, lambda done: Progress("method", min(done, total), total))
    yield Progress("method", total, total)
    return made


def _outcome(tokens: int, source: int, *, cap_hit: bool = False) -> dict[str, Scalar]:
    rate = tokens / source if source else 1.0
    return {"tokens": tokens, "source_tokens": source, "rate": rate, "cap_hit": cap_hit}
