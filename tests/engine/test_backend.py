"""The compiler that is asked for is the one that MLX will call."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest

from kvferry.core.errors import ModelError
from kvferry.engine import backend


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are looked for, on a machine that says it is Linux."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def install(programs: Path, *names: str) -> None:
    for name in names:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX compiles for Metal")
def test_mlx_calls_no_other_compiler() -> None:
    library = Path(mx.__file__).parent / "lib/libmlx.so"
    before = library.read_bytes().split(b" -std=c++")[:-1]
    assert {text.rpartition(b"\0")[2] for text in before} == {backend.COMPILER.encode()}


def test_no_other_compiler_will_do(programs: Path) -> None:
    install(programs, "c++", "clang++", "cc")
    with pytest.raises(ModelError, match=r"^C\+\+ compiler: g\+\+ not found.*apt-get install g\+\+"):
        backend.check_compiler()
    install(programs, "g++")
    backend.check_compiler()


def test_a_mac_needs_none(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    backend.check_compiler()
