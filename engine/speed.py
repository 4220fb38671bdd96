"""How fast a model reads and writes on this machine: measured once at the start, then by every real reading."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from kvferry.core.progress import Stopwatch, finish
from kvferry.engine.generate import forward
from kvferry.engine.prefill import read
from kvferry.engine.tensors import scalar

Made = TypeVar("Made")

SMALLEST_READING = 64
"""Tokens below which a real reading tells little: a forward pass has a cost of its own."""
_NEWEST_SHARE = 0.3
_SEED_TOKENS = (16, 64, 256)
_SEED_SECONDS = 0.25


class Speed:
    """Tokens a second of one model. One thread measures; any thread may look."""

    def __init__(self) -> None:
        # Seconds a token, because times add up; 0 is not known.
        self._reading = 0.0
        self._writing = 0.0
        self._seeded = False

    @property
    def prefill_tokens_per_second(self) -> float:
        """How fast a prompt is read; 0 when that was never measured."""
        return 1 / self._reading if self._reading else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """How fast an answer is written, token by token; 0 when that was never measured."""
        return 1 / self._writing if self._writing else 0.0

    def seed(self, reading: float, writing: float) -> None:
        """Begin with what a trial took, in seconds a token. The first real reading counts in its place."""
        self._reading, self._writing, self._seeded = reading, writing, True

    def note(self, tokens: int, seconds: float) -> None:
        """Take a real reading into the average; the newest counts three tenths. A short one is left out."""
        if tokens < SMALLEST_READING or seconds <= 0:
            return
        newest = seconds / tokens
        if self._reading and not self._seeded:
            newest = _NEWEST_SHARE * newest + (1 - _NEWEST_SHARE) * self._reading
        self._reading, self._seeded = newest, False

    def timing(self, steps: Generator[int, None, Made], tokens: int) -> Generator[int, None, Made]:
        """Pass a reading on, and note it once it is complete."""
        watch = Stopwatch()
        made = yield from watch.timing(steps)
        self.note(tokens, watch.seconds)
        return made


def trial(model: Any, vocabulary: int, context: int, chunk: int) -> Speed:
    """Return a model's speed from a few forward passes of growing length.

    Each is four times as long as the one before; there is no further one that would likely take over a quarter of a
    second. A real reading, which is longer, is faster on a GPU.

    Args:
        model: an mlx-lm model.
        vocabulary: token ids are below it.
        context: most tokens that the model takes.
        chunk: tokens a forward pass while reading.
    """
    lengths = sorted({min(tokens, max(context - 1, 1)) for tokens in _SEED_TOKENS})
    # What is compiled and allocated on first use is no part of the speed.
    _read(model, lengths[0], vocabulary, chunk)
    tokens = lengths[0]
    for length in lengths:
        tokens = length
        seconds, cache = _read(model, length, vocabulary, chunk)
        if seconds * 4 > _SEED_SECONDS:
            break
    found = Speed()
    found.seed(seconds / tokens, _write(model, cache))
    return found


def _read(model: Any, tokens: int, vocabulary: int, chunk: int) -> tuple[float, list[Any]]:
    ids = [index % vocabulary for index in range(tokens)]
    start = time.perf_counter()
    cache = finish(read(model, ids, chunk))
    return time.perf_counter() - start, cache


def _write(model: Any, cache: Sequence[Any]) -> float:
    start = time.perf_counter()
    scalar(forward(model, [0], cache)[-1, 0])
    return time.perf_counter() - start
