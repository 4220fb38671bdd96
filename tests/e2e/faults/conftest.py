"""Daemons as processes that are killed, frozen and started again, with every deadline short.

=========  ============================================================================================================
node       factory of daemons that can be started again where they were; ended with the module
house      a sender and a receiver for a whole module, with metrics, and what a client has of them
=========  ============================================================================================================
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvferry.client import Client
from kvferry.engine.model import LoadedModel, load

SECONDS = 60.0
RPC_SECONDS = 0.5
# Much cache a token, so that a short document takes many chunks; and few tokens a step, so that reading takes a while.
SHAPE = {"heads": 8, "kv_heads": 8, "head_dim": 16, "layers": 4}
PREFILL_CHUNK = 2
CHUNK_BYTES = 1024


@dataclass
class Node:
    """One daemon, over all the processes that it is, on one port and one store."""

    role: str
    log: Path
    options: dict[str, object]
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] = field(init=False)
    address: str = ""
    page: str = ""

    def start(self) -> None:
        """Start it, where it was before if it was."""
        given = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", **self.options}
        if self.address:
            given["listen"] = self.address
        arguments = [item for name, value in given.items() for item in (f"--{name.replace('_', '-')}", str(value))]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.launcher, "-m", "kvferry.cli", self.role, "--json", *arguments],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ready(self) -> None:
        """Wait until it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.address, self.page = (json.loads(line)[key] for key in ("address", "metrics"))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def mend(self) -> None:
        """Wake it where it is frozen; where it was killed, start it again."""
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(0.05)
        except subprocess.TimeoutExpired:
            return
        self.end()
        self.start()
        self.ready()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def figure(self, name: str) -> float:
        """Sum a metric up over its labels."""
        with urllib.request.urlopen(f"http://{self.page}/metrics", timeout=SECONDS) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def settled(self, seconds: float = 20.0) -> bool:
        """Wait until no call is left, and no step of one."""
        deadline = time.monotonic() + seconds
        while self.figure("kvferry_rpcs_in_flight") or self.figure("kvferry_worker_queue_depth"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


NodeFactory = Callable[..., Node]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFactory]:
    """Return a factory: ``node("receiver", model_dir, option=value, …)``; it is being started.

    A launcher is what Python runs before it runs the daemon; an environment goes over this process's own.
    """
    folder, nodes = tmp_path_factory.mktemp("nodes"), []

    def start(
        role: str,
        model: Path,
        launcher: tuple[str, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        **options: object,
    ) -> Node:
        name = f"{role}-{len(nodes)}"
        given = {"model": model, "store": folder / name, **options}
        nodes.append(Node(role, folder / f"{name}.log", given, launcher, dict(environment)))
        nodes[-1].start()
        return nodes[-1]

    yield start
    for one in nodes:
        one.end()
    said = [one.log.read_text() for one in nodes]
    assert not [text for text in said if "Traceback" in text], said


@dataclass
class House:
    """Both daemons and what a client sees of them."""

    sender: Node
    receiver: Node
    model: LoadedModel
    local: Callable[..., tuple[int, ...]]

    def client(self, idle: float = SECONDS) -> Client:
        """Return a client that waits ``idle`` seconds for the next word of a stream, and 2 for anything else."""
        return Client(sender=self.sender.address, receiver=self.receiver.address, timeout=2.0, idle_timeout=idle)

    def node(self, role: str) -> Node:
        return {"sender": self.sender, "receiver": self.receiver}[role]

    def listed(self) -> set[str]:
        with self.client() as client:
            return {artifact.artifact_id for artifact in client.artifacts()}

    def expected(self, text: str, question: str, max_tokens: int) -> tuple[int, ...]:
        """What plain mlx-lm answers."""
        return self.local(self.model, text, question, max_tokens)

    def settled(self) -> bool:
        return self.sender.settled() and self.receiver.settled()


@pytest.fixture(scope="module")
def house(node: NodeFactory, tiny_model_dir: Callable[..., Path], local_answer: Any) -> House:
    path = tiny_model_dir(**SHAPE)
    receiver = node("receiver", path, prefill_chunk=PREFILL_CHUNK)
    sender = node(
        "sender", path, prefill_chunk=PREFILL_CHUNK, chunk_bytes=CHUNK_BYTES, rpc_seconds=RPC_SECONDS, grace_seconds=0.0
    )
    for one in (receiver, sender):
        one.ready()
    return House(sender, receiver, load(str(path), prefill_chunk=PREFILL_CHUNK), local_answer)
