"""Two hundred rounds of everything that can be done and given up: memory and open files of both daemons stay level."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Client, Progress
from kvferry.core.errors import CancelledError, InvalidRequestError, NotFoundError, UnavailableError
from kvferry.engine.model import LoadedModel

pytestmark = [
    pytest.mark.endurance,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 3
QUESTION = "What is the access code?"
ROUNDS = 200
WINDOW = 40
MIB = 2**20
# What the allocators' own slack may come to between two windows. A call that leaks a document, a cache or a payload,
# a hundred kilobytes each, would come to many times this over 120 rounds.
SLACK_BYTES = 8 * MIB


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS"))


class GaveUp(Exception):  # noqa: N818
    """Raised by somebody who wants no more progress."""


def give_up(event: Progress) -> None:
    if event.stage == "transfer" and event.done > event.total / 2:
        raise GaveUp


def round_of(client: Client, other: Client, number: int, expected: Callable[[str], tuple[int, ...]]) -> None:
    """Send, ask, give up, fail and drop."""
    text = f"{number}. {DOCUMENT}"
    # Given up by its client in the middle, then sent whole.
    with pytest.raises(GaveUp):
        client.send(text=text, progress=give_up)
    report = client.send(text=text)
    assert report.reused
    answer = report.ask(QUESTION, max_tokens=4)
    if number % 10 == 0:
        assert answer.token_ids == expected(text)
    # An answer that is left early, one that is cancelled, and one whose client goes away.
    with client.stream(report, QUESTION, max_tokens=2000, temperature=1.0, seed=number) as stream:
        next(stream)
    cancelled = client.stream(report, QUESTION, max_tokens=2000, temperature=1.0, seed=number)
    next(cancelled)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.finish()
    gone = other.stream(report, QUESTION, max_tokens=2000, temperature=1.0, seed=number)
    next(gone)
    other.close()
    # Requests that cannot be, and a receiver that is not there.
    with pytest.raises(InvalidRequestError):
        client.ask(report, QUESTION, max_tokens=0)
    with pytest.raises(InvalidRequestError):
        client.send(text=text, method="B1", no_such_parameter=1)
    text_report = client.send(text=text, method="A1")
    client.drop(report)
    client.drop(text_report)
    with pytest.raises(NotFoundError):
        client.ask(report, QUESTION)


def test_two_hundred_rounds(
    node: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    local_answer: Callable[..., tuple[int, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Budgets that are reached at once: what is kept on purpose must not look like a leak, nor hide one.
    budgets = {"cache_bytes": MIB, "max_store_bytes": 8 * MIB}
    receiver = node("receiver", tiny_model_dir(), grace_seconds=0.0, **budgets)
    sender = node("sender", tiny_model_dir(), chunk_bytes=4096, rpc_seconds=5.0, **budgets)
    nodes = {"receiver": receiver, "sender": sender}
    for one in nodes.values():
        one.ready()
    addresses = {"sender": sender.address, "receiver": receiver.address, "idle_timeout": 60.0}
    figures: dict[str, list[int]] = {f"{what} {role}": [] for role in nodes for what in ("files", "bytes")}

    def expected(text: str) -> tuple[int, ...]:
        return local_answer(tiny_model(), text, QUESTION, 4)

    with Client(**addresses) as client, Client(**addresses, deliver_to="127.0.0.1:9") as nowhere:
        for number in range(ROUNDS):
            round_of(client, Client(**addresses), number, expected)
            if number % 20 == 0:
                with pytest.raises(UnavailableError):
                    nowhere.send(text=f"{number}. {DOCUMENT}")
            for role, one in nodes.items():
                assert one.settled()
                figures[f"files {role}"].append(open_files(one.process.pid))
                figures[f"bytes {role}"].append(resident(one.process.pid))

    medians = {
        name: (statistics.median(values[WINDOW : 2 * WINDOW]), statistics.median(values[-WINDOW:]))
        for name, values in figures.items()
    }
    with capsys.disabled():
        for name, (early, late) in medians.items():
            shown = f"{early / MIB:.1f} MiB, {late / MIB:.1f} MiB" if name.startswith("bytes") else f"{early}, {late}"
            print(f"\n{name}: median of rounds {WINDOW} to {2 * WINDOW}, and of the last {WINDOW}: {shown}", end="")
        print()
    for role in nodes:
        early, late = medians[f"files {role}"]
        assert late <= early + 2
        early, late = medians[f"bytes {role}"]
        assert late <= early + SLACK_BYTES
