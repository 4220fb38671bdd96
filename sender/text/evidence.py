"""A5, structured evidence: the facts of the document as the sender's model writes them, each with its place.

The model writes JSON with a quote for every fact. A quote that stands in the document becomes its place; one that does
not is no quote, and its fact says so. Unless told otherwise, the model is given the quotes, the document's passages by
rank, and kept to the form: left to choose, small models say the same few facts over and over.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from kvferry.core.errors import ModelError
from kvferry.core.evidence import Evidence
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.constrained import Chain, Constraint, Grammar
from kvferry.engine.content import ContentEncoder
from kvferry.engine.generate import Answer
from kvferry.engine.prompt import EVIDENCE_SYSTEM, evidence_task, evidence_text
from kvferry.sender.method import EvidenceMaterial
from kvferry.sender.reading import Reading
from kvferry.sender.text.counted import BudgetParameters, budget_tokens
from kvferry.sender.text.evidence_grammars import (
    MAX_QUOTE,
    MAX_STATED,
    evidence_grammar,
    fact_grammar,
    literal_grammar,
    quotable,
)
from kvferry.sender.text.facts import Written, read_facts
from kvferry.sender.text.generating import check_room, write, writer
from kvferry.sender.text.passages import left_out, passages, ranked_passages
from kvferry.sender.text.quotes import Source, Span
from kvferry.sender.text.selection import too_small
from kvferry.sender.text.statements import Statements, fits

NOTHING = '{"facts":[],"notes":[],"unknowns":[]}'
"""Evidence without a fact, as a model would write it."""
ROOM_FOR_A_FACT = 256
"""Tokens to write that passage by passage are asked for: a passage in most languages, and what is said of it."""


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

    The budget caps what a reader's model is given to read. Passage by passage the sender's writes until that is full,
    or its context; left to itself, it writes as many tokens of the reader's at most.

    Raises:
        ContextOverflowError: when document, instruction, and the budget or passage by passage ``ROOM_FOR_A_FACT`` do
            not fit the context. Nothing is cut silently.
        InvalidRequestError: when the budget does not hold the first fact.
        ModelError: when the model's tokenizer cannot be kept to a form, or nothing in the document can be quoted where
            something must be.
    """
    counter, text = reading.counter, reading.text
    reading.check_length()
    yield Progress("tokenise", 0, len(text))
    budget = budget_tokens(parameters.budget, reading.receiver_tokens)
    task = evidence_task(question, with_form=parameters.constraint == "none")
    source = Source(text)
    # Asked for the facts of nothing, a model makes some up.
    answer, run = Answer(NOTHING, (), "stop"), None
    if text.strip() and parameters.constraint == "passages":
        check_room(reading, EVIDENCE_SYSTEM, task, ROOM_FOR_A_FACT, given=False)
        run = PassageByPassage(counter, source, (yield from ranked_passages(text, question)), budget)
        if not run.places:
            raise _nothing_to_quote(text)
        chain = Chain(reading.model.grammars, run.grammars())
        answer = yield from write(reading, EVIDENCE_SYSTEM, task, budget, chain, filled=lambda: run.read)
    elif text.strip():
        check_room(reading, EVIDENCE_SYSTEM, task, budget)
        answer = yield from write(reading, EVIDENCE_SYSTEM, task, budget, _constraint(reading, parameters))
    cut = answer.finish_reason == "length" or (run is not None and run.cut)
    written = read_facts(answer.text, cut=cut)
    stated = Statements(source, {} if run is None else run.places)
    stated.read(written.facts)
    notes, unknowns = (tuple(filter(fits, texts)) for texts in (written.notes, written.unknowns))
    whole = Evidence(stated.facts, notes, unknowns, written.complete, "length" if cut else "stop")
    evidence, tokens = _within(counter, whole, budget)
    outcome = _outcome(reading, written, stated, evidence, tokens)
    outcome["left_out"] = left_out(text) if parameters.constraint in {"passages", "quotes"} else 0
    return Found(evidence, outcome | {"generated": len(answer.token_ids), "cap_hit": evidence.stop == "length"})


class PassageByPassage:
    """Has the model say one fact of each passage, until a reader's budget is full.

    Attributes:
        places: what there is to quote, the best first, and where each of it stands.
        cut: whether some were left, when the budget was full or for the limit of facts.
        read: tokens of the facts so far, as a reader is given them.
    """

    def __init__(self, counter: ContentEncoder, source: Source, ranked: Iterable[Span], budget: int) -> None:
        places: dict[str, Span] = {}
        for place in ranked:
            places.setdefault(source.text[slice(*place)], place)
        # One more than may be used, to know whether some are left.
        self.places = {passage: places[passage] for passage in islice(quotable(places), MAX_STATED + 1)}
        self.cut = False
        self.read = 0
        self._counter = counter
        self._budget = budget
        self._stated = Statements(source, self.places)

    def grammars(self) -> Generator[Grammar, str, None]:
        """Yield the grammar of each fact, and of the end; is sent what is written."""
        before = '{"facts": ['
        stated = 0
        for passage in islice(self.places, MAX_STATED):
            text = yield fact_grammar(passage, before)
            stated += 1
            if self._is_full(text):
                break
            before = ", "
        self.cut = stated < len(self.places)
        yield literal_grammar("]}")

    def _is_full(self, text: str) -> bool:
        self._stated.read(read_facts(text, cut=True).facts)
        stated_so_far = Evidence(self._stated.facts, (), (), complete=False, stop="length")
        self.read = self._counter.count(evidence_text(stated_so_far))
        return self.read >= self._budget


def _constraint(reading: Reading, parameters: EvidenceParameters) -> Constraint | None:
    if parameters.constraint == "none":
        return None
    if parameters.constraint == "schema":
        return reading.model.grammars.compile(evidence_grammar(None))
    quotes = [reading.text[slice(*passage)] for passage in passages(reading.text)]
    if not any(quotable(quotes)):
        raise _nothing_to_quote(reading.text)
    return reading.model.grammars.compile(evidence_grammar(quotes))


def _nothing_to_quote(text: str) -> ModelError:
    return ModelError(
        f"document: nothing in its {len(text)} characters can be quoted: a passage is a sentence, row or line in which "
        f"something is seen, and no part of a word or number of more than {MAX_QUOTE} characters"
    )


def _within(counter: ContentEncoder, evidence: Evidence, budget: int) -> tuple[Evidence, int]:
    """Return as much of the evidence as a reader's budget holds, from the beginning, and the tokens that it takes.

    Raises:
        InvalidRequestError: when there are facts and it holds none.
    """
    first = evidence.facts[:1]
    while (tokens := counter.count(evidence_text(evidence))) > budget:
        # What is last was least on the model's mind.
        name = next(name for name in ("unknowns", "notes", "facts") if getattr(evidence, name))
        kept = {name: getattr(evidence, name)[:-1]}
        evidence = msgspec.structs.replace(evidence, **kept, complete=False, stop="length")
    if first and not evidence.facts:
        alone = msgspec.structs.replace(evidence, facts=first, notes=(), unknowns=())
        raise too_small(budget, counter.count(evidence_text(alone)), "the first fact")
    return evidence, tokens


def _outcome(
    reading: Reading, written: Written, stated: Statements, evidence: Evidence, tokens: int
) -> dict[str, Scalar]:
    facts = evidence.facts
    return writer(reading) | {
        "tokens": tokens,
        "facts": len(facts),
        "exact": sum(fact.match == "exact" for fact in facts),
        "folded": sum(fact.match == "folded" for fact in facts),
        "unresolved": sum(fact.match == "unresolved" for fact in facts),
        "ambiguous": sum(len(fact.spans) > 1 for fact in facts),
        "unsupported": sum(not fact.supported for fact in facts),
        "confirmed": sum(fact.confirmed for fact in facts),
        "malformed": written.dropped
        + stated.too_long
        + sum(not fits(text) for text in written.notes + written.unknowns),
        "repeated": stated.repeated,
        "complete": evidence.complete,
    }
