"""The command as a whole: help, exit statuses, and how errors look to people and to programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import Result

from kvferry.cli import output
from kvferry.cli.main import COMMANDS, main
from kvferry.core.errors import ConfigError, NotFoundError, RefusedError

Run = Callable[..., Result]
VIEW = str(Path(__file__).resolve().parents[2] / ".dev")


def python(code: str, *arguments: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": VIEW},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Return a function that adds a command ``fail`` which raises."""

    def install(error: BaseException) -> None:
        @click.command()
        @output.json_option
        def command(**_: Any) -> None:
            click.echo("before")
            raise error

        monkeypatch.setitem(COMMANDS, "fail", "Fail.")
        monkeypatch.setitem(sys.modules, "kvferry.cli.fail", SimpleNamespace(command=command))

    return install


def test_help_names_every_command(kvferry: Run) -> None:
    shown = kvferry("--help")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Usage: kvferry")
    assert kvferry("-h").stdout == shown.stdout
    for name in ("demo", "sender", "receiver", "send", "ask", "inspect", "methods", "models"):
        assert f"\n  {name} " in shown.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_summary_is_that_of_the_command(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.get_short_help_str(200) == COMMANDS[name]


def test_version(kvferry: Run) -> None:
    assert kvferry("--version").stdout == f"kvferry {version('kvferry')}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvferry.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(sorted({'mlx', 'mlx_lm', 'transformers', 'grpc', 'rich', 'numpy'} & set(sys.modules)))"
    )
    assert python(code).splitlines()[-1] == "[]"


def test_talking_to_daemons_imports_no_model_code(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("The code is 4417.")
    code = (
        "import sys\nfrom kvferry.cli.main import main\n"
        "main(['send', sys.argv[1], '--sender', '127.0.0.1:9', '--json'], standalone_mode=False)\n"
        "main(['ask', '0' * 64, 'Which?', '--receiver', '127.0.0.1:9', '--json'], standalone_mode=False)\n"
        "print(sorted({'mlx', 'mlx_lm', 'transformers', 'kvferry.engine', 'kvferry.sender'} & set(sys.modules)))"
    )
    *errors, modules = python(code, str(document)).splitlines()
    assert [json.loads(line)["error"]["code"] for line in errors] == ["UNAVAILABLE", "UNAVAILABLE"]
    assert modules == "[]"


def test_an_unknown_command_is_a_usage_error(kvferry: Run) -> None:
    shown = kvferry("snd")
    assert shown.exit_code == 2
    assert "No such command 'snd'" in shown.stderr
    assert shown.stdout == ""


def test_an_error_is_one_line_and_a_failure(kvferry: Run, failing: Callable[[BaseException], None]) -> None:
    failing(NotFoundError("artifact ab:\n  not here", artifact="ab"))
    shown = kvferry("fail")
    assert shown.exit_code == 1
    assert shown.stdout == "before\n"
    assert shown.stderr == "error: artifact ab:   not here\n"


def test_an_error_ends_the_json(kvferry: Run, failing: Callable[[BaseException], None]) -> None:
    failing(RefusedError("refused: wrong weights", verdict_json="[]", reasons=1, share=0.5, none=None))
    shown = kvferry("fail", "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout.splitlines()[-1]) == {
        "error": {
            "code": "REFUSED",
            "message": "refused: wrong weights",
            "fields": {"verdict_json": "[]", "reasons": 1, "share": 0.5, "none": None},
        }
    }
    assert shown.stderr == "error: refused: wrong weights\n"


def test_a_wrong_configuration_is_a_usage_error(kvferry: Run, failing: Callable[[BaseException], None]) -> None:
    failing(ConfigError("listen: impossible", field="listen"))
    assert kvferry("fail").exit_code == 2


def test_ctrl_c_is_130_and_quiet(kvferry: Run, failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    shown = kvferry("fail")
    assert (shown.exit_code, shown.stderr) == (130, "")


def test_a_mistake_of_ours_is_not_dressed_up(kvferry: Run, failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        kvferry("fail")


def test_a_wrong_command_line_is_json_for_programs(kvferry: Run) -> None:
    shown = kvferry("ask", "--json")
    assert shown.exit_code == 2
    error = json.loads(shown.stdout)["error"]
    assert error["code"] == "USAGE"
    assert "Missing argument 'ARTIFACT'" in error["message"]
    assert "Missing argument 'ARTIFACT'" in shown.stderr


def test_json_after_two_dashes_is_a_word(kvferry: Run) -> None:
    shown = kvferry("ask", "--receiver", "no:where", "--", "ab", "--json")
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: receiver: 'no:where'")


def test_a_reader_that_goes_away_is_no_noise(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as broken:
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.cli", "inspect", "0" * 64, "--store", str(tmp_path / "store"), "--json"],
            env=os.environ | {"PYTHONPATH": VIEW},
            stdout=broken,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == ""


class TestOutput:
    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (1_530_000, "1.5 MB"),
            (64 * 2**30, "68.7 GB"),
            (5e12, "5000.0 GB"),
        ],
    )
    def test_sizes(self, count: float, text: str) -> None:
        assert output.size(count) == text

    def test_tables_line_up(self) -> None:
        assert output.table([("A", "B"), ("long", ""), ("x", "y")]) == "A     B\nlong\nx     y"

    def test_bars_stay_out_of_a_pipe(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        with output.progress_stages() as stage, output.progress_share("all") as share:
            stage("prefill", 1, 2)
            share("half", 0.5)
        assert capsys.readouterr() == ("", "")
