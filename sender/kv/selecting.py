"""What methods that keep some rows have in common: reading, the budget, the selection, the packing.

A method says how rows rank; everything else is done here, the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from kvferry.core.compat import Profile
from kvferry.core.progress import Progress
from kvferry.core.wire import MethodInfo
from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.engine.quantise import Scheme, quantise
from kvferry.engine.renumber import renumber
from kvferry.engine.selection import Positions
from kvferry.sender.kv import budget, capabilities, parameters
from kvferry.sender.kv.parameters import SelectionParameters
from kvferry.sender.kv.sizes import payload_bytes
from kvferry.sender.method import KvMaterial
from kvferry.sender.reading import Reading

Kept = list[list[Positions]]
"""For every layer and KV head the rows that are kept, int32, ascending."""
Keep = Callable[[int], Kept]
"""Tells which rows are kept, given the budget: rows a KV head, averaged over heads where a method spreads them."""


class Calibration(Protocol):
    """What was measured on a model once, for every document."""

    @property
    def digest(self) -> bytes:
        """Of everything in it."""


@dataclass(frozen=True)
class Subject:
    """What a method ranks.

    Attributes:
        cache: the dense cache of the prefix.
        model: the one that made it.
        ids: the prefix.
        question: of the request; only aware methods may look at it.
        calibration: what ``SelectingMethod.calibrated`` returned.
    """

    cache: PrefixCache
    model: LoadedModel
    ids: list[int]
    question: str | None
    calibration: Any = None

    @property
    def rows(self) -> int:
        """T, the rows that every head has."""
        return self.cache.offset

    @property
    def layers(self) -> list[DenseLayer]:
        """The layers with their keys [1, Hk, T, D] and values."""
        return [layer for layer in self.cache.layers if isinstance(layer, DenseLayer)]


class SelectingMethod(ABC):
    """A method that keeps some rows. A subclass gives ``info``, ``parameters`` and ``rank``.

    ``renumbers``: kept rows take the positions 0..R-1.
    ``ragged``: heads of a layer may keep different numbers of rows.
    """

    info: ClassVar[MethodInfo]
    parameters: ClassVar[type[Any]] = SelectionParameters
    ragged: ClassVar[bool] = False

    @abstractmethod
    def rank(self, subject: Subject, given: Any) -> Generator[Progress, None, Keep]:
        """Do what is expensive once. What is returned tells quickly which rows a budget keeps.

        Raises:
            InvalidRequestError: naming the parameter that does not fit.
            ModelError: when a score is not finite.
        """

    def renumbers(self, given: Any) -> bool:
        """Whether kept rows are renumbered."""
        return False

    def observes(self, given: Any) -> bool:
        """Whether rows are ranked by the model's own queries."""
        return False

    def calibrated(self, model: LoadedModel, given: Any) -> Calibration | None:
        """Return what was measured on the model beforehand. Asked before the document is read, so it refuses early."""
        return None

    def shaped_by(self, model: LoadedModel, given: Any) -> tuple[str, ...]:
        """Return the digest of that."""
        found = self.calibrated(model, given)
        return (found.digest.hex(),) if found else ()

    def plan(self, profile: Profile, given: Any) -> Scheme | None:
        """Return how kept rows are packed. What cannot be is refused here, before the document is read.

        Raises:
            InvalidRequestError: naming the parameter that does not fit.
            ModelError: when the model cannot attend such a cache.
        """
        packing = parameters.scheme(given, *parameters.head_dims(profile))
        capabilities.check(self.info.name, "ragged" if self.ragged else "level", packing, profile)
        return packing

    def make(self, reading: Reading, given: Any) -> Generator[Progress, None, KvMaterial]:
        """Read, rank, select and pack."""
        packing = self.plan(reading.model.profile, given)
        if self.observes(given):
            capabilities.check_queries(self.info.name, reading.model.profile)
        calibration = self.calibrated(reading.model, given)
        cache = yield from reading.prefill()
        question = reading.question if self.info.aware else None
        subject = Subject(cache, reading.model, reading.ids, question, calibration)
        yield Progress("method", 0, 1)
        keep = yield from self.rank(subject, given)
        renumbered = self.renumbers(given)

        def size(kept: Kept) -> int:
            return payload_bytes(cache, kept, packing, renumbered=renumbered)

        block = packing.residual if packing and packing.residual else 1
        kept = budget.spend(given.budget, subject.rows, keep, size, block)
        made = self._select(subject, kept, renumbered=renumbered)
        capabilities.check_rows(self.info.name, made, reading.model.profile)
        if packing is not None:
            made = quantise(made, packing)
        yield Progress("method", 1, 1)
        return KvMaterial(made, parameters.encoding(packing), calibration=(calibration.digest,) if calibration else ())

    def _select(self, subject: Subject, kept: Kept, *, renumbered: bool) -> PrefixCache:
        if all(len(rows) == subject.rows for layer in kept for rows in layer):
            return subject.cache
        selected = subject.cache.select([[mx.array(rows) for rows in layer] for layer in kept])
        mx.eval(selected.arrays)
        return renumber(selected, subject.model.rotations) if renumbered else selected


def every_layer(rows: Sequence[Positions], layers: int) -> Kept:
    """Return the same rows per head for every layer."""
    return [list(rows) for _ in range(layers)]
