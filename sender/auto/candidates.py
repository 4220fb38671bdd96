"""Which methods a quality bound allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.choice import Quality
from kvferry.core.manifest import Scalar
from kvferry.sender import registry
from kvferry.sender.method import Method

FORMS = ("kv", "evidence", "text")
"""In the order in which a choice gives way."""

_Named = tuple[str, Mapping[str, Scalar]]
# The answers of the full context. Where two are equally quick, the first one is taken.
_EXACT: tuple[_Named, ...] = (("B1", {}), ("A7", {}), ("A1", {}))
# Packed as wide as loses next to nothing; docs/results.md has the figures.
_NEAR: tuple[_Named, ...] = (("B2", {"bits": 8}), ("B2", {"key_bits": 8, "value_bits": 4}))
# A part of the document: a quarter of the rows, facts, or a quarter of the text.
_REDUCED: tuple[_Named, ...] = (
    ("B9", {"budget": 0.25, "bits": 8}),
    ("B5", {"budget": 0.25}),
    ("A5", {}),
    ("A3", {"budget": 0.25}),
)
ALLOWED: Mapping[Quality, tuple[_Named, ...]] = {
    "exact": _EXACT,
    "near": _EXACT + _NEAR,
    "reduced": _EXACT + _NEAR + _REDUCED,
}
"""Methods and parameters by bound. None looks at the question: what is sent shall answer others as well."""


@dataclass(frozen=True)
class Candidate:
    """A method with its parameters. ``written`` has those that were given."""

    method: Method[Any]
    parameters: msgspec.Struct
    written: str = ""

    @property
    def id(self) -> str:
        """The method's."""
        return self.method.info.id

    @property
    def form(self) -> str:
        """What would cross."""
        return self.method.info.form

    @property
    def order(self) -> int:
        """Where its form stands in the order of giving way."""
        return FORMS.index(self.form)


def allowed(quality: Quality) -> list[Candidate]:
    """Return what a quality bound allows, in order."""
    return [_candidate(name, given) for name, given in ALLOWED[quality]]


def _candidate(name: str, given: Mapping[str, Scalar]) -> Candidate:
    method = registry.find(name)
    written = " ".join(f"{key}={value}" for key, value in given.items())
    return Candidate(method, registry.check_parameters(method, given), written)
