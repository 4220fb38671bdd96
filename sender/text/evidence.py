"""A5, structured evidence: the facts of the document as the sender's model writes them, each with its place.

The model writes JSON with a quote for every fact. A quote that stands in the document becomes its place; one that does
not is no quote, and its fact says so. Unless told otherwise, the model is given the quotes, the document's passages by
rank, and kept to the form: left to choose, small models say the same few facts over and over.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from kvferry.core import limits
from kvferry.core.evidence import Evidence, Fact
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.core.words import terms
from kvferry.engine.constrained import Chain, Constraint, Grammar
from kvferry.engine.generate import Answer
from kvferry.engine.prompt import EVIDENCE_SYSTEM, PromptBuilder, evidence_task, evidence_text
from kvferry.sender.method import EvidenceMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text import graphemes
from kvferry.sender.text.counted import BudgetParameters, budget_tokens
from kvferry.sender.text.evidence_grammars import (
    MAX_FACTS,
    MAX_QUOTE,
    evidence_grammar,
    fact_grammar,
    literal_grammar,
    quotable,
)
from kvferry.sender.text.extractive import aware_scores, blind_scores
from kvferry.sender.text.facts import RawFact, Written, read_facts
from kvferry.sender.text.generating import write
from kvferry.sender.text.quotes import Resolved, Source, supports
from kvferry.sender.text.selection import ranked
from kvferry.sender.text.sentences import pieces as split

NOTHING = '{"facts":[],"notes":[],"unknowns":[]}'
"""Evidence without a fact, as a model would write it."""
_STEP = 512


class EvidenceParameters(BudgetParameters, frozen=True):
    """``constraint``: what the model is kept to as it writes.

    "passages": one fact of each passage of the document, the best passage first, with a value copied from it;
    "quotes": facts whose quote is a passage and whose value is copied from it; "schema": the form; "none": nothing.
    """

    constraint: Literal["passages", "quotes", "schema", "none"] = "passages"


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

    The budget caps what a reader's model is given to read. Passage by passage the sender's writes until that is full;
    left to itself, it writes as many tokens at most.

    Raises:
        ContextOverflowError: when document, instruction and budget do not fit the context. Nothing is cut silently.
        ModelError: when the model's tokenizer cannot be kept to a form.
    """
    prompt, text = reading.model.prompt, reading.text
    yield Progress("tokenise", 0, len(text))
    budget = budget_tokens(parameters.budget, prompt.count(text))
    source = Source(text)
    answer, run = Answer(NOTHING, (), "stop"), None
    if parameters.constraint == "passages":
        run = Passages(prompt, source, (yield from ranked_passages(text, question)), budget)
    # Asked for the facts of nothing, a model makes some up.
    if text.strip() and (run is None or run.passages):
        task = evidence_task(question, with_form=parameters.constraint == "none")
        constraint = _constraint(reading, parameters) if run is None else Chain(reading.model.grammars, run.grammars())
        filled = None if run is None else lambda: run.read
        answer = yield from write(reading, EVIDENCE_SYSTEM, task, budget, constraint, filled=filled)
    cut = answer.finish_reason == "length" or (run is not None and run.cut)
    written = read_facts(answer.text, cut=cut)
    facts = tuple(_resolved(source, _distinct(written.facts)))
    notes, unknowns = (tuple(filter(_fits, texts)) for texts in (written.notes, written.unknowns))
    whole = Evidence(facts, notes, unknowns, written.complete, "length" if cut else "stop")
    evidence, tokens = _within(prompt, whole, budget)
    outcome = _outcome(reading, written, evidence, tokens)
    return Found(evidence, outcome | {"generated": len(answer.token_ids), "cap_hit": evidence.stop == "length"})


class Passages:
    """Has the model say one fact of each passage, until a reader's budget is full.

    Attributes:
        passages: what there is to quote, the best first.
        cut: whether some were left, when the budget was full or for the limit of facts.
        read: tokens of the facts so far, as a reader is given them.
    """

    def __init__(self, prompt: PromptBuilder, source: Source, ranked: Iterable[str], budget: int) -> None:
        # One more than may be used, to know whether some are left.
        self.passages = list(islice(quotable(ranked), MAX_FACTS + 1))
        self.cut = False
        self.read = 0
        self._prompt = prompt
        self._source = source
        self._budget = budget
        self._facts: list[Fact] = []

    def grammars(self) -> Generator[Grammar, str, None]:
        """Yield the grammar of each fact, and of the end; is sent what is written."""
        before = '{"facts": ['
        stated = 0
        for passage in self.passages[:MAX_FACTS]:
            text = yield fact_grammar(passage, before)
            stated += 1
            if self._is_full(text):
                break
            before = ", "
        self.cut = stated < len(self.passages)
        yield literal_grammar("]}")

    def _is_full(self, text: str) -> bool:
        stated = _distinct(read_facts(text, cut=True).facts)
        self._facts += _resolved(self._source, stated[len(self._facts) :])
        stated_so_far = Evidence(tuple(self._facts), (), (), complete=False, stop="length")
        self.read = self._prompt.count(evidence_text(stated_so_far))
        return self.read >= self._budget


def ranked_passages(text: str, question: str | None) -> Generator[Progress, None, list[str]]:
    """Return the passages, the best first: as A3 ranks sentences, and for a question that none fits as without one."""
    found: list[str] = []
    words: list[list[str]] = []
    read = 0
    for passage in passages(text):
        if len(found) % _STEP == 0:
            yield Progress("tokenise", read, len(text))
        read += len(passage)
        found.append(passage)
        words.append(terms(passage))
    if question is not None:
        fitting = aware_scores(question, words)
        if fitting.any():
            return [found[at] for at in ranked(fitting) if fitting[at] > 0]
    return [found[at] for at in ranked(blind_scores(found, words))]


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


def _resolved(source: Source, written: Iterable[RawFact]) -> Iterator[Fact]:
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


def _distinct(facts: Iterable[RawFact]) -> list[RawFact]:
    """Return facts that a message may hold, each statement once: a reader gains nothing from the second."""
    first: dict[tuple[str, str, str], RawFact] = {}
    for raw in facts:
        if _fits(*_statement(raw)):
            first.setdefault(_statement(raw), raw)
    return list(first.values())


def _statement(raw: RawFact) -> tuple[str, str, str]:
    return raw.entity, raw.attribute, raw.value


def _fits(*texts: str) -> bool:
    """Whether a message may hold these texts."""
    return all(len(text) <= limits.MAX_FACT_CHARACTERS for text in texts)


def _within(prompt: PromptBuilder, evidence: Evidence, budget: int) -> tuple[Evidence, int]:
    """Return as much of the evidence as a reader's budget holds, from the beginning, and the tokens that it takes."""
    while (tokens := prompt.count(evidence_text(evidence))) > budget:
        # What is last was least on the model's mind.
        name = next(name for name in ("unknowns", "notes", "facts") if getattr(evidence, name))
        kept = {name: getattr(evidence, name)[:-1]}
        evidence = msgspec.structs.replace(evidence, **kept, complete=False, stop="length")
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
        "repeated": len(written.facts) - len({_statement(raw) for raw in written.facts}),
        "complete": evidence.complete,
    }
