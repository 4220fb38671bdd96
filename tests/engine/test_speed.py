"""How fast a model is: a trial at the start, then the average of real readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.progress import finish
from kvferry.engine import speed as speed_module
from kvferry.engine.model import LoadedModel, load
from kvferry.engine.speed import SMALLEST_READING, Speed


def test_nothing_is_known_at_first() -> None:
    fresh = Speed()
    assert (fresh.prefill_tokens_per_second, fresh.decode_tokens_per_second) == (0.0, 0.0)


def test_a_real_reading_takes_the_place_of_the_trial_and_later_ones_are_averaged_by_time() -> None:
    speed = Speed()
    speed.seed(0.5, 0.25)
    assert (speed.prefill_tokens_per_second, speed.decode_tokens_per_second) == (2.0, 4.0)
    speed.note(100, 1.0)
    assert speed.prefill_tokens_per_second == pytest.approx(100)
    speed.note(100, 11.0)
    # Seconds a token are averaged: 0.7 x 0.01 + 0.3 x 0.11.
    assert speed.prefill_tokens_per_second == pytest.approx(1 / 0.04)
    assert speed.decode_tokens_per_second == 4.0


@pytest.mark.parametrize(("tokens", "seconds"), [(SMALLEST_READING - 1, 100.0), (1000, 0.0)])
def test_what_tells_little_is_left_out(tokens: int, seconds: float) -> None:
    speed = Speed()
    speed.seed(0.5, 0.5)
    speed.note(tokens, seconds)
    assert speed.prefill_tokens_per_second == 2.0


def reading(steps: int, seconds: float) -> Generator[int, None, str]:
    for step in range(steps):
        time.sleep(seconds)
        yield step
    return "made"


def test_what_happens_between_the_steps_does_not_count() -> None:
    speed, seen = Speed(), []
    steps = speed.timing(reading(3, 0.01), 300)
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as stop:
            made = stop.value
            break
        time.sleep(0.05)
    assert (seen, made) == ([0, 1, 2], "made")
    # 0.03 s or more, and not 0.18.
    assert 300 / 0.1 < speed.prefill_tokens_per_second < 300 / 0.03


def test_a_reading_that_is_given_up_ends_at_once_and_tells_nothing() -> None:
    closed: list[bool] = []

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    speed = Speed()
    steps = speed.timing(endless(), 300)
    next(steps)
    steps.close()
    assert closed == [True]
    assert speed.prefill_tokens_per_second == 0.0


@pytest.mark.parametrize(
    ("seconds", "lengths", "tokens_per_second"),
    [
        # Quick enough to go on to the longest.
        ({16: 0.01, 64: 0.02, 256: 0.08}, [16, 16, 64, 256], 3200),
        # Another would take 0.4 s.
        ({16: 0.01, 64: 0.1}, [16, 16, 64], 640),
        ({16: 1.0}, [16, 16], 16),
    ],
)
def test_a_trial_grows_until_the_next_pass_would_take_long(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], lengths: list[int], tokens_per_second: float
) -> None:
    read: list[int] = []

    def fake(_: Any, tokens: int, *__: Any) -> tuple[float, list[Any]]:
        read.append(tokens)
        return seconds[tokens], []

    monkeypatch.setattr(speed_module, "_read", fake)
    monkeypatch.setattr(speed_module, "_write", lambda *_: 0.5)
    found = speed_module.trial(None, 100, 4096, 512)
    assert read == lengths
    assert found.prefill_tokens_per_second == pytest.approx(tokens_per_second)
    assert found.decode_tokens_per_second == 2.0


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"context": 20},
        {"model_type": "gemma3_text", "config": {"sliding_window": 32, "sliding_window_pattern": 2}},
    ],
    ids=str,
)
def test_a_model_is_tried_only_where_that_is_asked_for(
    tiny_model_dir: Callable[..., Path], shape: dict[str, Any]
) -> None:
    path = str(tiny_model_dir(**shape))
    tried = load(path, try_speed=True)
    assert tried.speed.prefill_tokens_per_second > 10
    assert tried.speed.decode_tokens_per_second > 1
    assert load(path).speed.prefill_tokens_per_second == 0.0


def test_every_reading_of_a_model_counts(tiny_model_dir: Callable[..., Path]) -> None:
    model: LoadedModel = load(str(tiny_model_dir()))
    finish(model.prefill(list(range(SMALLEST_READING - 1))))
    assert model.speed.prefill_tokens_per_second == 0.0
    finish(model.read(list(range(SMALLEST_READING))))
    first = model.speed.prefill_tokens_per_second
    finish(model.prefill(list(range(2 * SMALLEST_READING))))
    assert 0 < first != model.speed.prefill_tokens_per_second > 0
