"""Fixtures that are the oracle modules of this folder, by file name.

Written from the methods' formulas, in NumPy, on purpose without anything of kvferry. Each file stands alone and lies on
no path; another folder's conftest.py loads this one by its path and takes over the fixtures that it needs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """Import an oracle module."""
    known = f"kvferry_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


@pytest.fixture(scope="session")
def selector_oracles() -> ModuleType:
    return load("selector_oracles")


@pytest.fixture(scope="session")
def attention_oracles() -> ModuleType:
    return load("attention_oracles")


@pytest.fixture(scope="session")
def budget_oracles() -> ModuleType:
    return load("budget_oracles")


@pytest.fixture(scope="session")
def qfilter_oracles() -> ModuleType:
    return load("qfilter_oracles")


@pytest.fixture(scope="session")
def quantisation_oracles() -> ModuleType:
    return load("quantisation_oracles")
