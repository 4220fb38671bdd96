"""How long choosing rows takes beside what it is measured against, and what a smaller cache saves afterwards.

Every figure is a ratio to a floor of the same run, arms taking turns: methods that score by keys alone, or not at all,
against the prefill; methods that look at the queries of a window, against one forward of that window; decoding and a
question on a selected cache, against the dense cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvferry.ablations.speed.ttft import document
from kvferry.core.progress import finish
from kvferry.engine import model_store
from kvferry.engine.cache import PrefixCache
from kvferry.engine.model import LoadedModel, load
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.sender import registry
from kvferry.sender.kv import probes
from kvferry.sender.reading import Reading

TOKENS = 1024
QUESTION = "What is the access code of the north warehouse?"
SCORE_FREE = ("B3", "B4", "streamingllm", "l2norm", "keydiff")
WINDOW = ("B5", "B6", "tova", "chunkkv", "adakv")
KEPT = 0.25
_DECODED = 16


@dataclass(frozen=True)
class Row:
    """One arm.

    Attributes:
        arm: a method's id, or what was done on its cache.
        ms: median over the turns.
        floor: what it is measured against.
        ratio: to the floor's median.
    """

    arm: str
    ms: float
    floor: str
    ratio: float


def run(model: str, tokens: int, turns: int, advance: Callable[[str, float], None]) -> list[Row]:
    """Measure every arm.

    Args:
        model: directory, catalogue name or hub id.
        tokens: prefix length.
        turns: measurements an arm.
        advance: told what happens and which share of the whole is done.

    Raises:
        KvferryError: when the model does not load or a method refuses.
    """
    bench = _Bench(load(str(model_store.resolve(model))), tokens)
    arms = bench.arms()
    seen: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for number, (name, measure) in enumerate(arms.items()):
            advance(f"turn {turn} of {turns}: {name}", (turn + number / len(arms)) / (turns + 1))
            elapsed = _time(measure)
            # The first turn fills caches of MLX's own.
            if turn:
                seen[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return [Row(name, ms, floor, ms / medians[floor]) for name, ms in medians.items() for floor in (_floor(name),)]


def _floor(arm: str) -> str:
    if arm in SCORE_FREE:
        return "prefill"
    if arm in WINDOW:
        return "window forward"
    for kind in ("decode", "question"):
        if arm.startswith(kind):
            return f"{kind}, dense"
    return arm


class _Bench:
    """A model that has read a document, and what is done with it."""

    def __init__(self, model: LoadedModel, tokens: int) -> None:
        self._model = model
        self._residency = Residency(2**33)
        self._text = document(model, tokens)
        self._reading = Reading(model, self._residency, self._text, DEFAULT_SYSTEM, QUESTION)
        self._dense: PrefixCache = finish(self._reading.prefill())
        self._probe = probes.instruction_ids(model)
        self._question = model.prompt.fresh(QUESTION)

    def arms(self) -> dict[str, Callable[[], object]]:
        """Return what is measured, in the order of a turn."""
        quarter, pyramid = self._make("B3"), self._make("B6")
        return {
            "prefill": lambda: finish(self._model.prefill(self._reading.ids)),
            "window forward": lambda: self._run(self._probe, self._dense),
            **{name: lambda name=name: self._make(name) for name in (*SCORE_FREE, *WINDOW)},  # type: ignore[misc]
            "decode, dense": lambda: self._decode(self._dense),
            "decode, B3 at a quarter": lambda: self._decode(quarter),
            "question, dense": lambda: self._run(self._question, self._dense),
            "question, B6": lambda: self._run(self._question, pyramid),
        }

    def _make(self, name: str) -> PrefixCache:
        method = registry.find(name)
        given = registry.check_parameters(method, {"budget": KEPT})
        material: Any = finish(method.make(self._reading, given))
        mx.eval(material.cache.arrays)
        cache: PrefixCache = material.cache
        return cache

    def _decode(self, cache: PrefixCache) -> None:
        branches = cache.branch(_DECODED)
        for token in range(_DECODED):
            mx.eval(self._model.forward([token + 5], branches))

    def _run(self, ids: list[int], cache: PrefixCache) -> None:
        mx.eval(self._model.forward(ids, cache.branch(len(ids))))


def _time(measure: Callable[[], object]) -> float:
    start = time.perf_counter()
    measure()
    return (time.perf_counter() - start) * 1000
