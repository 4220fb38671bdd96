"""Guards of the packaging: what a flat lay-out with a namespace package can get wrong without anybody noticing."""

from __future__ import annotations

import importlib.metadata
import os
import plistlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = sorted(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"])
SIDES = ("sender", "receiver")

# Not source: what tools and version control keep in a checkout.
NOT_SOURCE = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}


def run_python(code: str, **environment: str) -> str:
    """Runs ``code`` at the root of the checkout, which `python -c` puts first on sys.path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestFolders:
    def test_every_list_names_the_same_folders(self) -> None:
        build = PROJECT["tool"]["hatch"]["build"]["targets"]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        listed = re.search(r"^PACKAGES := (.*)$", makefile, re.MULTILINE)

        assert build["wheel"]["sources"] == {folder: f"kvferry/{folder}" for folder in FOLDERS}
        assert set(FOLDERS) <= set(build["sdist"]["only-include"])
        banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
        assert sorted(banned) == FOLDERS
        assert listed is not None
        assert listed[1].split() == FOLDERS

    def test_the_view_links_every_folder(self) -> None:
        links = {link.name: link.readlink().as_posix() for link in (ROOT / ".dev" / "kvferry").iterdir()}
        assert links == {folder: f"../../{folder}" for folder in FOLDERS}

    @pytest.mark.parametrize("folder", FOLDERS)
    def test_is_typed(self, folder: str) -> None:
        assert (ROOT / folder / "py.typed").is_file()

    @pytest.mark.parametrize("folder", FOLDERS)
    def test_only_kernels_and_proto_have_no_init(self, folder: str) -> None:
        assert (ROOT / folder / "__init__.py").exists() == (folder not in {"kernels", "proto"})

    def test_kvferry_is_a_namespace_package(self) -> None:
        assert not (ROOT / ".dev" / "kvferry" / "__init__.py").exists()

    def test_no_test_folder_is_a_package(self) -> None:
        assert not list((ROOT / "tests").rglob("__init__.py"))

    @pytest.mark.parametrize("name", ["kernels", "proto"])
    def test_an_installed_package_of_the_same_name_wins(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()

        found = run_python(f"import {name}; print({name}.__file__)", PYTHONPATH=str(tmp_path))

        assert Path(found) == tmp_path / name / "__init__.py"


class TestWithoutMlx:
    """None in sys.modules makes an import fail as if the package were not installed."""

    BLOCK = "import sys; sys.modules.update(dict.fromkeys(['mlx', 'mlx.core', 'mlx_lm', 'transformers', 'gguf']))\n"

    def test_the_client_can_be_imported(self) -> None:
        assert run_python(self.BLOCK + "from kvferry.client import Client; print(Client.__name__)") == "Client"

    def test_the_command_can_say_what_it_does(self) -> None:
        code = "from kvferry.cli.main import main; main(['--help'], prog_name='kvferry', standalone_mode=False)"
        assert run_python(self.BLOCK + code).startswith("Usage: kvferry")


class TestVersions:
    def test_the_changelog_begins_with_this_version(self) -> None:
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", changelog, re.MULTILINE)
        assert newest is not None
        assert newest[1] == PROJECT["project"]["version"]

    def test_the_installed_version_is_this_one(self) -> None:
        assert importlib.metadata.version("kvferry") == PROJECT["project"]["version"]

    def test_no_stub_is_newer_than_the_oldest_runtime_allowed(self) -> None:
        floors = {
            requirement.name: min(Version(part.version) for part in requirement.specifier if part.operator == ">=")
            for requirement in map(Requirement, PROJECT["project"]["dependencies"])
        }
        stubs = [path.read_text(encoding="utf-8") for path in (ROOT / "proto" / "v1").glob("*_pb2*.py")]
        grpc = re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", "".join(stubs))
        protobuf = re.findall(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", "".join(stubs))

        assert grpc
        assert max(map(Version, grpc)) <= floors["grpcio"]
        assert protobuf
        assert max(Version(".".join(stamp)) for stamp in protobuf) <= floors["protobuf"]


def launchd_command(side: str) -> list[str]:
    """Returns the words of the command that the agent's shell executes."""
    with (ROOT / "deploy" / "launchd" / f"io.kvferry.{side}.plist").open("rb") as file:
        agent = plistlib.load(file)
    assert agent["Label"] == f"io.kvferry.{side}"
    shell, option, script = agent["ProgramArguments"]
    assert (shell, option) == ("/bin/sh", "-c")
    words = shlex.split(script)
    assert words[0] == "exec"  # or SIGTERM would end the shell and leave the daemon
    return words[1:]


def systemd_command(side: str) -> list[str]:
    """Returns the words of the unit's only ExecStart."""
    unit = (ROOT / "deploy" / "systemd" / f"kvferry-{side}.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("command", [launchd_command, systemd_command])
class TestServices:
    def test_starts_a_daemon_that_exists(self, command: Any, side: str) -> None:
        from kvferry.cli.main import main

        program, subcommand, option, path, *_ = command(side)
        daemon = main.get_command(click.Context(main), subcommand)

        assert Path(program).name == "kvferry"
        assert subcommand == side
        assert daemon is not None
        assert option in [name for parameter in daemon.params for name in parameter.opts]
        assert Path(path).name == f"{side}.toml"


@pytest.mark.parametrize("side", SIDES)
class TestGraceTime:
    """A daemon lets running calls finish for `grace_seconds`; whoever stops it must wait longer than that."""

    def test_launchd_waits(self, side: str) -> None:
        with (ROOT / "deploy" / "launchd" / f"io.kvferry.{side}.plist").open("rb") as file:
            assert plistlib.load(file)["ExitTimeOut"] > 10

    def test_systemd_waits(self, side: str) -> None:
        unit = (ROOT / "deploy" / "systemd" / f"kvferry-{side}.service").read_text(encoding="utf-8")
        (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
        assert int(seconds) > 10


def source_files() -> list[Path]:
    """Returns all files of the checkout but those that tools keep there."""
    files = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_SOURCE and not name.endswith("_cache")]
        files += [Path(folder, name) for name in names]
    return files


def test_no_source_names_a_folder_of_somebody() -> None:
    # ada is the one that tests invent.
    somebodys = re.compile(rb"(?<![\w.$}>-])/(?:home|Users|root|work|private/var|var/folders)/(?!ada/)\w")
    files = source_files()
    guilty = [str(path.relative_to(ROOT)) for path in files if somebodys.search(path.read_bytes())]
    assert len(files) > 50
    assert guilty == []
