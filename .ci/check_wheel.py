"""Checks that a wheel holds every file of the packages in a checkout, and nothing else.

Usage: check_wheel.py WHEEL CHECKOUT
"""

from __future__ import annotations

import sys
import tomllib
import zipfile
from pathlib import Path


def packaged_files(checkout: Path) -> set[str]:
    """Returns the files that belong into the wheel, by their names there."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    sources: dict[str, str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
    return {
        f"{package}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, package in sources.items()
        for path in (checkout / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".")
    }


def main() -> int:
    """Prints what is missing or superfluous and returns the exit status."""
    wheel, checkout = Path(sys.argv[1]), Path(sys.argv[2])
    expected = packaged_files(checkout)
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    for name in sorted(expected - found):
        print(f"missing in {wheel.name}: {name}")
    for name in sorted(found - expected):
        print(f"should not be in {wheel.name}: {name}")
    if expected != found:
        return 1
    print(f"{wheel.name} holds all {len(found)} files of the packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
