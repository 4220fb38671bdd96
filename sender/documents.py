"""Documents that were read here, kept for look-ups, by the digest of their text."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from kvferry.core import limits
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, NotFoundError, StoreError, TooLargeError
from kvferry.core.files import write_atomic
from kvferry.sender.text_cache import TextCache

CACHE_BYTES = 64 * limits.MIB
_OWN_FOLDER, _OWN_FILE, _OTHERS = 0o700, 0o600, 0o077


class DocumentStore:
    """A directory of UTF-8 texts that only their owner can read."""

    def __init__(self, root: Path, cache_bytes: int = CACHE_BYTES) -> None:
        """Open a directory, or make it.

        Args:
            root: the directory.
            cache_bytes: memory for the texts that were just looked up.

        Raises:
            StoreError: when the disk refuses.
        """
        self._root = root
        self._cache = TextCache(cache_bytes)
        try:
            root.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
            # One that was made by hand, or before texts were kept from others.
            if stat.S_IMODE(root.stat().st_mode) & _OTHERS:
                root.chmod(_OWN_FOLDER)
        except OSError as error:
            raise StoreError(f"store {root}: {error.strerror}", path=str(root)) from error

    def keep(self, text: bytes) -> None:
        """Store a text once; a damaged copy is mended.

        Raises:
            StoreError: when the disk refuses.
        """
        path = self._root / f"{digest(text).hex()}.txt"
        try:
            if not path.exists() or path.read_bytes() != text:
                write_atomic(path, text, _OWN_FILE)
        except OSError as error:
            raise StoreError(f"store {self._root}: {error.strerror}", path=str(self._root)) from error

    def spans(self, document: bytes, spans: Sequence[tuple[int, int]], max_bytes: int = 0) -> list[str]:
        """Return passages.

        Args:
            document: digest of the text's UTF-8 bytes.
            spans: half-open ranges of code points.
            max_bytes: stop before the passage with which all would take more UTF-8; 0 returns every passage.

        Raises:
            NotFoundError: when the document was never read here.
            InvalidRequestError: when a span is not inside the document.
            TooLargeError: when the passages together exceed the limit.
        """
        if len(spans) > limits.MAX_SPANS:
            raise TooLargeError(
                f"spans: {len(spans)}, at most {limits.MAX_SPANS} a call", value=len(spans), limit=limits.MAX_SPANS
            )
        text = self._read(document)
        for start, end in spans:
            if not 0 <= start <= end <= len(text):
                raise InvalidRequestError(
                    f"spans: {start}..{end} is not inside the document's {len(text)} characters",
                    field="spans",
                    start=start,
                    end=end,
                    limit=len(text),
                )
        passages: list[str] = []
        size = 0
        for start, end in spans:
            passage = text[start:end]
            size += len(passage.encode("utf-8"))
            if max_bytes and size > max_bytes:
                break
            passages.append(passage)
            if size > limits.MAX_SPAN_BYTES:
                raise TooLargeError(
                    f"spans: more than {limits.MAX_SPAN_BYTES} bytes of text in one call",
                    value=size,
                    limit=limits.MAX_SPAN_BYTES,
                )
        return passages

    def _read(self, document: bytes) -> str:
        """Return a text that was verified since its file last changed."""
        path = self._root / f"{document.hex()}.txt"
        try:
            text = self._cache.get(document, _stamp(path.stat()))
            if text is not None:
                return text
            with path.open("rb") as file:
                stamp, data = _stamp(os.fstat(file.fileno())), file.read()
        except FileNotFoundError as error:
            raise NotFoundError(f"document {document.hex()}: not read here", document=document.hex()) from error
        except OSError as error:
            raise StoreError(f"document {document.hex()}: {error.strerror}", document=document.hex()) from error
        if digest(data) != document:
            raise StoreError(f"document {document.hex()}: its text on disk has changed", document=document.hex())
        text = data.decode("utf-8")
        self._cache.put(document, stamp, text)
        return text


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino
