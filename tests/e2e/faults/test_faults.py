"""Either daemon killed, and either frozen, at every stage of a transfer and of an answer.

Whoever waits gets an error of ours within its deadline. Whoever is left has no call open. Nothing half done is visible,
what was committed still answers, and the same send goes through afterwards without moving what had arrived.

By default some of the cases run; ``-m "endurance or not endurance"`` runs every one.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.client import AnswerStream, Piece, Progress, SendReport
from kvferry.core.errors import DeadlineError, KvferryError, TransferError, UnavailableError

pytestmark = pytest.mark.slow

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 6
QUESTION = "What is the access code?"
TOKENS = 6
numbers = itertools.count()

# Four attempts of half a second with their pauses, or one silence; and then what a busy machine adds.
LONGEST_SECONDS = 25.0
# How long the client waits for a word. A sender whose receiver is silent is itself silent for as long as an attempt and
# the pause after it, and must not be given up for that.
IDLE_SECONDS = {"sender": 1.5, "receiver": 4.0}
FAULTS = {"frozen": signal.SIGSTOP, "killed": signal.SIGKILL}
ERRORS = {"frozen": DeadlineError, "killed": UnavailableError}
MOMENTS: dict[str, Callable[[Progress], bool]] = {
    "prefill": lambda event: event.stage == "prefill" and event.done > event.total / 4,
    "offer": lambda event: event.stage == "offer",
    "transfer": lambda event: event.stage == "transfer" and event.done > event.total / 4,
    "commit": lambda event: event.stage == "commit",
}
# Starting a daemon takes seconds, so most that kill one are left to the long run.
BY_DEFAULT = {
    *(("sender", "frozen", stage) for stage in MOMENTS),
    ("sender", "killed", "transfer"),
    ("receiver", "frozen", "offer"),
    ("receiver", "frozen", "transfer"),
    ("receiver", "killed", "transfer"),
    ("receiver", "frozen", "reading"),
    ("receiver", "frozen", "answering"),
    ("receiver", "killed", "answering"),
}


def cases(*lists: Any) -> list[Any]:
    """Return every combination, those that are not among the default ones marked."""
    return [
        pytest.param(*case, id="-".join(case), marks=[] if case in BY_DEFAULT else pytest.mark.endurance)
        for case in itertools.product(*lists)
    ]


@dataclass
class Kept:
    """An artifact that was committed before anything went wrong, and its true answer."""

    artifact_id: str
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def kept(house: Any) -> Kept:
    with house.client() as client:
        report = client.send(text=DOCUMENT, method="B1")
    return Kept(report.artifact_id, house.expected(DOCUMENT, QUESTION, TOKENS))


def answers(house: Any, kept: Kept) -> bool:
    """Ask what was committed before."""
    with house.client() as client:
        return bool(client.ask(kept.artifact_id, QUESTION, max_tokens=TOKENS).token_ids == kept.answer)


def send_until(
    house: Any, text: str, idle: float, moment: Callable[[Progress], bool], act: Callable[[], None]
) -> SendReport | KvferryError:
    """Send, act once at the moment, and return what came of it, within the limit."""
    seen: list[Progress] = []

    def watch(event: Progress) -> None:
        if not seen and moment(event):
            seen.append(event)
            act()

    start = time.monotonic()
    with house.client(idle) as client:
        try:
            outcome: SendReport | KvferryError = client.send(text=text, method="B1", progress=watch)
        except KvferryError as error:
            outcome = error
    assert seen, outcome
    assert time.monotonic() - start < LONGEST_SECONDS
    return outcome


@pytest.mark.parametrize(("role", "fault", "stage"), cases(["sender", "receiver"], FAULTS, MOMENTS))
def test_a_send(house: Any, kept: Kept, role: str, fault: str, stage: str) -> None:
    text = f"Crate {next(numbers)}. {DOCUMENT}"
    victim, before = house.node(role), house.listed()
    outcome = send_until(house, text, IDLE_SECONDS[role], MOMENTS[stage], lambda: victim.signal(FAULTS[fault]))
    # Only what was asked of the receiver last may have been done before the fault.
    if stage != "commit":
        assert isinstance(outcome, ERRORS[fault]), outcome
    if role == "sender":
        assert answers(house, kept)
    victim.mend()
    assert house.settled()

    # All or nothing, and what was committed is still there.
    now = house.listed()
    assert now == before or (stage == "commit" and len(now - before) == 1)
    assert answers(house, kept)
    with house.client() as client:
        again = client.send(text=text, method="B1")
        assert now - before <= {again.artifact_id}
        assert again.reused or (role, stage) == ("sender", "prefill")
        if stage == "transfer":
            # All of it may have arrived before the fault, which comes some time after what the client saw.
            assert again.moved_bytes < again.payload_bytes
        if now != before:
            assert again.moved_bytes == 0
        assert again.ask(QUESTION, max_tokens=TOKENS).token_ids == house.expected(text, QUESTION, TOKENS)
    assert house.listed() == before | {again.artifact_id}


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_send_while_a_daemon_sleeps_for_a_moment(house: Any, role: str) -> None:
    """No deadline is so short that a pause breaks it, or a retry mends what it broke: the send goes through."""
    text = f"Crate {next(numbers)}. {DOCUMENT}"
    victim = house.node(role)

    def nod() -> None:
        victim.signal(signal.SIGSTOP)
        time.sleep(0.3)
        victim.signal(signal.SIGCONT)

    outcome = send_until(house, text, IDLE_SECONDS["receiver"], MOMENTS["transfer"], nod)
    assert isinstance(outcome, SendReport), outcome
    assert outcome.moved_bytes == outcome.payload_bytes
    with house.client() as client:
        expected = house.expected(text, QUESTION, TOKENS)
        assert client.ask(outcome.artifact_id, QUESTION, max_tokens=TOKENS).token_ids == expected


class Listener(threading.Thread):
    """Reads an answer to its end, whatever that is."""

    def __init__(self, stream: AnswerStream) -> None:
        super().__init__()
        self.stream = stream
        self.pieces: list[Piece] = []
        self.first = threading.Event()
        self.error: KvferryError | None = None

    def run(self) -> None:
        try:
            for piece in self.stream:
                self.pieces.append(piece)
                self.first.set()
        except KvferryError as error:
            self.error = error
            self.first.set()


@pytest.fixture(scope="module")
def long_text(house: Any) -> Iterator[str]:
    """Send a text that the receiver reads for every question, and return its id."""
    with house.client() as client:
        yield client.send(text=DOCUMENT * 6, method="A1").artifact_id


@pytest.mark.parametrize(("role", "fault", "stage"), cases(["receiver"], FAULTS, ["reading", "answering"]))
def test_an_answer(house: Any, kept: Kept, long_text: str, role: str, fault: str, stage: str) -> None:
    artifact_id = long_text if stage == "reading" else kept.artifact_id
    victim, before = house.node(role), house.listed()
    options = {"max_tokens": 2500, "temperature": 1.0, "seed": next(numbers)}
    with house.client(4.0) as client, client.stream(artifact_id, QUESTION, **options) as stream:
        listener = Listener(stream)
        listener.start()
        if stage == "answering":
            assert listener.first.wait(20)
        else:
            while not victim.figure("kvferry_worker_queue_depth"):
                assert listener.is_alive()
        victim.signal(FAULTS[fault])
        start = time.monotonic()
        listener.join(LONGEST_SECONDS)
        assert time.monotonic() - start < LONGEST_SECONDS
        # It broke where it was meant to, and what came of it is no answer.
        assert isinstance(listener.error, ERRORS[fault]), listener.error
        assert bool(listener.pieces) == (stage == "answering")
        with pytest.raises(TransferError, match="not complete"):
            _ = stream.answer
    victim.mend()
    assert house.settled()
    assert house.listed() == before
    assert answers(house, kept)
    with house.client() as client:
        expected = house.expected(DOCUMENT * 6, QUESTION, TOKENS)
        assert client.ask(long_text, QUESTION, max_tokens=TOKENS).token_ids == expected
