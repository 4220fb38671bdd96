"""Daemons as child processes: started together, addressed once they listen, stopped whatever happens."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvferry.core.errors import UnavailableError

_STOP_SECONDS = 15.0
_SHOWN_LOG_LINES = 5


@dataclass(frozen=True)
class Daemon:
    """A daemon that is starting or running."""

    role: str
    process: subprocess.Popen[str]
    log: IO[str]

    def address(self) -> str:
        """Wait until it listens and return host:port.

        Raises:
            UnavailableError: when it ends before that; the message holds the end of its log.
        """
        if self.process.stdout is None:
            raise UnavailableError(f"{self.role}: its output is not connected")
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait(_STOP_SECONDS)
            self.log.seek(0)
            tail = " | ".join(text.strip() for text in self.log.readlines()[-_SHOWN_LOG_LINES:])
            raise UnavailableError(f"{self.role}: ended with exit code {code} before it listened: {tail}")
        return str(json.loads(line)["address"])


def start(role: str, options: Mapping[str, str]) -> Daemon:
    """Start ``kvferry sender`` or ``kvferry receiver`` on a free loopback port.

    Args:
        role: "sender" or "receiver".
        options: command-line options by name, without dashes.
    """
    arguments = [item for name, value in options.items() for item in (f"--{name}", value)]
    log = tempfile.TemporaryFile("w+", encoding="utf-8", prefix=f"kvferry-{role}-")  # noqa: SIM115  (lives as long as the daemon)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvferry.cli", role, "--listen", "127.0.0.1:0", "--json", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    return Daemon(role, process, log)


@contextlib.contextmanager
def running(role: str, options: Mapping[str, str]) -> Iterator[str]:
    """Run one daemon for the block and yield its address; see ``start``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        daemon = start(role, options)
        stack.callback(stop, daemon)
        yield daemon.address()


@contextlib.contextmanager
def pair(model: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Run a sender and a receiver with the same model.

    Args:
        model: what both load.
        folder: for their stores.

    Yields:
        The addresses of sender and receiver.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        daemons = []
        for role in ("sender", "receiver"):
            daemon = start(role, {"model": model, "store": str(folder / role)})
            stack.callback(stop, daemon)
            daemons.append(daemon)
        yield daemons[0].address(), daemons[1].address()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block like an error: by default the process would go, and its daemons stay."""
    if threading.current_thread() is not threading.main_thread():
        # Only there signals can be handled; whoever started this thread looks after it.
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(daemon: Daemon) -> None:
    """Ask a daemon to end, and end it if it does not."""
    daemon.process.terminate()
    try:
        daemon.process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        daemon.process.kill()
        daemon.process.wait()
    if daemon.process.stdout is not None:
        daemon.process.stdout.close()
    daemon.log.close()
