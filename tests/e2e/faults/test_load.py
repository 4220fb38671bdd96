"""Eight clients at once, sending and asking for minutes: every answer is the local one, and health checks stay quick.

KVFERRY_LOAD_SECONDS says for how long; three minutes unless it does.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Client
from kvferry.engine.model import LoadedModel

# Read before the fixture that takes such variables away.
SECONDS = float(os.environ.get("KVFERRY_LOAD_SECONDS", "180"))
pytestmark = [pytest.mark.endurance, pytest.mark.timeout(SECONDS + 600)]

CLIENTS = 8
DOCUMENTS = 4
QUESTIONS = ("What is the access code?", "Who keeps the keys?", "When does it open?")
METHODS = ("A1", "A7", "B0", "B1", "B1", "B1")
TOKENS = 6
HEALTH_MS = 100.0
# A process of its own: in this one the clients' threads would be measured as well.
HEALTH = """
import json, sys, time
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvferry.core import addresses, channel

opened = [channel.open_blocking(addresses.parse(text, "peer")) for text in sys.argv[1:]]
stubs = [health_pb2_grpc.HealthStub(one) for one in opened]
print("ready", flush=True)
taken = []
until = time.monotonic() + float(sys.stdin.readline())
while time.monotonic() < until:
    for stub in stubs:
        start = time.perf_counter()
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status
        taken.append((time.perf_counter() - start) * 1000)
        assert status == health_pb2.HealthCheckResponse.SERVING
    time.sleep(0.02)
print(json.dumps(taken))
"""


def document(client: int, number: int) -> str:
    return f"Notes {client}/{number}. " + "The access code of the north warehouse is 4417. " * (number + 1)


@dataclass
class Figures:
    """Milliseconds of everything that was done, and what came out wrong."""

    send: list[float] = field(default_factory=list)
    ask: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def work(client: Client, number: int, truth: dict[tuple[str, str], tuple[int, ...]], figures: Figures) -> None:
    """Send and ask until the time is up; some artifacts are dropped, so that they move again."""
    chance = random.Random(number)  # noqa: S311
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        text = document(number, chance.randrange(DOCUMENTS))
        start = time.perf_counter()
        report = client.send(text=text, method=chance.choice(METHODS))
        figures.send.append((time.perf_counter() - start) * 1000)
        for question in chance.sample(QUESTIONS, chance.randint(1, len(QUESTIONS))):
            start = time.perf_counter()
            ids = report.ask(question, max_tokens=TOKENS).token_ids
            figures.ask.append((time.perf_counter() - start) * 1000)
            if ids != truth[text, question]:
                figures.wrong.append(f"{report.method} {text[:20]} {question}: {ids}")
        if chance.random() < 0.5:
            client.drop(report)


def quantiles(values: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=100)
    return cuts[49], cuts[98], max(values)


def test_eight_clients(
    node: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    local_answer: Callable[..., tuple[int, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = [
        node("receiver", tiny_model_dir(), cache_bytes=4 * 2**20),
        node("sender", tiny_model_dir(), chunk_bytes=4096, cache_bytes=4 * 2**20),
    ]
    for one in nodes:
        one.ready()
    truth = {
        (document(client, number), question): local_answer(tiny_model(), document(client, number), question, TOKENS)
        for client in range(CLIENTS)
        for number in range(DOCUMENTS)
        for question in QUESTIONS
    }
    assert len(set(truth.values())) > CLIENTS
    figures = Figures()

    def run(number: int) -> None:
        with Client(sender=nodes[1].address, receiver=nodes[0].address) as client:
            try:
                work(client, number, truth, figures)
            except Exception as error:
                figures.failed.append(repr(error))
                raise

    with subprocess.Popen(
        [sys.executable, "-c", HEALTH, *(one.address for one in nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as health:
        assert health.stdout is not None
        assert health.stdin is not None
        assert health.stdout.readline() == "ready\n"
        health.stdin.write(f"{SECONDS}\n")
        health.stdin.flush()
        threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        checks = json.loads(health.stdout.readline())

    assert figures.failed == []
    assert figures.wrong == []
    with capsys.disabled():
        print(f"\n{CLIENTS} clients, {SECONDS:g} s")
        for name, values in (("send", figures.send), ("ask", figures.ask), ("health", checks)):
            middle, high, most = quantiles(values)
            print(f"{name}: {len(values)} calls, p50 {middle:.1f} ms, p99 {high:.1f} ms, longest {most:.1f} ms")
    assert all(one.settled() for one in nodes)
    assert max(checks) < HEALTH_MS
