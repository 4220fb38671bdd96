"""Records of answers gathered by setting, and what can be said of each and of two of them on the same questions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvferry.ablations.answer_figures import AnswerFigures, of_record, outcome
from kvferry.ablations.bootstrap import Bootstrap, Interval
from kvferry.ablations.markdown import parameters
from kvferry.ablations.records import Record
from kvferry.core.manifest import Scalar

REFERENCE = "A1"
AWARE = "-aware"
CONSTRAINT, FREE = "constraint", "none"
"""The parameter that says what the sender's model was kept to as it wrote, and its value for nothing."""

Measure = Callable[[AnswerFigures], float]
MEASURES: Mapping[str, Measure] = {
    "exact": lambda figures: float(figures.exact),
    "contains": lambda figures: float(figures.contains),
    "F1": lambda figures: figures.f1,
}


@dataclass(frozen=True)
class Arm:
    """One setting's finished answers with one model, at least one. Keys are document and question."""

    method: str
    parameters: tuple[tuple[str, Scalar], ...]
    records: Mapping[tuple[str, str], Record]

    @property
    def words(self) -> str:
        """The setting in a few words."""
        return " ".join(filter(None, (self.method, parameters(dict(self.parameters)))))

    @cached_property
    def answers(self) -> dict[tuple[str, str], AnswerFigures]:
        """The figures by key."""
        return {key: of_record(record) for key, record in self.records.items()}

    @property
    def info(self) -> AnswerFigures:
        """Figures of any answer: name, label and the like are everywhere the same."""
        return next(iter(self.answers.values()))

    def mean(self, name: str) -> float:
        """Return the mean of a figure."""
        return statistics.fmean(getattr(answer, name) for answer in self.answers.values())

    def median(self, name: str) -> float | None:
        """Return the median of a figure, None where no answer has it."""
        found = [value for answer in self.answers.values() if (value := getattr(answer, name)) is not None]
        return float(statistics.median(found)) if found else None

    @cached_property
    def outcomes(self) -> list[dict[str, Scalar]]:
        """What became of the rule, once a message."""
        messages = {self.answers[key].artifact: outcome(record) for key, record in self.records.items()}
        return list(messages.values())

    @property
    def crossed_bytes(self) -> int:
        """What crossed for all answers together: every message once, and every look-up."""
        messages = {answer.artifact: answer.artifact_bytes for answer in self.answers.values()}
        return sum(messages.values()) + sum(answer.lookup_bytes for answer in self.answers.values())


def gather(records: Iterable[Record]) -> list[Arm]:
    """Return the settings of one model's finished records, in the order of the records."""
    found: dict[tuple[str, tuple[tuple[str, Scalar], ...]], dict[tuple[str, str], Record]] = {}
    for record in records:
        if record.status == "done":
            setting = (record.method, tuple(record.parameters.items()))
            found.setdefault(setting, {})[record.document, record.question] = record
    return [Arm(method, given, answers) for (method, given), answers in found.items()]


class Comparison:
    """Intervals over the questions of one model. Draws are made once for every set of questions."""

    def __init__(self) -> None:
        self._draws: dict[tuple[str, ...], Bootstrap] = {}

    def mean(self, arm: Arm, measure: Measure) -> Interval:
        """Return the mean of a measure."""
        return self._bootstrap(arm.answers).mean([measure(answer) for answer in arm.answers.values()])

    def difference(self, first: Arm, second: Arm, measure: Measure) -> Interval:
        """Return the mean of first minus second over the questions that both answered, at least one."""
        keys = common(first, second)
        values = [[measure(arm.answers[key]) for key in keys] for arm in (first, second)]
        return self._bootstrap(keys).difference(*values)

    def _bootstrap(self, keys: Iterable[tuple[str, str]]) -> Bootstrap:
        documents = tuple(document for document, _ in keys)
        if documents not in self._draws:
            self._draws[documents] = Bootstrap(documents)
        return self._draws[documents]


def common(first: Arm, second: Arm) -> list[tuple[str, str]]:
    """Return the questions that both answered."""
    return [key for key in first.answers if key in second.answers]


def pairs(arms: list[Arm]) -> Iterator[tuple[Arm, Arm]]:
    """Yield what is to be compared, the one of interest first.

    These are: aware and blind, constrained and not, both with the same parameters otherwise; and every setting with
    the whole text.
    """
    by_setting = {(arm.method, frozenset(arm.parameters)): arm for arm in arms}
    partners = [(arm, by_setting.get(blind)) for arm in arms for blind in _blind(arm)]
    partners += [(arm, by_setting.get(free)) for arm in arms for free in _unconstrained(arm)]
    whole = by_setting.get((REFERENCE, frozenset()))
    partners += [(arm, whole) for arm in arms if arm is not whole]
    yield from ((arm, other) for arm, other in partners if other is not None and common(arm, other))


def _blind(arm: Arm) -> Iterator[tuple[str, frozenset[tuple[str, Scalar]]]]:
    if arm.method.endswith(AWARE):
        yield arm.method.removesuffix(AWARE), frozenset(arm.parameters)


def _unconstrained(arm: Arm) -> Iterator[tuple[str, frozenset[tuple[str, Scalar]]]]:
    given = dict(arm.parameters)
    if given.get(CONSTRAINT, FREE) != FREE:
        yield arm.method, frozenset((given | {CONSTRAINT: FREE}).items())
