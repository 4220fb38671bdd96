"""What a sender found in a document: facts with their places, and references to places without the facts.

Sections ``document.evidence`` and ``document.references`` hold these records as JSON without white space, fields in the
order below. Places are half-open ranges of the document's code points. A quote does not travel: where it was found it
is the document's own text at its place, and where it was not it is no quote.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvferry.core import json_records, limits
from kvferry.core.errors import ContainerError

Text = Annotated[str, Meta(max_length=limits.MAX_FACT_CHARACTERS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Meta(max_length=limits.MAX_FACTS)]
Place = tuple[Count, Count]
Message = TypeVar("Message", bound=msgspec.Struct)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A closed record: an unknown key, a missing key or a wrong type is an error."""


class Fact(_Record, frozen=True):
    """One statement of the sender's model.

    Attributes:
        entity, attribute, value: what it is about, which property, and what that is.
        match: whether the model's quote stands in the document as written ("exact"), up to white space and the writing
            of characters ("folded"), or not at all ("unresolved").
        spans: every place where it stands, ascending; several make the fact ambiguous. Empty when unresolved.
        chosen: which of them is meant.
        supported: whether the quote holds the value; one that it does not hold may be made up.
    """

    entity: Text
    attribute: Text
    value: Text
    match: Literal["exact", "folded", "unresolved"]
    spans: Annotated[tuple[Place, ...], Meta(max_length=limits.MAX_FACT_PLACES)]
    chosen: Count
    supported: bool

    @property
    def place(self) -> Place | None:
        """The place that is meant."""
        return self.spans[self.chosen] if self.spans else None

    @property
    def confirmed(self) -> bool:
        """Whether the document says so: the quote is its own and holds the value."""
        return bool(self.spans) and self.supported


class Evidence(_Record, frozen=True):
    """All that a sender's model wrote.

    Attributes:
        facts: in the order of writing.
        notes, unknowns: remarks, and what the document does not say; neither has a place.
        complete: False when the model was stopped, wrote what cannot be read to its end, or more than the budget holds.
        stop: why it ended: the model ended its turn, or the budget was used up.
    """

    facts: Many[Fact]
    notes: Many[Text]
    unknowns: Many[Text]
    complete: bool
    stop: Literal["stop", "length"]


class Reference(_Record, frozen=True):
    """What a fact is about and where it stands, without the fact."""

    entity: Text
    attribute: Text
    start: Count
    end: Count


class References(_Record, frozen=True):
    """References in the order of writing; ``complete`` and ``stop`` as in ``Evidence``."""

    references: Many[Reference]
    complete: bool
    stop: Literal["stop", "length"]


def references(evidence: Evidence) -> References:
    """Return the places of evidence without its values. Facts without a place have nothing to refer to."""
    found = (Reference(fact.entity, fact.attribute, *fact.place) for fact in evidence.facts if fact.place is not None)
    return References(tuple(found), evidence.complete, evidence.stop)


def to_bytes(message: Evidence | References) -> bytes:
    """Return the content of a section.

    Raises:
        ContainerError: when a text or a list is over its limit.
    """
    kind = type(message)
    try:
        return msgspec.json.encode(msgspec.convert(msgspec.to_builtins(message), kind))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ContainerError(f"{kind.__name__.lower()}: {error}") from error


def evidence_from_bytes(name: str, data: bytes | memoryview, document: int) -> Evidence:
    """Return the evidence of a section.

    Args:
        name: of the section.
        data: its content.
        document: code points of the document.

    Raises:
        ContainerError: when it is no such record, not in its one form, or a place is not in the document.
    """
    found = _decode(name, data, Evidence)
    for fact in found.facts:
        _check_places(name, fact.spans, document)
        if bool(fact.spans) != (fact.match != "unresolved") or fact.chosen >= max(len(fact.spans), 1):
            raise ContainerError(
                f"section {name}: a fact is {fact.match} with {len(fact.spans)} places, of which number {fact.chosen}",
                field=name,
            )
    return found


def references_from_bytes(name: str, data: bytes | memoryview, document: int) -> References:
    """Return the references of a section; arguments and errors are those of ``evidence_from_bytes``."""
    found = _decode(name, data, References)
    for reference in found.references:
        _check_places(name, [(reference.start, reference.end)], document)
    return found


def _decode(name: str, data: bytes | memoryview, kind: type[Message]) -> Message:
    stored = bytes(data)
    try:
        found = json_records.decode(stored, kind)
    except msgspec.MsgspecError as error:
        raise ContainerError(f"section {name}: {error}", field=name) from error
    if msgspec.json.encode(found) != stored:
        raise ContainerError(f"section {name}: not in its one form (order, white space, or a repeated key)", field=name)
    return found


def _check_places(name: str, places: Iterable[Place], document: int) -> None:
    last = (-1, -1)
    for start, end in places:
        if not (start < end <= document and (start, end) > last):
            raise ContainerError(
                f"section {name}: {start}..{end} does not follow {last[0]}..{last[1]} within the document's {document} "
                "characters",
                field=name,
                start=start,
                end=end,
                limit=document,
            )
        last = (start, end)
