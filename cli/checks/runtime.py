"""Python, MLX, its BLAS, and the compiler of its CPU back end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.checks.findings import Finding
from kvferry.cli.checks.system import System

OLDEST_PYTHON = (3, 11)
# MLX calls this one by name.
COMPILER = "g++"
# The reference BLAS in MLX's wheel stays below 3 GFLOP/s; OpenBLAS on one old core is above 10.
SLOW_GFLOPS = 5.0
PROBE_SECONDS = 60.0
_COMPILE_SECONDS = 20.0
_PROGRAM = '#include <cmath>\n#include <vector>\nextern "C" double f(double x) { return std::sin(x); }\n'
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Probe:
    """What a process that used MLX told. ``error`` is "" when all went well."""

    error: str
    mlx: str = ""
    mlx_lm: str = ""
    device: str = ""
    blas: str = ""
    gflops: float = 0.0
    ms: float = 0.0


def probe_mlx(seconds: float = PROBE_SECONDS) -> Probe:
    """Use MLX in another process."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.cli.checks.mlx_probe"],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(f"no result after {seconds:g} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
        return Probe(lines[-1][:_SHOWN_CHARACTERS])
    told = json.loads(done.stdout.splitlines()[-1])
    return Probe("", **{name: told[name] for name in ("mlx", "mlx_lm", "device", "blas", "gflops", "ms")})


def python(system: System) -> Finding:
    """Check the interpreter's version and architecture."""
    text = f"Python {'.'.join(map(str, system.python))} for {system.machine}"
    if system.python[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Finding("python", "problem", text, f"install Python {wanted} or later and kvferry into it")
    if system.is_macos and system.machine != "arm64":
        return Finding(
            "python",
            "problem",
            f"{text}: MLX runs on Apple silicon only, natively",
            "on an Apple silicon Mac install a Python for arm64 (python.org or Homebrew in /opt/homebrew); on an Intel "
            "Mac only the client works",
        )
    return Finding("python", "ok", text)


def mlx(system: System, probe: Probe) -> Finding:
    """Check that MLX imports and computes on what it should."""
    if probe.error:
        extra = "on Linux its back end is the extra: pip install 'mlx[cpu]' 'mlx-lm[cpu]'" if system.is_linux else ""
        reinstall = "install kvferry again into this Python, so that its dependencies come along"
        return Finding("mlx", "problem", f"MLX does not work here: {probe.error}", f"{reinstall}; {extra}".strip("; "))
    text = f"MLX {probe.mlx}, mlx-lm {probe.mlx_lm}, on the {probe.device.upper()}"
    if system.is_macos and probe.device != "gpu":
        return Finding(
            "mlx",
            "problem",
            f"{text}: Metal is not in use",
            "use a native arm64 Python on Apple silicon, macOS 14 or later; a virtual machine may have no Metal at all",
        )
    return Finding("mlx", "ok", text + (" (Metal)" if system.is_macos else ""))


def blas(system: System, probe: Probe) -> Finding | None:
    """Check on Linux that matrix products run on a real BLAS; None where there is nothing to check."""
    if not system.is_linux or probe.error:
        return None
    rate = f"{probe.gflops:.1f} GFLOP/s in a product of {probe.ms:.1f} ms"
    install = "install OpenBLAS (Debian, Ubuntu: apt-get install libopenblas0-pthread; Fedora: dnf install openblas)"
    if not probe.blas:
        return Finding("blas", "warning", f"OpenBLAS is not here, MLX multiplies on its own: {rate}", install)
    if probe.gflops < SLOW_GFLOPS:
        return Finding(
            "blas",
            "warning",
            f"{probe.blas} is loaded, but {rate} is as slow as without it",
            "see whether the machine is busy and run this again; an OpenBLAS that is built for another processor, or "
            "OPENBLAS_NUM_THREADS and OPENBLAS_CORETYPE, may hold it back",
        )
    return Finding("blas", "ok", f"{probe.blas}, {rate}")


def compiler(system: System, which: Callable[[str], str | None] = shutil.which) -> Finding | None:
    """Check on Linux that MLX's CPU back end can compile; None where there is nothing to check."""
    if not system.is_linux:
        return None
    install = "install g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
    path = which(COMPILER)
    if path is None:
        other = next((name for name in ("c++", "clang++") if which(name)), None)
        instead = f"; {other} is, but MLX calls g++ by name" if other else ""
        text = f"g++ is not here, and the daemons do not start without it{instead}"
        return Finding("compiler", "problem", text, install)
    trouble = _compile(path)
    if trouble:
        return Finding("compiler", "problem", f"{path} does not compile: {trouble}", f"{install}, headers included")
    return Finding("compiler", "ok", f"{path} compiles")


def _compile(path: str) -> str:
    """Return what keeps a small program from being compiled, or ""."""
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM, "ascii")
        command = [path, "-std=c++17", "-fPIC", "-shared", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)[:_SHOWN_CHARACTERS]
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or ["no message"])[0][:_SHOWN_CHARACTERS]
