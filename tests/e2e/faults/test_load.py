"""Eight clients at once, sending and asking for minutes: every answer is the local one, and health checks stay quick.

KVFERRY_LOAD_SECONDS says for how long; three minutes unless it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
# Processes of their own: in this one the clients' threads would be measured as well. The bystander has nothing else to
# do, so that its delays are the machine's.
BYSTANDER = """
import asyncio
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from kvferry.core import channel

async def serve():
    server = grpc.aio.server(options=channel.server_options())
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.sleep(100000)

asyncio.run(serve())
"""
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
    row = []
    for stub in stubs:
        start = time.perf_counter()
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status
        row.append((time.perf_counter() - start) * 1000)
        assert status == health_pb2.HealthCheckResponse.SERVING
    taken.append(row)
    time.sleep(0.02)
print(json.dumps(taken))
"""
# How long before and after a check the bystander's delays excuse it.
NEAR = 20


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


@contextlib.contextmanager
def program(code: str, *arguments: str) -> Iterator[Any]:
    """Run a program with its input and output connected, and end it."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes) as process:
        yield process
        process.kill()


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
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

    with contextlib.ExitStack() as stack:
        bystander = stack.enter_context(program(BYSTANDER))
        addresses = [bystander.stdout.readline().strip(), *(one.address for one in nodes)]
        health = stack.enter_context(program(HEALTH, *addresses))
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
        machine, *daemons = zip(*checks, strict=True)
        named = {"send": figures.send, "ask": figures.ask, "health, receiver": daemons[0], "health, sender": daemons[1]}
        for name, values in {**named, "health, idle bystander": machine}.items():
            middle, high, most = quantiles(values)
            print(f"{name}: {len(values)} calls, p50 {middle:.1f} ms, p99 {high:.1f} ms, longest {most:.1f} ms")
    assert all(one.settled() for one in nodes)
    excuses = [max(machine[max(at - NEAR, 0) : at + NEAR]) for at in range(len(machine))]
    late = [(max(row[1:]), excuse) for row, excuse in zip(checks, excuses, strict=True) if max(row[1:]) > HEALTH_MS]
    assert [pair for pair in late if pair[0] > HEALTH_MS + pair[1]] == []
    # And on the whole, whatever the machine did.
    assert all(statistics.median(values) < HEALTH_MS / 4 for values in daemons)
