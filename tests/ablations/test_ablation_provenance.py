"""What is written beside a figure: the commit of the code that made it, and the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.ablations.harness import provenance
from kvferry.ablations.harness.provenance import Provenance

GIT = shutil.which("git") or ""
pytestmark = pytest.mark.skipif(not GIT, reason="needs git")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with one commit of two packages and a document."""
    root = tmp_path / "checkout"
    for name in ("ablations/__init__.py", "engine/model.py", "docs/results.md"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("first\n")
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run([GIT, "-C", str(root), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "More")
    return git(root, "rev-parse", "HEAD")[:12]


def test_the_commit_is_the_newest_that_changed_the_packages(checkout: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")[:12]
    assert provenance._commit(checkout) == first
    (checkout / "docs" / "results.md").write_text("a table\n")
    assert provenance._commit(checkout) == first
    commit(checkout)
    assert provenance._commit(checkout) == first
    (checkout / "engine" / "model.py").write_text("second\n")
    second = commit(checkout)
    assert provenance._commit(checkout) == second != first


def test_what_is_not_committed_shows(checkout: Path) -> None:
    first = provenance._commit(checkout)
    seen = [first]
    for name, text in (
        ("engine/model.py", "2\n"),
        ("engine/model.py", "3\n"),
        ("engine/new.py", ""),
        ("engine/new.py", "4"),
    ):
        (checkout / name).write_text(text)
        seen.append(provenance._commit(checkout))
    assert all(entry.startswith(f"{first}+") for entry in seen[1:])
    assert len(set(seen)) == len(seen)
    (checkout / "engine" / "new.py").unlink()
    (checkout / "engine" / "model.py").write_text("first\n")
    assert provenance._commit(checkout) == first


def test_a_package_inside_somebodys_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout / ".venv" / "kvferry"
    (installed / "ablations").mkdir(parents=True)
    (installed / "ablations" / "__init__.py").touch()
    assert provenance._commit(installed) == ""
    assert provenance._commit(checkout.parent) == ""


def test_without_git_there_is_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    here = provenance.here()
    assert here.commit == f"kvferry {here.versions['kvferry']}"


def test_here_is_this_machine() -> None:
    here = provenance.here()
    assert isinstance(here, Provenance)
    assert here.processor
    assert here.cores >= 1
    assert here.device in {"cpu", "gpu"}
    assert set(here.versions) == {"kvferry", "mlx", "mlx_lm", "blas", "python", "llguidance", "tokenizers"}
    assert here == provenance.here()
    assert ("1 core" if here.cores == 1 else f"{here.cores} cores") in here.machine


def test_what_changes_speeds_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in provenance._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    plain = provenance.here()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("DYLD_INSERT_LIBRARIES", "/somewhere/faster.dylib")
    here = provenance.here()
    assert plain.environment == {}
    assert here.environment == {"OPENBLAS_NUM_THREADS": "1", "DYLD_INSERT_LIBRARIES": "faster.dylib"}
    assert here.machine == f"{plain.machine}, OPENBLAS_NUM_THREADS=1, DYLD_INSERT_LIBRARIES=faster.dylib"


def test_what_makes_tables_of_records_does_not_make_them_stale(checkout: Path) -> None:
    first = provenance._commit(checkout)
    for name in ("ablations/report/scoring.py", "ablations/grids/questions/hut.toml"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text("first\n")
        assert provenance._commit(checkout) == first
    commit(checkout)
    assert provenance._commit(checkout) == first
    (checkout / "ablations" / "runner.py").write_text("first\n")
    assert provenance._commit(checkout) != first
