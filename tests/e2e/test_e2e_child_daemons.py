"""Daemons that a command starts for itself end with it, however it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# A shell has what it starts in the background ignore SIGINT, and these tests with all that they start.
SCRIPT = """
import signal, sys, time
from pathlib import Path
from kvferry.cli import processes

signal.signal(signal.SIGINT, signal.default_int_handler)
with processes.pair(sys.argv[1], Path(sys.argv[2])) as (sender, receiver):
    print(sender, receiver, flush=True)
    time.sleep(300)
"""


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def is_gone(address: str) -> bool:
    until = time.monotonic() + 20
    while listens(address):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_daemon_behind(tiny_model_dir: Callable[..., Path], tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_model_dir()), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            listening = process.stdout.readline().split()
            assert len(listening) == 2
            assert all(map(listens, listening))
            process.send_signal(number)
            # Python itself ends by SIGINT once the block has been left.
            assert process.wait(40) == (128 + number if number == signal.SIGTERM else -number)
            assert all(map(is_gone, listening))
        finally:
            process.kill()
