"""How far a piece of work is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a stage of a send is. ``stage`` is one of the protocol's names; units are tokens or bytes."""

    stage: str
    done: int
    total: int
