"""What a model wrote, read as facts: strict JSON as far as it goes, and never a guess about what was to follow.

A text that ends early, or that is no JSON from some place on, is taken up to that place: what was complete there is as
the model wrote it, and what was not is left out. Nothing is repaired, because half a value reads like a whole one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.core import limits

_FIELDS = ("entity", "attribute", "value", "quote")
# No possessive groups, with which the library goes wrong before Python 3.11.5.
_SPACE = r"[ \t\n\r]*+"
_STRING = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*"'
_NUMBER = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?"
# What Python's parser takes for numbers and JSON does not is `foreign`.
_VALUE = re.compile(
    rf"{_SPACE}(?:(?P<string>{_STRING})|(?P<open>[{{\[])|(?P<plain>{_NUMBER}|true|false)|(?P<null>null)"
    rf"|(?P<foreign>NaN|-?Infinity))"
)
_KEY = re.compile(rf"{_SPACE}(?P<key>{_STRING}){_SPACE}:")
_CLOSE = {"{": re.compile(rf"{_SPACE}\}}"), "[": re.compile(rf"{_SPACE}\]")}
_COMMA = re.compile(rf"{_SPACE},")
_MEMBER = rf"{_SPACE}{_STRING}{_SPACE}:"
_BEGIN = re.compile(rf"\{{{_MEMBER}|\[{_SPACE}\{{(?:{_SPACE}\}}|{_MEMBER})")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class RawFact:
    """One fact in the model's own words; no field is blank.

    Attributes:
        value: a number, true or false is here as it was spelled.
        quote: said to stand in the source, which nobody has checked.
    """

    entity: str
    attribute: str
    value: str
    quote: str


@dataclass(frozen=True)
class Written:
    """What could be read.

    Attributes:
        facts: in the order in which they were written.
        notes: strings that are not blank.
        unknowns: likewise.
        complete: whether the model came to its end and all of its object was read.
        dropped: entries of `facts` that were read and are no facts.
    """

    facts: tuple[RawFact, ...]
    notes: tuple[str, ...]
    unknowns: tuple[str, ...]
    complete: bool
    dropped: int


def read_facts(text: str, *, cut: bool) -> Written:
    r"""Read ``{"facts": [{"entity", "attribute", "value", "quote"}], "notes": [...], "unknowns": [...]}``.

    Prose and fences around it are passed over, an array of facts alone will do, and other keys are ignored. The first
    object that has one of the three keys counts. An array counts when it holds a fact's key and no brace stands before
    it: it may be part of something else then. Any text can be read, in time in proportion to its length.
    Reading ends before one more than ``limits.MAX_FACTS`` facts, notes or unknowns.

    A fact is four strings that are not blank. Its value may also be a number, true or false, which is taken as it is
    spelled (``1.50`` stays ``1.50``). An entry is dropped and counted when it is anything else, when it names a key
    twice, when a field holds half a surrogate pair (``\ud83d``), or when NaN or Infinity stands anywhere in it.

    Args:
        text: all that the model wrote.
        cut: whether the limit of tokens stopped it.
    """
    at = 0
    brace = text.find("{")
    while begin := _BEGIN.search(text, at):
        reader = _Reader(_Cursor(text, begin.start()))
        whole = reader.read(alone=begin.start() < brace)
        if reader.known:
            complete = whole and reader.has_facts and not cut
            return Written(tuple(reader.facts), tuple(reader.notes), tuple(reader.unknowns), complete, reader.dropped)
        # What was read is not looked at again, or a deep nest would be read once for every level.
        at = max(reader.cursor.at, begin.start() + 1)
    return Written((), (), (), complete=False, dropped=0)


class _EndsEarlyError(Exception):
    """Raised where the text is no JSON any more."""


@dataclass
class _Cursor:
    """A place in a text. Whoever is given a key or an item takes its value before asking for the next one."""

    text: str
    at: int

    def take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = self.accept(pattern)
        if match is None:
            raise _EndsEarlyError
        return match

    def accept(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def members(self) -> Iterator[str]:
        """Yield the keys of an object that has been opened."""
        for _ in self.items("{"):
            key: str = json.loads(self.take(_KEY)["key"])
            yield key

    def items(self, opening: str = "[") -> Iterator[None]:
        """Yield once for every entry of an array, or an object, that has been opened."""
        if self.accept(_CLOSE[opening]):
            return
        while True:
            yield
            if self.accept(_CLOSE[opening]):
                return
            self.take(_COMMA)

    def leave(self, value: re.Match[str]) -> bool:
        """Pass over the rest of a value, however deep it is; whether all of it is JSON."""
        strict = value.lastgroup != "foreign"
        levels: list[str] = []
        while True:
            first = bool(value["open"])
            if first:
                levels.append(value["open"])
            while levels and self.accept(_CLOSE[levels[-1]]):
                levels.pop()
                first = False
            if not levels:
                return strict
            if not first:
                self.take(_COMMA)
            if levels[-1] == "{":
                self.take(_KEY)
            value = self.take(_VALUE)
            strict = strict and value.lastgroup != "foreign"


@dataclass
class _Reader:
    """Takes one value apart; what it has is as good when the text ends early."""

    cursor: _Cursor
    facts: list[RawFact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknowns: list[str] = field(default_factory=list)
    dropped: int = 0
    known: bool = False
    has_facts: bool = False

    def read(self, *, alone: bool) -> bool:
        """Read evidence, or an array of facts if it stands alone; whether the text had all of the value."""
        try:
            opened = self.cursor.take(_VALUE)
            if opened["open"] == "{":
                self._read_evidence()
            elif alone:
                self._read_facts()
            else:
                self.cursor.leave(opened)
        except _EndsEarlyError:
            return False
        return True

    def _read_evidence(self) -> None:
        seen: set[str] = set()
        for key in self.cursor.members():
            if key in seen:
                raise _EndsEarlyError
            seen.add(key)
            self.known = self.known or key in {"facts", "notes", "unknowns"}
            value = self.cursor.take(_VALUE)
            if key == "facts" and value["open"] == "[":
                self._read_facts()
            elif key in {"notes", "unknowns"} and value["open"] == "[":
                self._read_strings(self.notes if key == "notes" else self.unknowns)
            elif not self.cursor.leave(value):
                raise _EndsEarlyError

    def _read_facts(self) -> None:
        self.has_facts = True
        for _ in self.cursor.items():
            value = self.cursor.take(_VALUE)
            fact = None
            if value["open"] == "{":
                fact = self._read_fact()
            else:
                self.cursor.leave(value)
            if fact is None:
                self.dropped += 1
            elif len(self.facts) == limits.MAX_FACTS:
                raise _EndsEarlyError
            else:
                self.facts.append(fact)

    def _read_fact(self) -> RawFact | None:
        fields: dict[str, str | None] = {}
        good = True
        for key in self.cursor.members():
            self.known = self.known or key in _FIELDS
            good = good and key not in fields
            value = self.cursor.take(_VALUE)
            fields[key] = value["plain"] if key == "value" and value["plain"] else _string(value)
            good = self.cursor.leave(value) and good
        entity, attribute, spelled, quote = (fields.get(name) for name in _FIELDS)
        if not (good and entity and attribute and spelled and quote):
            return None
        return RawFact(entity, attribute, spelled, quote)

    def _read_strings(self, into: list[str]) -> None:
        for _ in self.cursor.items():
            value = self.cursor.take(_VALUE)
            string = _string(value)
            if string is not None and len(into) == limits.MAX_FACTS:
                raise _EndsEarlyError
            if string is not None:
                into.append(string)
            elif not self.cursor.leave(value):
                raise _EndsEarlyError


def _string(value: re.Match[str]) -> str | None:
    """Return a string that is not blank and that every encoding has."""
    if not value["string"]:
        return None
    string: str = json.loads(value["string"])
    return None if not string.strip() or _SURROGATE.search(string) else string
