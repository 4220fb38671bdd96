"""Documents that were read here, kept for look-ups, by the digest of their text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.core import limits
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, NotFoundError, StoreError, TooLargeError
from kvferry.core.store import ArtifactStore
from kvferry.core.store_directory import disk_errors
from kvferry.sender.text_cache import TextCache

CACHE_BYTES = 64 * limits.MIB
_FOLDER, _SUFFIX = "documents", ".txt"


class DocumentStore:
    """UTF-8 texts that only their owner can read. They share the store's budget and its time to live."""

    def __init__(self, store: ArtifactStore, cache_bytes: int = CACHE_BYTES) -> None:
        """Open the documents of a store.

        Args:
            store: where they lie, beside the artifacts.
            cache_bytes: memory for the texts that were just looked up.

        Raises:
            StoreError: when the disk refuses.
        """
        self._files = store.files(_FOLDER, _SUFFIX)
        self._cache = TextCache(cache_bytes)

    @contextlib.contextmanager
    def kept(self, text: bytes) -> Iterator[None]:
        """Store a text once, and keep it from eviction for the block; a damaged copy is mended.

        Raises:
            TooLargeError: when it does not fit the store's budget.
            StoreError: when the disk refuses.
        """
        document = digest(text)
        with self._files.in_use(document) as path:
            whole = False
            with disk_errors(path.parent), contextlib.suppress(FileNotFoundError):
                whole = path.read_bytes() == text
            if not whole:
                self._files.write(document, text)
            # The block may be long, and so may the text.
            del text
            yield

    def spans(self, document: bytes, spans: Sequence[tuple[int, int]], max_bytes: int = 0) -> list[str]:
        """Return passages.

        Args:
            document: digest of the text's UTF-8 bytes.
            spans: half-open ranges of code points.
            max_bytes: stop before the passage with which all would take more UTF-8; 0 returns every passage.

        Raises:
            NotFoundError: when the document was never read here, or is no longer kept.
            InvalidRequestError: when a span is not inside the document.
            TooLargeError: when the passages together exceed the limit.
        """
        if len(spans) > limits.MAX_SPANS:
            raise TooLargeError(
                f"spans: {len(spans)}, at most {limits.MAX_SPANS} a call", value=len(spans), limit=limits.MAX_SPANS
            )
        with self._files.in_use(document) as path:
            text = self._read(document, path)
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

    def _read(self, document: bytes, path: Path) -> str:
        """Return a text that was verified since its file last changed."""
        try:
            text = self._cache.get(document, _stamp(path.stat()))
            if text is not None:
                return text
            with path.open("rb") as file:
                stamp, data = _stamp(os.fstat(file.fileno())), file.read()
        except FileNotFoundError as error:
            raise NotFoundError(
                f"document {document.hex()}: not read here, or no longer kept", document=document.hex()
            ) from error
        except OSError as error:
            raise StoreError(f"document {document.hex()}: {error.strerror}", document=document.hex()) from error
        if digest(data) != document:
            raise StoreError(f"document {document.hex()}: its text on disk has changed", document=document.hex())
        text = data.decode("utf-8")
        self._cache.put(document, stamp, text)
        return text


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino
