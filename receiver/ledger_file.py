"""The ledger on disk: one JSON line an answer, appended."""

from __future__ import annotations

from pathlib import Path

from kvferry.core.errors import StoreError
from kvferry.core.ledger import Ledger, to_json


class LedgerFile:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """Check that the file can be appended to.

        Raises:
            StoreError: when it cannot.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise StoreError(f"ledger {path}: {error.strerror}", path=str(path)) from error

    def append(self, ledger: Ledger) -> None:
        """Write one line.

        Raises:
            StoreError: when the disk refuses.
        """
        try:
            # One write of one line: appends of several answers never interleave.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(to_json(ledger) + "\n")
        except OSError as error:
            raise StoreError(f"ledger {self._path}: {error.strerror}", path=str(self._path)) from error
