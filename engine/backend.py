"""What MLX runs on: the BLAS on Linux, the compiler of its CPU back end, versions and device. Imports no MLX itself."""

from __future__ import annotations

import ctypes
import shutil
import sys
from importlib.metadata import version

from kvferry.core.errors import ModelError

BLAS_LIBRARY = "libopenblas.so.0"
COMPILER = "g++"
"""What MLX's CPU back end calls on Linux, by this name and no other."""


def load_blas() -> str:
    """Load OpenBLAS with global symbols on Linux. Return its name, or "" where there is none or none is needed.

    Without it matrix products run on the reference BLAS that MLX's wheel carries: right, and tens of times slower.
    """
    if not sys.platform.startswith("linux"):
        return ""
    try:
        ctypes.CDLL(BLAS_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return ""
    return BLAS_LIBRARY


def check_compiler() -> None:
    """Check for the C++ compiler that MLX's CPU back end calls at run time.

    Raises:
        ModelError: on Linux without it, whatever other compilers are there; the message says what to install.
    """
    if sys.platform.startswith("linux") and shutil.which(COMPILER) is None:
        raise ModelError(
            f"C++ compiler: {COMPILER} not found, and MLX's CPU back end calls it by that name. "
            "Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++"
        )


def runtime_versions() -> dict[str, str]:
    """Return the versions that shape a cache, and the device that MLX computes on ("cpu" or "gpu")."""
    import mlx.core as mx  # noqa: PLC0415  (load_blas must be importable before MLX is)

    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    return {
        "kvferry": version("kvferry"),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "device": device,
        "blas": load_blas(),
    }
