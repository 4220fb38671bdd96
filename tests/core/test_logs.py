"""Logs that cannot be written: whoever logs goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from kvferry.core import logs

FULL = Path("/dev/full")


@pytest.fixture
def restored() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_below_the_log_ends_no_call(restored: None, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    stream = FULL.open("w")
    try:
        with pytest.raises(OSError, match="No space left"):
            print("and it is full", file=stream, flush=True)
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure("info", form)
        for _ in range(100):
            logs.logger("receiver").info("committed", artifact="ab" * 32)
    finally:
        with contextlib.suppress(OSError):
            stream.close()


def test_what_can_be_written_is_written(
    restored: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", "json")
    logs.logger("receiver").info("committed", artifact="ab")
    logs.logger("receiver").debug("said to nobody")
    (line,) = capsys.readouterr().err.splitlines()
    assert '"event": "committed"' in line
    assert '"component": "receiver"' in line
