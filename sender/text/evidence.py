"""A5, structured evidence: the facts of the document as the sender's model writes them, each with its place.

The model writes JSON with a quote for every fact. A quote that stands in the document becomes its place; one that does
not is no quote, and its fact says so. The model is kept to the form as it writes, and, unless told otherwise, to quotes
that are copied from the document.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvferry.core import limits
from kvferry.core.evidence import Evidence, Fact
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.constrained import MAX_QUOTE, Constraint, evidence_grammar
from kvferry.engine.generate import Answer
from kvferry.engine.prompt import EVIDENCE_SYSTEM, PromptBuilder, evidence_task, evidence_text
from kvferry.sender.method import EvidenceMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text import graphemes
from kvferry.sender.text.counted import BudgetParameters, budget_tokens
from kvferry.sender.text.facts import RawFact, Written, read_facts
from kvferry.sender.text.generating import write
from kvferry.sender.text.quotes import Resolved, Source, supports
from kvferry.sender.text.sentences import pieces as split

NOTHING = '{"facts":[],"notes":[],"unknowns":[]}'
"""Evidence without a fact, as a model would write it."""


class EvidenceParameters(BudgetParameters, frozen=True):
    """``constraint``: what the model is kept to as it writes.

    "quotes": the form, and facts whose quote is a sentence of the document and whose value is copied from it;
    "schema": the form; "none": nothing.
    """

    constraint: Literal["quotes", "schema", "none"] = "quotes"


@dataclass(frozen=True)
class Found:
    """Evidence, and what a manifest says of how it came about."""

    evidence: Evidence
    outcome: dict[str, Scalar]


class StructuredEvidence:
    """A5 without the question: every concrete fact."""

    info = MethodInfo(
        id="A5",
        name="evidence",
        form="evidence",
        label="custom",
        aware=False,
        source="kvferry",
        summary="facts by the sender's model, each with its place in the document",
    )
    parameters = EvidenceParameters

    def make(self, reading: Reading, parameters: EvidenceParameters) -> Generator[Progress, None, EvidenceMaterial]:
        """Find facts without looking at the question."""
        found = yield from find_evidence(reading, None, parameters)
        return EvidenceMaterial(found.evidence, found.outcome)


class StructuredEvidenceAware:
    """A5 for one question."""

    info = MethodInfo(
        id="A5-aware",
        name="evidence-aware",
        form="evidence",
        label="custom",
        aware=True,
        source="kvferry",
        summary="facts by the sender's model for the question, each with its place in the document",
    )
    parameters = EvidenceParameters

    def make(self, reading: Reading, parameters: EvidenceParameters) -> Generator[Progress, None, EvidenceMaterial]:
        """Find facts for the question.

        Raises:
            InvalidRequestError: when there is none.
        """
        found = yield from find_evidence(reading, reading.asked(self.info.id), parameters)
        return EvidenceMaterial(found.evidence, found.outcome)


def find_evidence(
    reading: Reading, question: str | None, parameters: EvidenceParameters
) -> Generator[Progress, None, Found]:
    """Have the model write facts, for a question or all that are concrete, and look their quotes up.

    The budget caps what the model writes, form and quotes included, and what a reader's model is given to read.

    Raises:
        ContextOverflowError: when document, instruction and budget do not fit the context. Nothing is cut silently.
        ModelError: when the model's tokenizer cannot be kept to a form.
    """
    prompt, text = reading.model.prompt, reading.text
    yield Progress("tokenise", 0, len(text))
    budget = budget_tokens(parameters.budget, prompt.count(text))
    answer = Answer(NOTHING, (), "stop")
    # Asked for the facts of nothing, a model makes some up.
    if text.strip():
        task = evidence_task(question, with_form=parameters.constraint == "none")
        answer = yield from write(reading, EVIDENCE_SYSTEM, task, budget, _constraint(reading, parameters))
    cut = answer.finish_reason == "length"
    written = read_facts(answer.text, cut=cut)
    # Small models repeat themselves, and a reader gains nothing from that.
    distinct = [raw for raw in dict.fromkeys(written.facts) if _fits(raw.entity, raw.attribute, raw.value)]
    notes, unknowns = (tuple(filter(_fits, texts)) for texts in (written.notes, written.unknowns))
    facts = tuple(_resolved(text, distinct))
    whole = Evidence(facts, notes, unknowns, written.complete, "length" if cut else "stop")
    evidence, tokens = _within(prompt, whole, budget)
    outcome = _outcome(reading, written, evidence, tokens)
    return Found(evidence, outcome | {"generated": len(answer.token_ids), "cap_hit": cut})


def _constraint(reading: Reading, parameters: EvidenceParameters) -> Constraint | None:
    if parameters.constraint == "none":
        return None
    grammar = evidence_grammar(list(passages(reading.text)) if parameters.constraint == "quotes" else None)
    return reading.model.grammars.compile(grammar)


def passages(text: str) -> Iterator[str]:
    """Yield what a fact may quote: the document's sentences, rows and lines, long ones in parts."""
    for piece in split(text):
        at = piece.start
        while at < piece.end:
            end = min(piece.end, graphemes.ceil(text, min(at + MAX_QUOTE, piece.end)))
            yield text[at:end].strip()
            at = end


def _resolved(text: str, written: Iterable[RawFact]) -> Iterator[Fact]:
    source = Source(text)
    for raw in written:
        found = source.resolve(raw.quote, raw.entity)
        if len(found.spans) > limits.MAX_FACT_PLACES:
            # What stands everywhere points nowhere.
            found = Resolved((), 0, "unresolved")
        yield Fact(
            entity=raw.entity,
            attribute=raw.attribute,
            value=raw.value,
            match=found.match,
            spans=found.spans,
            chosen=found.chosen,
            supported=supports(raw.quote, raw.value),
        )


def _fits(*texts: str) -> bool:
    """Whether a message may hold these texts."""
    return all(len(text) <= limits.MAX_FACT_CHARACTERS for text in texts)


def _within(prompt: PromptBuilder, evidence: Evidence, budget: int) -> tuple[Evidence, int]:
    """Return as much of the evidence as a reader's budget holds, from the beginning, and the tokens that it takes."""
    while (tokens := prompt.count(evidence_text(evidence))) > budget:
        # What is last was least on the model's mind.
        name = next(name for name in ("unknowns", "notes", "facts") if getattr(evidence, name))
        evidence = msgspec.structs.replace(evidence, **{name: getattr(evidence, name)[:-1]})
    return evidence, tokens


def _outcome(reading: Reading, written: Written, evidence: Evidence, tokens: int) -> dict[str, Scalar]:
    facts = evidence.facts
    return {
        "tokens": tokens,
        "checkpoint": reading.model.profile.model.weights.hex(),
        "facts": len(facts),
        "exact": sum(fact.match == "exact" for fact in facts),
        "folded": sum(fact.match == "folded" for fact in facts),
        "unresolved": sum(fact.match == "unresolved" for fact in facts),
        "ambiguous": sum(len(fact.spans) > 1 for fact in facts),
        "unsupported": sum(not fact.supported for fact in facts),
        "confirmed": sum(fact.confirmed for fact in facts),
        "malformed": written.dropped,
        "repeated": len(written.facts) - len(set(written.facts)),
        "complete": evidence.complete,
    }
