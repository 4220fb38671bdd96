"""Python files that lie on no path, because the test folders are no packages: oracles, samples, fakes, readers.

This folder is the one that is on the path; see ``pythonpath`` in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]


def load(file: str) -> ModuleType:
    """Import a file of the tests, such as "oracles/budget_oracles.py", once however often it is asked for."""
    name = "kvferry_tests_" + file.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
