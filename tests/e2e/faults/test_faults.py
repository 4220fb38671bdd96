"""Either daemon killed, and either frozen, at every stage of a transfer and of an answer.

Whoever waits gets an error of ours within its deadline. Whoever is left has no call open. Nothing half done is visible,
what was committed still answers, and the same send goes through afterwards without moving what had arrived.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.client import Progress, SendReport
from kvferry.core.errors import DeadlineError, KvferryError, NotFoundError, UnavailableError

KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 6
QUESTION = "What is the access code?"
TOKENS = 6
# How long the client waits for a word. Between two words of its own the sender is silent for up to its deadline and the
# longest pause between two attempts.
IDLE_SECONDS = 3.0
# Four attempts of half a second with their pauses, or one silence; and then what a busy machine adds.
LONGEST_SECONDS = 20.0
numbers = itertools.count()


@dataclass
class Kept:
    """An artifact that was committed before anything went wrong."""

    artifact_id: str
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def kept(house: Any) -> Kept:
    with house.client() as client:
        report = client.send(text=DOCUMENT, method="B1")
        expected = house.expected(DOCUMENT, QUESTION, TOKENS)
        assert report.ask(QUESTION, max_tokens=TOKENS).token_ids == expected
    return Kept(report.artifact_id, expected)


Moment = Callable[[Progress], bool]
MOMENTS: dict[str, Moment] = {
    "prefill": lambda event: event.stage == "prefill" and event.done > event.total / 4,
    "offer": lambda event: event.stage == "offer",
    "transfer": lambda event: event.stage == "transfer" and event.done > event.total / 4,
    "commit": lambda event: event.stage == "commit",
}
ANSWERS = {FREEZE: DeadlineError, KILL: UnavailableError}


def send_until(house: Any, text: str, moment: Moment, act: Callable[[], None]) -> SendReport | KvferryError:
    """Send, act once at the moment, and return what came of it, within the limit."""
    seen: list[Progress] = []

    def watch(event: Progress) -> None:
        if not seen and moment(event):
            seen.append(event)
            act()

    start = time.monotonic()
    with house.client(IDLE_SECONDS) as client:
        try:
            outcome: SendReport | KvferryError = client.send(text=text, method="B1", progress=watch)
        except KvferryError as error:
            outcome = error
    assert seen, outcome
    assert time.monotonic() - start < LONGEST_SECONDS
    return outcome


@pytest.mark.parametrize("stage", MOMENTS)
@pytest.mark.parametrize("number", [FREEZE, KILL], ids=["frozen", "killed"])
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_send(house: Any, kept: Kept, role: str, number: int, stage: str) -> None:
    text = f"Crate {next(numbers)}. {DOCUMENT}"
    victim, before = house.node(role), house.listed()
    outcome = send_until(house, text, MOMENTS[stage], lambda: victim.signal(number))
    if role == "receiver" and stage == "prefill":
        # It took no part yet, and is missed at the offer.
        pass
    if stage != "commit":
        assert isinstance(outcome, ANSWERS[number]), outcome
    victim.mend()
    assert house.settled()

    # All or nothing: only at Commit may the artifact have got there without its sender's knowing.
    now = house.listed()
    assert now == before or (stage == "commit" and len(now - before) == 1)
    with house.client() as client:
        assert client.ask(kept.artifact_id, QUESTION, max_tokens=TOKENS).token_ids == kept.answer
        again = client.send(text=text, method="B1")
        assert now - before <= {again.artifact_id}
        assert again.reused == (stage != "prefill" or role == "receiver")
        if stage == "transfer":
            assert 0 < again.moved_bytes < again.payload_bytes
        if now - before:
            assert again.moved_bytes == 0
        answer = again.ask(QUESTION, max_tokens=TOKENS)
    assert answer.token_ids == house.expected(text, QUESTION, TOKENS)
    assert house.listed() == before | {again.artifact_id}
