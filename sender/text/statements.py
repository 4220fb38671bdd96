"""What a model stated, looked up in the document: each statement once, with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.core import limits
from kvferry.core.evidence import Fact
from kvferry.sender.text.facts import RawFact
from kvferry.sender.text.quotes import Resolved, Source, Span, supports

_NOWHERE = Resolved((), 0, "unresolved")


class Statements:
    """Facts in the order of writing. What is said again adds nothing, unless the document confirms only that.

    Attributes:
        too_long: facts that no message may hold.
        repeated: statements that had been made before.
    """

    def __init__(self, source: Source, places: Mapping[str, Span]) -> None:
        """Begin without a fact; ``places`` says of quotes that were given to the model where they come from."""
        self.too_long = 0
        self.repeated = 0
        self._source = source
        self._places = places
        self._read = 0
        self._facts: dict[tuple[str, str, str], Fact] = {}

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What was stated, each statement once."""
        return tuple(self._facts.values())

    def read(self, written: Sequence[RawFact]) -> None:
        """Take in what is new of everything that was written so far."""
        for raw in written[self._read :]:
            self._add(raw)
        self._read = len(written)

    def _add(self, raw: RawFact) -> None:
        statement = raw.entity, raw.attribute, raw.value
        if not fits(*statement):
            self.too_long += 1
            return
        earlier = self._facts.get(statement)
        self.repeated += earlier is not None
        if earlier is None or not earlier.confirmed:
            fact = self._resolved(raw)
            if earlier is None or fact.confirmed:
                self._facts[statement] = fact

    def _resolved(self, raw: RawFact) -> Fact:
        found = self._look_up(raw)
        words = self._source.text[slice(*found.spans[found.chosen])] if found.spans else raw.quote
        return Fact(
            entity=raw.entity,
            attribute=raw.attribute,
            value=raw.value,
            match=found.match,
            spans=found.spans,
            chosen=found.chosen,
            supported=supports(words, raw.value),
        )

    def _look_up(self, raw: RawFact) -> Resolved:
        place = self._places.get(raw.quote)
        if place is None:
            found = self._source.resolve(raw.quote, raw.entity)
            # What stands everywhere points nowhere.
            return found if len(found.spans) <= limits.MAX_FACT_PLACES else _NOWHERE
        found = self._source.at(place)
        return found if len(found.spans) <= limits.MAX_FACT_PLACES else Resolved((place,), 0, "exact")


def fits(*texts: str) -> bool:
    """Whether a message may hold these texts."""
    return all(len(text) <= limits.MAX_FACT_CHARACTERS for text in texts)
