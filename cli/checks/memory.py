"""How much memory there is, and how much of it is free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.checks.system import System

_KIB = 1024
# Pages that macOS gives away without writing anything out.
_GIVEN_AWAY = ("free", "inactive", "speculative", "purgeable")


@dataclass(frozen=True)
class Memory:
    """Bytes in all, and bytes that a program could take now."""

    total: int
    available: int


def read(system: System) -> Memory | None:
    """Return the memory of the machine or of the container, None when it does not tell."""
    return _macos(system) if system.is_macos else _linux(system.root)


def _macos(system: System) -> Memory | None:
    total = system.run(["/usr/sbin/sysctl", "-n", "hw.memsize"]).strip()
    text = system.run(["/usr/bin/vm_stat"])
    page = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"^Pages (\w+):\s+(\d+)\.$", text, re.MULTILINE))
    if not total.isdigit() or not page:
        return None
    return Memory(int(total), int(page.group(1)) * sum(int(pages.get(kind, 0)) for kind in _GIVEN_AWAY))


def _linux(root: Path) -> Memory | None:
    try:
        text = (root / "proc/meminfo").read_text("ascii")
    except OSError:
        return None
    kibibytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "MemTotal" not in kibibytes:
        return None
    total = kibibytes["MemTotal"] * _KIB
    available = kibibytes.get("MemAvailable", kibibytes["MemTotal"]) * _KIB
    limit = _container_limit(root)
    return Memory(min(total, limit or total), min(available, limit or available))


def _container_limit(root: Path) -> int | None:
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text("ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None
