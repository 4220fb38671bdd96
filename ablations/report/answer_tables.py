"""Records of answers to tables, for a terminal and for a document."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from kvferry.ablations.answers.questions import Examined
from kvferry.ablations.harness.records import Record
from kvferry.ablations.report.answer_arms import MEASURES, Arm, Comparison, Judged, Key, common, gather, pairs
from kvferry.ablations.report.bootstrap import CONFIDENCE, RESAMPLES, SEED, Interval
from kvferry.ablations.report.markdown import origin, parameters, table

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
    "reading ms",
    "sender ms",
    "first token ms",
    "later ms",
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
Answers are judged as in SQuAD, for all scripts (`ablations/report/scoring.py`): exact match, an accepted answer stands
in the answer, and token F1, in percent. In brackets: {CONFIDENCE:.0%} percentile intervals of {RESAMPLES:,} bootstrap
resamples of documents, then of questions in them, seed {SEED}, where these differ and there are several documents;
differences are paired by question. Decoding is greedy.
A question is *aware* when the method saw it. Wire bytes: the message that an answer is from, and its look-ups; a
question: all that crossed, shared by the questions that one message served. Text / wire: the document's UTF-8 bytes
over the wire bytes. Times are medians. Reading: of the messages for which the sender's model had to read the document;
one that it has read for an earlier message is at hand. Sender: method and encoding. First token: of the first question
asked of a message; later: of the others, for which a cache is at hand and a text is read again. Sender and receiver run
the same model, whose caches travel in its dtype."""


def rows(records: Iterable[Record], model: str, documents: Sequence[Examined]) -> list[tuple[str, ...]]:
    """Return one line of text cells for every setting of a model that has answers, in the order of ``HEADING``."""
    intervals = Comparison()
    return [_row(arm, intervals) for arm in gather((one for one in records if one.model == model), documents)]


def markdown(records: Sequence[Record], documents: Sequence[Examined], command: str, cells: int) -> str:
    """Return a section: what was measured with what, and every model's tables.

    Args:
        records: of one run, at least one.
        documents: that they are about, with the questions by which they are judged.
        command: that was given.
        cells: how many answers it asks for.
    """
    lines = [*origin(records, command), "", _LEGEND]
    finished = sum(record.status == "done" for record in records)
    if finished < cells:
        lines += [
            "",
            f"A part: {finished:,} of {cells:,} answers. Rows may rest on different questions; `n` counts them.",
        ]
    for model, group in groupby(records, key=lambda record: record.model):
        lines += _model(model, list(group), documents)
    return "\n".join(lines)


def failed(records: Iterable[Record]) -> list[str]:
    """Return a line for every way in which a setting failed on a document."""
    counted = Counter(_failure(record) for record in records if record.status == "failed")
    return [f"{text} (answers missing: {count})" for text, count in counted.items()]


def _model(name: str, records: list[Record], documents: Sequence[Examined]) -> list[str]:
    arms, intervals = gather(records, documents), Comparison()
    lines = ["", f"### {name}"]
    if arms:
        questions = {key for arm in arms for key in arm.answers}
        asked_about = {document for document, _ in questions}
        lines += ["", f"Questions: {len(questions)}, on documents: {len(asked_about)}."]
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
        arm.identity[0] if arm.identity[0] == info.name else f"{arm.identity[0]} {info.name}",
        parameters(dict(arm.setting.parameters)),
        info.label,
        "aware" if info.aware else "blind",
        str(count),
        *(_percent(intervals.mean(arm, measure)) for measure in MEASURES.values()),
        f"{wire:,.0f}",
        f"{arm.crossed_bytes / count:,.0f}",
        f"{document / wire:.2f}",
        f"{arm.mean('lookups'):.1f}",
        _milliseconds(arm.reading_ms),
        _milliseconds(statistics.median(answer.figures.sender_ms for answer in arm.messages)),
        _milliseconds(arm.median("first_token_ms", first_ask=True)),
        _milliseconds(arm.median("first_token_ms", first_ask=False)),
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


def _shares(arms: list[Arm], what: str, group: Callable[[Key, Judged], str]) -> list[str]:
    """Return a table of how many answers of each group hold an accepted one."""
    names = sorted({group(*item) for arm in arms for item in arm.answers.items()})
    lines = []
    for arm in arms:
        total, right = Counter[str](), Counter[str]()
        for key, answer in arm.answers.items():
            total[group(key, answer)] += 1
            right[group(key, answer)] += answer.score.contains
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
    # Of answers that are all alike, resampling only finds the same.
    if not interval.low < interval.high:
        return shown[0]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
