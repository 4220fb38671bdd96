"""Messages of evidence and references: one form of bytes, and places that are in the document."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import evidence, limits
from kvferry.core.errors import ContainerError
from kvferry.core.evidence import Evidence, Fact, Reference, References

NAME = "document.evidence"
LENGTH = 100
FACT = Fact("Greta", "certificate", "30 April", "exact", ((3, 9), (40, 46)), 1, supported=True)
LOST = Fact("Greta", "captain", "Ole", "unresolved", (), 0, supported=False)
ONE = Evidence((FACT, LOST), ("a note",), ("the price",), complete=False, stop="length")


def test_the_bytes_are_json_in_the_order_of_the_fields() -> None:
    assert evidence.to_bytes(ONE) == (
        b'{"facts":[{"entity":"Greta","attribute":"certificate","value":"30 April","match":"exact",'
        b'"spans":[[3,9],[40,46]],"chosen":1,"supported":true},'
        b'{"entity":"Greta","attribute":"captain","value":"Ole","match":"unresolved","spans":[],"chosen":0,'
        b'"supported":false}],"notes":["a note"],"unknowns":["the price"],"complete":false,"stop":"length"}'
    )
    assert evidence.evidence_from_bytes(NAME, evidence.to_bytes(ONE), LENGTH) == ONE


def test_references_hold_no_value_and_nothing_without_a_place() -> None:
    made = evidence.references(ONE)
    assert made == References((Reference("Greta", "certificate", 40, 46),), complete=False, stop="length")
    data = evidence.to_bytes(made)
    assert data == (
        b'{"references":[{"entity":"Greta","attribute":"certificate","start":40,"end":46}],'
        b'"complete":false,"stop":"length"}'
    )
    assert evidence.references_from_bytes(NAME, data, LENGTH) == made


@pytest.mark.parametrize(
    ("match", "supported", "spans", "confirmed"),
    [
        ("exact", True, ((1, 2),), True),
        ("folded", True, ((1, 2),), True),
        ("exact", False, ((1, 2),), False),
        ("unresolved", True, (), False),
    ],
)
def test_a_fact_is_confirmed_by_a_quote_that_holds_its_value(
    match: Any, supported: Any, spans: Any, confirmed: Any
) -> None:
    fact = Fact("a", "b", "c", match, spans, 0, supported=supported)
    assert fact.confirmed is confirmed
    assert fact.place == (spans[0] if spans else None)


def changed(**fields: Any) -> bytes:
    plain = json.loads(evidence.to_bytes(ONE))
    plain["facts"][0] |= fields
    return json.dumps(plain, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spans": [[3, 101]]}, "3..101"),
        ({"spans": [[9, 9]], "chosen": 0}, "9..9"),
        ({"spans": [[9, 3]], "chosen": 0}, "9..3"),
        ({"spans": [[40, 46], [3, 9]]}, "3..9 does not follow 40..46"),
        ({"spans": [[3, 9], [3, 9]]}, "3..9 does not follow 3..9"),
        ({"spans": [[-1, 9]], "chosen": 0}, r"facts\[0\].spans"),
        ({"chosen": 2}, "with 2 places, of which number 2"),
        ({"spans": [], "chosen": 0}, "exact with 0 places"),
        ({"match": "unresolved"}, "unresolved with 2 places"),
        ({"match": "almost"}, "Invalid enum value"),
        ({"value": 3}, "Expected `str`"),
        ({"value": "x" * (limits.MAX_FACT_CHARACTERS + 1)}, "length <="),
        ({"entity": "x" * (limits.MAX_FACT_CHARACTERS + 1)}, "length <="),
        ({"attribute": "x" * (limits.MAX_FACT_CHARACTERS + 1)}, "length <="),
        ({"spans": [[at, at + 1] for at in range(limits.MAX_FACT_PLACES + 1)]}, "length <="),
        ({"quote": "at 30 April"}, "unknown field `quote`"),
    ],
)
def test_what_does_not_hold_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContainerError, match=message) as caught:
        evidence.evidence_from_bytes(NAME, changed(**fields), LENGTH)
    assert caught.value.fields["field"] == NAME


def test_a_place_at_the_very_end_is_in_the_document() -> None:
    assert evidence.evidence_from_bytes(NAME, evidence.to_bytes(ONE), 46) == ONE
    with pytest.raises(ContainerError, match="40..46"):
        evidence.evidence_from_bytes(NAME, evidence.to_bytes(ONE), 45)
    data = evidence.to_bytes(evidence.references(ONE))
    assert evidence.references_from_bytes(NAME, data, 46).references
    with pytest.raises(ContainerError, match="40..46"):
        evidence.references_from_bytes(NAME, data, 45)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + b" ",
        lambda data: data.replace(b'"complete":false', b'"complete": false'),
        lambda data: data.replace(b'"stop":"length"', b'"stop":"stop","stop":"length"'),
        lambda data: data.replace(b'"Greta"', b'"Gr\\u0065ta"', 1),
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"[" * 100_000,
        lambda data: data.replace(b"Ole", b"\xff\xfe\xfd"),
    ],
)
def test_other_bytes_than_the_one_form_are_refused(damage: Any) -> None:
    with pytest.raises(ContainerError, match=f"^section {NAME}: "):
        evidence.evidence_from_bytes(NAME, damage(evidence.to_bytes(ONE)), LENGTH)


def test_what_is_over_a_limit_is_not_written() -> None:
    many = msgspec.structs.replace(ONE, facts=(LOST,) * (limits.MAX_FACTS + 1))
    with pytest.raises(ContainerError, match="evidence: .*facts"):
        evidence.to_bytes(many)
    long, too_many = "x" * (limits.MAX_FACT_CHARACTERS + 1), limits.MAX_FACTS + 1
    for broken in (
        *(msgspec.structs.replace(ONE, **{name: ("n",) * too_many}) for name in ("notes", "unknowns")),
        *(msgspec.structs.replace(ONE, **{name: (long,)}) for name in ("notes", "unknowns")),
        References((Reference("a", "b", 0, 1),) * too_many, complete=True, stop="stop"),
        References((Reference(long, "b", 0, 1),), complete=True, stop="stop"),
        References((Reference("a", long, 0, 1),), complete=True, stop="stop"),
    ):
        with pytest.raises(ContainerError, match="length <="):
            evidence.to_bytes(broken)
    lone = msgspec.structs.replace(ONE, notes=("\ud83d",))
    with pytest.raises(ContainerError, match="evidence: "):
        evidence.to_bytes(lone)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_are_refused(data: bytes) -> None:
    for read in (evidence.evidence_from_bytes, evidence.references_from_bytes):
        with pytest.raises(ContainerError):
            read(NAME, data, LENGTH)


@given(st.data())
def test_bytes_near_a_message_are_a_message_or_refused(data: st.DataObject) -> None:
    good = evidence.to_bytes(ONE)
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(start + 4, len(good))))
    near = good[:start] + data.draw(st.binary(max_size=3) | st.sampled_from([b"0", b"9", b",", b" "])) + good[end:]
    try:
        found = evidence.evidence_from_bytes(NAME, near, LENGTH)
    except ContainerError:
        return
    assert evidence.to_bytes(found) == near


@pytest.mark.parametrize(("start", "end"), [(9, 9), (9, 3)])
def test_a_reference_to_nothing_is_refused(start: int, end: int) -> None:
    data = evidence.to_bytes(References((Reference("a", "b", start, end),), complete=True, stop="stop"))
    with pytest.raises(ContainerError, match=f"{start}..{end}"):
        evidence.references_from_bytes(NAME, data, LENGTH)


texts = st.text(st.characters(codec="utf-8"), max_size=12)
places = st.lists(st.integers(0, LENGTH), min_size=2, max_size=6, unique=True).map(
    lambda cuts: tuple(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


@given(st.lists(st.tuples(texts, texts, texts, places, st.booleans()), max_size=4), st.lists(texts, max_size=2))
def test_every_message_comes_back(facts: list[Any], notes: list[str]) -> None:
    made = tuple(
        Fact(entity, attribute, value, "folded" if spans else "unresolved", spans, max(len(spans) - 1, 0), supported)
        for entity, attribute, value, spans, supported in facts
    )
    one = Evidence(made, tuple(notes), (), complete=True, stop="stop")
    assert evidence.evidence_from_bytes(NAME, evidence.to_bytes(one), LENGTH) == one
    kept = evidence.references(one)
    assert kept.references == tuple(
        Reference(fact.entity, fact.attribute, *fact.spans[-1]) for fact in made if fact.spans
    )
    assert evidence.references_from_bytes(NAME, evidence.to_bytes(kept), LENGTH) == kept
