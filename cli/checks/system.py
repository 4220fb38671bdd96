"""The machine that is looked at; tests pretend that it is another."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from platform import machine as native_machine

from kvferry.core import links
from kvferry.core.links import Run


@dataclass(frozen=True)
class System:
    """What the checks ask of the operating system.

    Attributes:
        platform: as ``sys.platform``.
        machine: the processor's architecture, such as "arm64".
        python: version of the interpreter.
        run: runs a command and returns what it prints, "" when that fails.
        root: of the files in which Linux describes itself.
    """

    platform: str = sys.platform
    machine: str = field(default_factory=native_machine)
    python: tuple[int, int, int] = sys.version_info[:3]
    run: Run = links.run_command
    root: Path = Path("/")

    @property
    def is_macos(self) -> bool:
        """Whether it is a Mac."""
        return self.platform == "darwin"

    @property
    def is_linux(self) -> bool:
        """Whether it runs Linux."""
        return self.platform.startswith("linux")
