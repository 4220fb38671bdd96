"""What a figure was measured with: the code, the versions and the machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvferry.core import links
from kvferry.core.digests import Hasher
from kvferry.engine.backend import runtime_versions

# What figures depend on. A commit to a document, to the client or to what makes tables of records must not make a
# finished run look stale; documents and questions that a cell is about are in its id.
_SOURCES = (
    "ablations",
    "core",
    "engine",
    "kernels",
    "mapper",
    "receiver",
    "sender",
    ":(exclude)ablations/report",
    ":(exclude)ablations/grids",
)
# What changes speeds and does not show in versions.
_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES")
_PACKAGES = ("llguidance", "tokenizers")
_COMMIT_DIGITS = 12
_GIT_SECONDS = 10.0


class Provenance(msgspec.Struct, frozen=True):
    """Where and with what something was measured.

    Attributes:
        commit: the newest commit that changed the packages a figure depends on, with "+" and a digest of what is not
            committed in them; without a checkout the version.
        processor: as the system names it.
        cores: processors that this process may use.
        device: what MLX computes on, "cpu" or "gpu".
        system: operating system and architecture.
        versions: of kvferry, mlx, mlx_lm, llguidance, tokenizers, Python, and the BLAS library ("" where MLX brings
            its own).
        environment: variables that change speeds, where they are set; of libraries the file's name.
    """

    commit: str
    processor: str
    cores: int
    device: str
    system: str
    versions: dict[str, str]
    environment: dict[str, str] = {}

    @property
    def machine(self) -> str:
        """One line for people."""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        described = f"{self.processor}, {cores}, {self.system}, MLX on the {self.device}"
        return ", ".join([described, *(f"{name}={value}" for name, value in self.environment.items())])


def here() -> Provenance:
    """Return this process's own."""
    versions = runtime_versions()
    device = versions.pop("device")
    return Provenance(
        commit=_commit(Path(__file__).resolve().parents[2]) or f"kvferry {versions['kvferry']}",
        processor=_processor(),
        cores=_cores(),
        device=device,
        system=f"{platform.system()} {platform.machine()}",
        versions=versions | {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        environment={name: Path(value).name for name in _VARIABLES if (value := os.environ.get(name))},
    )


def today() -> str:
    """Return the date in UTC, as ISO 8601 writes it."""
    return datetime.now(UTC).date().isoformat()


def _cores() -> int:
    # macOS pins no process.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit(root: Path) -> str:
    """Return the commit of the checkout at ``root``, "" when it is none."""
    # An installed package may lie inside somebody's checkout of something else.
    if _git(root, "ls-files", "--", "ablations/__init__.py").strip() == b"":
        return ""
    newest = _git(root, "log", "-1", "--format=%H", "--", *_SOURCES).decode().strip()[:_COMMIT_DIGITS]
    changes = _changes(root)
    return f"{newest}+{changes}" if newest and changes else newest


def _changes(root: Path) -> str:
    """Return a short digest of what the checkout's packages hold beyond the commit, "" for nothing."""
    difference = _git(root, "diff", "HEAD", "--binary", "--", *_SOURCES)
    untracked = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *_SOURCES)
    names = [name for name in untracked.decode().split("\0") if name]
    if not difference and not names:
        return ""
    hasher = Hasher()
    hasher.update(difference)
    for name in names:
        hasher.update(name.encode())
        hasher.update((root / name).read_bytes())
    return hasher.digest().hex()[:8]


def _git(root: Path, *words: str) -> bytes:
    program = shutil.which("git")
    if program is None:
        return b""
    try:
        done = subprocess.run([program, "-C", str(root), *words], capture_output=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.exists():
        names = [line for line in described.read_text("utf-8", "replace").splitlines() if line.startswith("model name")]
        named = names[0].partition(":")[2].strip() if names else ""
    else:
        named = links.run_command(["sysctl", "-n", "machdep.cpu.brand_string"]).strip()
    return named or platform.processor() or platform.machine()
