"""The fake daemons of the client's tests, and a runner that keeps the streams apart."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvferry.cli.main import main

FAKES = Path(__file__).resolve().parents[1] / "client" / "fake_daemons.py"


@pytest.fixture(autouse=True)
def quiet_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `kvferry doctor` sets for its own process from daemons that later tests start."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """Return the module of the fake daemons, which lies on no path."""
    name = "kvferry_fake_daemons"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FAKES)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


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
