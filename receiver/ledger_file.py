"""The ledger on disk: one JSON line an answer, appended."""

from __future__ import annotations

import os
import threading
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
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise StoreError(f"ledger {path}: {error.strerror}", path=str(path)) from error

    def append(self, ledger: Ledger) -> None:
        """Write one line, or nothing of it.

        Raises:
            StoreError: when the disk refuses.
        """
        try:
            with self._lock:
                _append(self._path, f"{to_json(ledger)}\n".encode())
        except OSError as error:
            raise StoreError(f"ledger {self._path}: {error.strerror}", path=str(self._path)) from error


def _append(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            # On a full disk a part may have been written, and the next line must not go on from there.
            file.truncate(size)
            raise
