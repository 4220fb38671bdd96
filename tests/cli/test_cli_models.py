"""``kvferry models`` as a program sees it: output, JSON, and errors that reach the caller."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry.cli.models import command
from kvferry.core.errors import ModelError
from kvferry.engine import model_store

NAME = "smollm2-135m-instruct"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path))
    return tmp_path / "models"


def install(home: Path) -> Path:
    """Lay down what an installed model looks like, with one file of five bytes."""
    path = home / NAME
    path.mkdir(parents=True)
    (path / "config.json").write_text("12345")
    (path / "kvferry-model.json").write_text(json.dumps({"files": {"config.json": {"bytes": 5}}}))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_list_shows_the_catalogue_and_what_is_there(home: Path) -> None:
    assert f"{NAME}" in run("list").stdout
    assert run("list").stdout.count("not installed") == 3
    path = install(home)
    assert run("list").stdout.count("not installed") == 2
    listed = json.loads(run("list", "--json").stdout)
    assert listed["home"] == str(home)
    rows = {row["name"]: row for row in listed["models"]}
    assert (rows[NAME]["installed"], rows[NAME]["path"], rows[NAME]["bytes"]) == (True, str(path), 5)
    other = rows["qwen2.5-coder-0.5b-instruct"]
    assert (other["installed"], other["path"], other["bytes"]) == (False, None, None)
    assert {row["licence"] for row in listed["models"]} == {"Apache-2.0"}


def test_list_says_what_is_damaged(home: Path) -> None:
    (install(home) / "config.json").write_text("123")
    assert "damaged: config.json has 3 bytes, expected 5" in run("list").stdout
    rows = json.loads(run("list", "--json").stdout)["models"]
    assert [row["problem"] for row in rows] == ["config.json has 3 bytes, expected 5", None, None]


def test_path_prints_only_the_directory(home: Path) -> None:
    with pytest.raises(ModelError, match=rf"not installed\. Run: kvferry models add {NAME}"):
        run("path", NAME)
    path = install(home)
    assert run("path", NAME).stdout == f"{path}\n"
    assert json.loads(run("path", NAME, "--json").stdout) == {"name": NAME, "path": str(path)}
    with pytest.raises(ModelError, match=r"unknown model '\.\./secrets'"):
        run("path", "../secrets")


def test_remove_deletes_once(home: Path) -> None:
    path = install(home)
    assert json.loads(run("remove", NAME, "--json").stdout) == {"name": NAME, "path": str(path), "removed": True}
    assert not path.exists()
    with pytest.raises(ModelError, match="is not installed"):
        run("remove", NAME)


def test_add_passes_the_folder_on_and_says_whether_it_did_anything(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []

    def add(name: str, wheels: Path | None, progress: object) -> Path:
        seen.append((name, wheels, progress))
        return home / name if (home / name).exists() else install(home)

    monkeypatch.setattr(model_store, "add", add)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    result = run("add", NAME, "--wheels", str(wheels), "--json")
    assert json.loads(result.stdout) == {"name": NAME, "path": str(home / NAME), "added": True}
    # Not a terminal, so nothing may draw.
    assert seen == [(NAME, wheels, None)]
    assert result.stderr == ""
    assert json.loads(run("add", NAME, "--json").stdout)["added"] is False
    assert "installed already" in run("add", NAME).stdout


def test_add_refuses_a_missing_folder(home: Path) -> None:
    result = run("add", NAME, "--wheels", str(home / "nowhere"))
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


@pytest.mark.slow
def test_importing_the_command_loads_nothing_heavy() -> None:
    code = "import sys, kvferry.cli.models; print([m for m in ('mlx', 'numpy', 'gguf', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
