"""What a check found, and running checks so that none can hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the check, such as "port".
        status: "problem" keeps something from working; "warning" makes it slow, fragile or not what one thinks.
        message: what was found, in one line.
        remedy: what to do, in plain words; empty only when all is well.
    """

    name: str
    status: Status
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Hold every finding to its promise.

        Raises:
            ValueError: when something is wrong and nothing says what to do.
        """
        if self.status != "ok" and not self.remedy:
            raise ValueError(f"{self.name}: {self.status} without a remedy")


@dataclass(frozen=True)
class Check:
    """Something to look at. ``seconds`` is how long it may take in all."""

    name: str
    look: Callable[[], Iterable[Finding]]
    seconds: float = 15.0


def run(check: Check) -> list[Finding]:
    """Run a check for as long as it may take. A name server or a dead disk can hold a thread for minutes.

    Raises:
        RuntimeError: when the check itself fails; the thread has printed why.
    """
    found: list[list[Finding]] = []
    # A daemon thread: the process can end while it still waits.
    thread = threading.Thread(target=lambda: found.append(list(check.look())), name=check.name, daemon=True)
    thread.start()
    thread.join(check.seconds)
    if found:
        return found[0]
    if thread.is_alive():
        return [
            Finding(
                check.name,
                "problem",
                f"no result after {check.seconds:g} s",
                "something that it asks does not answer: a disk, a name server or the network; see the other findings",
            )
        ]
    raise RuntimeError(f"{check.name}: the check failed")
