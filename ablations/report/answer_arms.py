"""Records of answers judged and gathered by setting, and what can be said of each and of two on the same questions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from kvferry.ablations.answers.figures import AnswerFigures, of_record, outcome
from kvferry.ablations.answers.questions import Examined
from kvferry.ablations.harness.records import Record
from kvferry.ablations.harness.settings import Setting, checked
from kvferry.ablations.report.bootstrap import Bootstrap, Interval
from kvferry.ablations.report.scoring import Score, score
from kvferry.core.manifest import Scalar

REFERENCE = "A1"
AWARE = "-aware"
CONSTRAINT, FREE = "constraint", "none"
"""The parameter that says what the sender's model was kept to as it wrote, and its value for nothing."""

Key = tuple[str, str]
"""Document and question."""


@dataclass(frozen=True)
class Judged:
    """One answer, what it is worth, and the record that holds it."""

    figures: AnswerFigures
    score: Score
    kind: str
    record: Record


Measure = Callable[[Judged], float]
MEASURES: Mapping[str, Measure] = {
    "exact": lambda answer: float(answer.score.exact),
    "contains": lambda answer: float(answer.score.contains),
    "F1": lambda answer: answer.score.f1,
}


@dataclass(frozen=True)
class Arm:
    """One setting's finished answers with one model, at least one."""

    setting: Setting
    answers: Mapping[Key, Judged]

    @property
    def words(self) -> str:
        """The setting in a few words."""
        return self.setting.words

    @cached_property
    def identity(self) -> tuple[str, frozenset[tuple[str, Scalar]]]:
        """The method's id and all its parameters, those that the grid leaves to their defaults among them."""
        method, given = checked(self.setting)
        return method.info.id, frozenset(msgspec.structs.asdict(given).items())

    @property
    def info(self) -> AnswerFigures:
        """Figures of any answer: name, label and the like are everywhere the same."""
        return next(iter(self.answers.values())).figures

    def mean(self, name: str) -> float:
        """Return the mean of a figure."""
        return statistics.fmean(getattr(answer.figures, name) for answer in self.answers.values())

    def median(self, name: str, *, first_ask: bool) -> float | None:
        """Return the median of a figure over messages' first questions or over the later ones, None without any."""
        found = [
            value
            for answer in self.answers.values()
            if answer.figures.first_ask == first_ask and (value := getattr(answer.figures, name)) is not None
        ]
        return float(statistics.median(found)) if found else None

    @cached_property
    def messages(self) -> list[Judged]:
        """One answer a message: messages for different questions are different ones, even where they say the same."""
        found = {
            (answer.figures.artifact, key if answer.figures.aware else None): answer
            for key, answer in self.answers.items()
        }
        return list(found.values())

    @property
    def reading_ms(self) -> float | None:
        """The median over the messages for which the sender read, None when it read for none."""
        read = [one.figures.sender_prefill_ms for one in self.messages if one.figures.sender_prefill_tokens]
        return float(statistics.median(read)) if read else None

    @cached_property
    def outcomes(self) -> list[dict[str, Scalar]]:
        """What became of the rule, once a message."""
        return [outcome(answer.record) for answer in self.messages]

    @property
    def crossed_bytes(self) -> int:
        """What crossed for all answers together: every message once, and every look-up."""
        looked_up = sum(answer.figures.lookup_bytes for answer in self.answers.values())
        return looked_up + sum(answer.figures.artifact_bytes for answer in self.messages)


def gather(records: Iterable[Record], documents: Sequence[Examined]) -> list[Arm]:
    """Judge one model's finished records by the questions of the documents, in the order of the records."""
    found: dict[Setting, dict[Key, Judged]] = {}
    for one in _judged(records, documents):
        setting = Setting(one.record.method, tuple(one.record.parameters.items()))
        found.setdefault(setting, {})[one.record.document, one.record.question] = one
    return [Arm(setting, answers) for setting, answers in found.items()]


def scores(records: Iterable[Record], documents: Sequence[Examined]) -> dict[str, Score]:
    """Return what each finished record's answer is worth, by the record's id; records may be of several models."""
    return {one.record.id: one.score for one in _judged(records, documents)}


def _judged(records: Iterable[Record], documents: Sequence[Examined]) -> Iterator[Judged]:
    questions = {(document.name, asked.question): asked for document in documents for asked in document.questions}
    for record in records:
        if record.status == "done":
            figures, question = of_record(record), questions[record.document, record.question]
            yield Judged(figures, score(figures.prediction, question.answers), question.kind, record)


class Comparison:
    """Intervals over the questions of one model, without width for those about one document.

    Draws are made once for every set of questions.
    """

    def __init__(self) -> None:
        self._draws: dict[tuple[str, ...], Bootstrap] = {}

    def mean(self, arm: Arm, measure: Measure) -> Interval:
        """Return the mean of a measure."""
        return self._interval(arm.answers, [measure(answer) for answer in arm.answers.values()])

    def difference(self, first: Arm, second: Arm, measure: Measure) -> Interval:
        """Return the mean of first minus second over the questions that both answered, at least one."""
        keys = common(first, second)
        return self._interval(keys, [measure(first.answers[key]) - measure(second.answers[key]) for key in keys])

    def _interval(self, keys: Iterable[Key], values: list[float]) -> Interval:
        documents = tuple(document for document, _ in keys)
        if len(set(documents)) == 1:
            # How much documents differ cannot be told from one.
            mean = statistics.fmean(values)
            return Interval(mean, mean, mean)
        if documents not in self._draws:
            self._draws[documents] = Bootstrap(documents)
        return self._draws[documents].mean(values)


def common(first: Arm, second: Arm) -> list[Key]:
    """Return the questions that both answered."""
    return [key for key in first.answers if key in second.answers]


def pairs(arms: list[Arm]) -> Iterator[tuple[Arm, Arm]]:
    """Yield what is to be compared, the one of interest first.

    These are: aware and blind, constrained and not, both with the same parameters otherwise; and every setting with
    the whole text.
    """
    by_identity = {arm.identity: arm for arm in arms}
    partners = [(arm, by_identity.get(blind)) for arm in arms for blind in _blind(arm)]
    partners += [(arm, by_identity.get(free)) for arm in arms for free in _unconstrained(arm)]
    whole = next((arm for arm in arms if arm.identity[0] == REFERENCE), None)
    partners += [(arm, whole) for arm in arms if arm is not whole]
    yield from ((arm, other) for arm, other in partners if other is not None and common(arm, other))


def _blind(arm: Arm) -> Iterator[tuple[str, frozenset[tuple[str, Scalar]]]]:
    method, given = arm.identity
    if method.endswith(AWARE):
        yield method.removesuffix(AWARE), given


def _unconstrained(arm: Arm) -> Iterator[tuple[str, frozenset[tuple[str, Scalar]]]]:
    method, given = arm.identity
    values = dict(given)
    if values.get(CONSTRAINT, FREE) != FREE:
        yield method, frozenset((values | {CONSTRAINT: FREE}).items())
