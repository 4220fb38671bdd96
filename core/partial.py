"""An artifact on its way in: its manifest, the chunks that have arrived, and the final verification.

A chunk is accepted only when its digest is the one in the manifest, so chunks may come in any order, twice, or over
several connections; what survives a crash is judged again at Commit.
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

from kvferry.core import container, manifest
from kvferry.core.digests import Hasher
from kvferry.core.errors import ContainerError, IntegrityError, StoreError, TransferError
from kvferry.core.ledger import Traffic
from kvferry.core.manifest import Manifest

MANIFEST_FILE = "manifest.msgpack"
PAYLOAD_FILE = "payload.safetensors"
_JOURNAL_FILE = "chunks"
_ABSENT, _PRESENT = b"\x00", b"\x01"
# After one byte a chunk the journal counts chunk bytes and protocol bytes, so that a resumed transfer is charged whole.
_COUNTERS = struct.Struct("<QQ")


class Partial:
    """The assembly of one artifact in its own directory. Thread-safe."""

    def __init__(self, path: Path, encoded: bytes) -> None:
        self.path = path
        self.manifest: Manifest = manifest.decode(encoded)
        self._lock = threading.Lock()
        self._closed = False
        self._payload = os.open(path / PAYLOAD_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        self._journal = os.open(path / _JOURNAL_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        count = container.chunk_count(self.manifest.payload)
        os.ftruncate(self._payload, self.manifest.payload.length)
        os.ftruncate(self._journal, count + _COUNTERS.size)
        self._present = bytearray(os.pread(self._journal, count, 0))
        self._received, self._control = _COUNTERS.unpack(os.pread(self._journal, _COUNTERS.size, count))
        self._manifest_bytes = len(encoded)

    def missing(self) -> list[tuple[int, int]]:
        """Return half-open runs of chunk indices that have not arrived."""
        with self._lock:
            flags = bytes(self._present)
        runs: list[tuple[int, int]] = []
        for index, flag in enumerate(flags):
            if flag == _PRESENT[0]:
                continue
            if runs and runs[-1][1] == index:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return runs

    def put(self, index: int, data: bytes) -> bool:
        """Verify one chunk and write it.

        Returns:
            Whether it was missing until now.

        Raises:
            ContainerError: when there is no such chunk or its length is wrong.
            IntegrityError: when its digest differs.
            StoreError: when the artifact was committed or dropped meanwhile, or the disk refuses.
        """
        container.check_chunk(self.manifest.payload, index, data)
        start, _ = container.chunk_range(self.manifest.payload, index)
        with self._lock:
            self._check_open()
            try:
                _write_all(self._payload, data, start)
                os.pwrite(self._journal, _PRESENT, index)
            except OSError as error:
                raise StoreError(f"chunk {index}: {error.strerror}", chunk=index) from error
            missing = self._present[index] != _PRESENT[0]
            self._present[index] = _PRESENT[0]
            return missing

    def count(self, received: int, control: int) -> None:
        """Charge chunk bytes and protocol bytes to this artifact.

        Raises:
            StoreError: when the artifact was committed or dropped meanwhile.
        """
        with self._lock:
            self._check_open()
            self._received += received
            self._control += control
            os.pwrite(self._journal, _COUNTERS.pack(self._received, self._control), len(self._present))

    def traffic(self) -> Traffic:
        """Return what crossed so far."""
        with self._lock:
            return Traffic(self._manifest_bytes, self.manifest.payload.length, self._received, self._control)

    def verify(self) -> None:
        """Verify every digest of the whole payload and make it durable.

        Raises:
            TransferError: when chunks are missing.
            IntegrityError: when bytes on disk differ; the chunks concerned count as missing again.
            ContainerError: when the file on disk was cut short; likewise.
        """
        runs = self.missing()
        if runs:
            count = sum(end - start for start, end in runs)
            raise TransferError(f"chunk {runs[0][0]}: missing, {count} chunks in all", chunk=runs[0][0], missing=count)
        with self._lock:
            self._check_open()
            self._verify_chunks()
            self._verify_sections()
            os.fsync(self._payload)

    def close(self) -> None:
        """Release the files. Later calls raise StoreError."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._payload)
                os.close(self._journal)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("artifact: committed or dropped while the transfer was under way")

    def _verify_chunks(self) -> None:
        whole = Hasher()
        payload = self.manifest.payload
        first: ContainerError | None = None
        for index in range(container.chunk_count(payload)):
            start, end = container.chunk_range(payload, index)
            data = os.pread(self._payload, end - start, start)
            try:
                container.check_chunk(payload, index, data)
            except ContainerError as error:
                os.pwrite(self._journal, _ABSENT, index)
                self._present[index] = _ABSENT[0]
                first = first or error
            whole.update(data)
        if first is not None:
            raise first
        if whole.digest() != payload.digest:
            # Every chunk is the one that was declared, so the manifest contradicts itself.
            raise IntegrityError(
                f"payload: digest {whole.digest().hex()[:16]}…, expected {payload.digest.hex()[:16]}…",
                field="payload.digest",
                actual=whole.digest().hex(),
                expected=payload.digest.hex(),
            )

    def _verify_sections(self) -> None:
        sections = self.manifest.sections
        container.check_header(sections, os.pread(self._payload, len(container.header(sections)), 0))
        ranges = container.section_offsets(sections)
        for section in sections:
            start, end = ranges[section.name]
            hasher = Hasher()
            for at in range(start, end, self.manifest.payload.chunk_size):
                hasher.update(os.pread(self._payload, min(self.manifest.payload.chunk_size, end - at), at))
            if hasher.digest() != section.digest:
                raise IntegrityError(
                    f"section {section.name}: digest {hasher.digest().hex()[:16]}…, "
                    f"expected {section.digest.hex()[:16]}…",
                    field=section.name,
                    actual=hasher.digest().hex(),
                    expected=section.digest.hex(),
                )


def _write_all(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
