"""Imports every module of the installed kvferry, and says how many there were."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys


def module_names() -> list[str]:
    """Returns the modules by the list of installed files: kernels and proto have no `__init__.py` to walk."""
    files = importlib.metadata.files("kvferry") or []
    paths = [file.with_suffix("").parts for file in files if file.parts[0] == "kvferry" and file.suffix == ".py"]
    return sorted(".".join(parts).removesuffix(".__init__") for parts in paths if parts[-1] != "__main__")


def main() -> int:
    """Returns the exit status; a failing import raises."""
    names = module_names()
    for name in names:
        importlib.import_module(name)
    print(f"imported {len(names)} modules of kvferry {importlib.metadata.version('kvferry')}")
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main())
