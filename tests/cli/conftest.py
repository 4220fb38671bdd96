"""The fake daemons of the client's tests, and a runner that keeps the streams apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from loading import load

from kvferry.cli.main import main


@pytest.fixture(autouse=True)
def quiet_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `kvferry doctor` sets for its own process from daemons that later tests start."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """Return the module of the fake daemons, which lies on no path."""
    return load("client/fake_daemons.py")


@pytest.fixture
def daemons(fakes: ModuleType) -> Iterator[Any]:
    """Return a running fake sender and receiver."""
    running = fakes.FakeDaemons()
    yield running
    running.stop()


@pytest.fixture
def kvferry() -> Callable[..., Result]:
    """Return a function that runs the command with the given words."""

    def run(*words: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(main, words, input=stdin, catch_exceptions=False, prog_name="kvferry")

    return run
