"""``kvferry sender`` and ``kvferry receiver``: every key has an option, and what is told arrives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from click.testing import Result

from kvferry.cli.main import main
from kvferry.core.config import ReceiverConfig, SenderConfig

Run = Callable[..., Result]
KINDS = {"sender": SenderConfig, "receiver": ReceiverConfig}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """Replace both daemons, whose import needs MLX, and return what they are started with."""
    calls: list[tuple[Any, bool]] = []

    def note(config: Any, *, announce_json: bool) -> None:
        calls.append((config, announce_json))

    for role in KINDS:
        package = importlib.import_module(f"kvferry.{role}")
        fake = SimpleNamespace(main=note)
        monkeypatch.setattr(package, "daemon", fake, raising=False)
    return calls


@pytest.mark.parametrize("role", list(KINDS))
def test_every_key_has_an_option_with_help(role: str) -> None:
    command = main.get_command(click.Context(main), role)
    assert command is not None
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    for field in msgspec.structs.fields(KINDS[role]):
        assert f"--{field.name.replace('_', '-')}" in options[field.name].opts
        assert (options[field.name].help or "").partition("[default")[0].strip()


@pytest.mark.parametrize("role", list(KINDS))
def test_without_options_the_defaults_hold(kvferry: Run, started: list[tuple[Any, bool]], role: str) -> None:
    assert kvferry(role).exit_code == 0
    assert started == [(KINDS[role](), False)]


def test_options_win_over_environment_and_file(
    kvferry: Run, started: list[tuple[Any, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sender.toml"
    path.write_text('model = "file"\nlisten = "127.0.0.1:1"\nstore = "from-file"\ninsecure = true\n')
    monkeypatch.setenv("KVFERRY_SENDER_MODEL", "environment")
    monkeypatch.setenv("KVFERRY_SENDER_LISTEN", "127.0.0.1:2")
    words = ["--config", str(path), "--listen", "127.0.0.1:3", "--chunk-bytes", "2048", "--rpc-seconds", "1.5"]
    words += ["--log-level", "debug", "--no-insecure", "--json"]
    assert kvferry("sender", *words).exit_code == 0
    ((config, announce_json),) = started
    assert (config.listen, config.model, config.store) == ("127.0.0.1:3", "environment", "from-file")
    assert (config.chunk_bytes, config.rpc_seconds, config.log_level) == (2048, 1.5, "debug")
    assert config.insecure is False
    assert announce_json is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "0.0.0.0:7411"], "set insecure = true"),
        (["--chunk-bytes", "1"], "option: chunk_bytes = 1, must be a whole number from "),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml: No such file"),
        (["--prefill-chunk", "many"], "'many' is not a valid integer"),
        (["--log-level", "loud"], "'loud' is not one of"),
    ],
)
def test_a_wrong_setting_is_a_usage_error(
    kvferry: Run, started: list[tuple[Any, bool]], words: list[str], message: str
) -> None:
    shown = kvferry("sender", *words)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert started == []
