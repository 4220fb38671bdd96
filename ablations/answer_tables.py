"""Records of answers to tables, for a terminal and for a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from kvferry.ablations.answer_arms import MEASURES, Arm, Comparison, common, gather, pairs
from kvferry.ablations.answer_figures import AnswerFigures
from kvferry.ablations.bootstrap import CONFIDENCE, RESAMPLES, SEED, Interval
from kvferry.ablations.markdown import origin, parameters, table
from kvferry.ablations.records import Record

HEADING = (
    "method",
    "parameters",
    "label",
    "question",
    "n",
    "exact %",
    "contains %",
    "F1 %",
    "wire bytes",
    "a question",
    "text / wire",
    "look-ups",
    "sender ms",
    "first token ms",
)
EVIDENCE = (
    "facts",
    "exact",
    "folded",
    "unresolved",
    "ambiguous",
    "unsupported",
    "confirmed",
    "malformed",
    "repeated",
    "complete",
)
"""Outcomes of methods whose messages are facts; the last counts messages. See kvferry.sender.text.evidence."""

_LEGEND = f"""\
Answers are judged as in SQuAD, for all scripts (`ablations/scoring.py`): exact match, an accepted answer stands in the
answer, and token F1, in percent. In brackets: {CONFIDENCE:.0%} percentile intervals of {RESAMPLES:,} bootstrap
resamples of documents, then of questions in them, seed {SEED}; differences are paired by question. Decoding is greedy.
A question is *aware* when the method saw it. Wire bytes: the message that an answer is from, and its look-ups; a
question: all that crossed, shared by the questions that one message served. Text / wire: the document's UTF-8 bytes
over the wire bytes. Sender: prefill, method and encoding of a message, without what an earlier message about the
document had read: A5's and A6's settings share one reading, as do all questions of an aware method. Both times are
medians. Sender and receiver run the same model."""


def rows(records: Iterable[Record], model: str) -> list[tuple[str, ...]]:
    """Return one line of text cells for every setting of a model that has answers, in the order of ``HEADING``."""
    intervals = Comparison()
    return [_row(arm, intervals) for arm in gather(record for record in records if record.model == model)]


def markdown(records: Sequence[Record], command: str) -> str:
    """Return a section: what was measured with what, and every model's tables.

    Args:
        records: of one run, at least one.
        command: that was given.
    """
    lines = [*origin(records, command), "", _LEGEND]
    for model, group in groupby(records, key=lambda record: record.model):
        lines += _model(model, list(group))
    return "\n".join(lines)


def failed(records: Iterable[Record]) -> list[str]:
    """Return a line for every way in which a setting failed on a document."""
    counted = Counter(_failure(record) for record in records if record.status == "failed")
    return [f"{text} (answers missing: {count})" for text, count in counted.items()]


def _model(name: str, records: list[Record]) -> list[str]:
    arms, intervals = gather(records), Comparison()
    lines = ["", f"### {name}"]
    if arms:
        questions = {key for arm in arms for key in arm.answers}
        documents = {document for document, _ in questions}
        lines += ["", f"Questions: {len(questions)}, on documents: {len(documents)}."]
        lines += ["", *table(HEADING, [_row(arm, intervals) for arm in arms])]
        lines += _differences(arms, intervals)
        lines += _shares(arms, "document", lambda key, _: key[0])
        lines += _shares(arms, "kind of question", lambda _, answer: answer.kind)
        lines += _evidence(arms)
    notes = [f"- {line}" for line in failed(records)]
    return [*lines, *([""] if notes else []), *notes]


def _row(arm: Arm, intervals: Comparison) -> tuple[str, ...]:
    info, count = arm.info, len(arm.answers)
    wire, document = arm.mean("wire_bytes"), arm.mean("document_bytes")
    return (
        arm.method if arm.method == info.name else f"{arm.method} {info.name}",
        parameters(dict(arm.parameters)),
        info.label,
        "aware" if info.aware else "blind",
        str(count),
        *(_percent(intervals.mean(arm, measure)) for measure in MEASURES.values()),
        f"{wire:,.0f}",
        f"{arm.crossed_bytes / count:,.0f}",
        f"{document / wire:.2f}",
        f"{arm.mean('lookups'):.1f}",
        _milliseconds(arm.median("sender_ms")),
        _milliseconds(arm.median("first_token_ms")),
    )


def _differences(arms: list[Arm], intervals: Comparison) -> list[str]:
    lines = [
        (
            f"{first.words} − {second.words}",  # noqa: RUF001  (the minus sign)
            str(len(common(first, second))),
            *(_percent(intervals.difference(first, second, measure), sign="+") for measure in MEASURES.values()),
        )
        for first, second in pairs(arms)
    ]
    heading = ("difference", "n", *(f"{name} %" for name in MEASURES))
    return ["", "Differences, in points:", "", *table(heading, lines)] if lines else []


def _shares(arms: list[Arm], what: str, group: Callable[[tuple[str, str], AnswerFigures], str]) -> list[str]:
    """Return a table of how many answers of each group hold an accepted one."""
    names = sorted({group(*item) for arm in arms for item in arm.answers.items()})
    lines = []
    for arm in arms:
        total, right = Counter[str](), Counter[str]()
        for key, answer in arm.answers.items():
            total[group(key, answer)] += 1
            right[group(key, answer)] += answer.contains
        lines.append((arm.words, *(f"{right[name]}/{total[name]}" if total[name] else "-" for name in names)))
    return ["", f"Answers that hold an accepted one, by {what}:", "", *table(("method", *names), lines)]


def _evidence(arms: list[Arm]) -> list[str]:
    lines = [
        (arm.words, str(len(arm.outcomes)), *(_total(arm, name) for name in EVIDENCE))
        for arm in arms
        if any(EVIDENCE[0] in outcome for outcome in arm.outcomes)
    ]
    text = "Facts of all messages, what became of their quotes, and how many messages are complete:"
    return ["", text, "", *table(("method", "messages", *EVIDENCE), lines)] if lines else []


def _total(arm: Arm, name: str) -> str:
    """Return the sum of an outcome over the messages."""
    found = [outcome[name] for outcome in arm.outcomes if name in outcome]
    numbers = [value for value in found if isinstance(value, int | float)]
    return f"{sum(numbers):.0f}" if numbers else "-"


def _failure(record: Record) -> str:
    words = " ".join(filter(None, (record.method, parameters(record.parameters))))
    why = f"{record.failure.code}: {record.failure.message}" if record.failure else record.reason
    return f"{record.document}: {words}: {why}"


def _percent(interval: Interval, sign: str = "") -> str:
    shown = [f"{100 * value:{sign}.1f}" for value in interval]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
