"""Texts that were just looked up, decoded, within a budget of memory."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Entry:
    stamp: Hashable
    text: str
    size: int


class TextCache:
    """Keeps the texts that were used last. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: most memory that the texts may take; a longer text is not kept at all.
        """
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory that the texts take."""
        return self._size

    def get(self, key: bytes, stamp: Hashable) -> str | None:
        """Return a text that was put under the same stamp."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.stamp != stamp:
                return None
            self._entries.move_to_end(key)
            return entry.text

    def put(self, key: bytes, stamp: Hashable, text: str) -> None:
        """Keep a text in the place of what was there, and let go of what was not used for longest."""
        size = sys.getsizeof(text)
        with self._lock:
            old = self._entries.pop(key, None)
            self._size -= old.size if old else 0
            if size > self._max_bytes:
                return
            self._entries[key] = _Entry(stamp, text, size)
            self._size += size
            while self._size > self._max_bytes:
                _, gone = self._entries.popitem(last=False)
                self._size -= gone.size
