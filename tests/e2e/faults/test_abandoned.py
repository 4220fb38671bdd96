"""Callers that stop in the middle and never say so: a frozen one is found out, and its place is free again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import channel, errors

CALLER = """
import sys, threading, time
from kvferry.core import addresses, channel
from kvferry.proto.v1 import receiver_service_pb2_grpc as grpc

def nothing():
    time.sleep(1000)
    yield

with channel.open_blocking(addresses.parse(sys.argv[1], "receiver")) as opened:
    call = grpc.ReceiverServiceStub(opened).Put(nothing())
    call.initial_metadata()
    print("open", flush=True)
    time.sleep(1000)
"""


def test_a_caller_that_is_frozen_loses_its_place(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel still answers for it, so that only a ping within the protocol tells."""
    monkeypatch.setattr(channel, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_MS", 500)
    receiver = here("receiver", tiny_model_dir(), max_calls=1)
    caller = subprocess.Popen([sys.executable, "-c", CALLER, receiver.address], stdout=subprocess.PIPE, text=True)
    try:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "open\n"
        driver = peers(receiver=receiver.address)
        # As long as it lives it keeps its place, however long it says nothing.
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            with pytest.raises(errors.BusyError, match="max_calls: this daemon has 1 calls running") as caught:
                driver.listed()
            assert caught.value.fields["retry_after_ms"] == 500
            time.sleep(0.2)
        caller.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        while True:
            try:
                driver.listed()
                break
            except errors.BusyError:
                # Far less than the minute that a silent upload is given.
                assert time.monotonic() - start < 20
                time.sleep(0.1)
    finally:
        caller.kill()
        caller.wait()
        if caller.stdout is not None:
            caller.stdout.close()


def test_a_daemon_pings_its_callers_as_they_ping_it() -> None:
    of_a_channel, of_a_server = dict(channel.channel_options()), dict(channel.server_options())
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms"):
        assert of_a_channel[name] == of_a_server[name] > 0
    # Neither end runs out of pings, nor takes the other's for abuse.
    assert of_a_channel["grpc.http2.max_pings_without_data"] == of_a_server["grpc.http2.max_pings_without_data"] == 0
    assert of_a_server["grpc.http2.max_ping_strikes"] == 0
    assert of_a_server["grpc.http2.min_ping_interval_without_data_ms"] <= of_a_channel["grpc.keepalive_time_ms"]
