"""An artifact on its way in: its manifest, the chunks that have arrived, and the final verification.

A chunk is accepted only when its digest is the one in the manifest, so chunks may come in any order, twice, or over
several connections; what was there when it was opened, after a crash too, is judged again at Commit.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from pathlib import Path

from kvferry.core import manifest
from kvferry.core.errors import ContainerError, StoreError, TransferError
from kvferry.core.ledger import Traffic
from kvferry.core.manifest import Manifest
from kvferry.core.plan import Plan, make_plan

MANIFEST_FILE = "manifest.msgpack"
PAYLOAD_FILE = "payload.safetensors"
JOURNAL_FILE = "chunks"
_ABSENT, _PRESENT = b"\x00", b"\x01"
# After one byte a chunk the journal counts chunk bytes and protocol bytes, so that a resumed transfer is charged whole;
# with a checksum, because a damaged journal must not end up in a ledger.
_COUNTERS = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<I")
_COUNTED_BYTES = _COUNTERS.size + _CHECKSUM.size


class Partial:
    """The assembly of one artifact in its own directory. Thread-safe."""

    def __init__(self, path: Path, encoded: bytes, *, durable: bool = True) -> None:
        self.path = path
        self._durable = durable
        self.manifest: Manifest = manifest.decode(encoded)
        self.plan: Plan = make_plan(self.manifest)
        self._lock = threading.Lock()
        self._closed = False
        self._seen: set[int] = set()
        self._manifest_bytes = len(encoded)
        count = self.plan.count
        with contextlib.ExitStack() as undo:
            self._payload = os.open(path / PAYLOAD_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            undo.callback(os.close, self._payload)
            self._journal = os.open(path / JOURNAL_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            undo.callback(os.close, self._journal)
            os.ftruncate(self._payload, self.manifest.payload.length)
            os.ftruncate(self._journal, count + _COUNTED_BYTES)
            self._present = bytearray(os.pread(self._journal, count, 0))
            counters = _unpack(os.pread(self._journal, _COUNTED_BYTES, count))
            self._received, self._control = counters or (self._present_bytes(), 0)
            undo.pop_all()

    def missing(self) -> list[tuple[int, int]]:
        """Return half-open runs of chunk indices that have not arrived."""
        with self._lock:
            flags = bytes(self._present)
        return _absent_runs(flags)

    def put(self, index: int, data: bytes | memoryview) -> bool:
        """Verify one chunk and write it.

        Returns:
            Whether it was missing until now.

        Raises:
            ContainerError: when there is no such chunk or its length is wrong.
            IntegrityError: when its digest differs.
            StoreError: when the artifact was committed or dropped meanwhile, or the disk refuses.
        """
        self.plan.check(index, data)
        start, _ = self.plan.range(index)
        with self._lock:
            self._check_open()
            try:
                _write_all(self._payload, data, start)
                os.pwrite(self._journal, _PRESENT, index)
            except OSError as error:
                raise StoreError(f"chunk {index}: {error.strerror}", chunk=index) from error
            missing = self._present[index] != _PRESENT[0]
            self._present[index] = _PRESENT[0]
            self._seen.add(index)
            return missing

    def count(self, received: int, control: int) -> None:
        """Charge chunk bytes and protocol bytes to this artifact.

        Raises:
            StoreError: when the artifact was committed or dropped meanwhile, or the disk refuses.
        """
        with self._lock:
            self._count(received, control)

    def count_offer(self, control: int) -> None:
        """Charge an offer's protocol bytes, and its manifest if another offer was charged before.

        Raises:
            StoreError: when the artifact was committed or dropped meanwhile, or the disk refuses.
        """
        with self._lock:
            repeated = self._control > 0
            self._count(0, control + (self._manifest_bytes if repeated else 0))

    def traffic(self) -> Traffic:
        """Return what crossed so far."""
        with self._lock:
            return Traffic(self._manifest_bytes, self.manifest.payload.length, self._received, self._control)

    def verify(self) -> None:
        """Verify that every chunk is here and is its own, and make the payload durable.

        The manifest's other digests follow from the chunks' and were checked when it was offered.

        Raises:
            TransferError: when chunks are missing.
            IntegrityError: when bytes on disk differ; the chunks concerned count as missing again.
            ContainerError: when the file on disk was cut short; likewise.
            StoreError: when the artifact was committed or dropped meanwhile, or the disk refuses.
        """
        with self._lock:
            self._check_open()
            self._check_complete()
            try:
                self._verify_unseen()
                if self._durable:
                    self._sync()
            except OSError as error:
                raise StoreError(f"payload: {error.strerror}") from error

    def _sync(self) -> None:
        try:
            os.fsync(self._payload)
        except OSError:
            # The system may have dropped what it could not write, and would say so only once: nothing counts as here.
            self._seen.clear()
            self._present = bytearray(len(self._present))
            os.pwrite(self._journal, bytes(self._present), 0)
            raise

    def close(self) -> None:
        """Release the files. Later calls raise StoreError."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._payload)
                os.close(self._journal)

    def _count(self, received: int, control: int) -> None:
        self._check_open()
        self._received += received
        self._control += control
        try:
            os.pwrite(self._journal, _pack(self._received, self._control), len(self._present))
        except OSError as error:
            raise StoreError(f"journal: {error.strerror}") from error

    def _present_bytes(self) -> int:
        """What must have come at least."""
        return sum(
            end - start
            for (start, end), flag in zip(self.plan.ranges, self._present, strict=True)
            if flag == _PRESENT[0]
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("artifact: committed or dropped while the transfer was under way")

    def _check_complete(self) -> None:
        runs = _absent_runs(bytes(self._present))
        if runs:
            count = sum(end - start for start, end in runs)
            raise TransferError(f"chunk {runs[0][0]}: missing, {count} chunks in all", chunk=runs[0][0], missing=count)

    def _verify_unseen(self) -> None:
        """Judge the chunks that were here when this was opened; later ones were judged before they were written."""
        first: ContainerError | None = None
        for index in range(self.plan.count):
            if index in self._seen:
                continue
            start, end = self.plan.range(index)
            try:
                self.plan.check(index, os.pread(self._payload, end - start, start))
            except ContainerError as error:
                os.pwrite(self._journal, _ABSENT, index)
                self._present[index] = _ABSENT[0]
                first = first or error
            else:
                self._seen.add(index)
        if first is not None:
            raise first


def _absent_runs(flags: bytes) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index, flag in enumerate(flags):
        if flag == _PRESENT[0]:
            continue
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def _write_all(handle: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def _pack(received: int, control: int) -> bytes:
    counters = _COUNTERS.pack(received, control)
    return counters + _CHECKSUM.pack(zlib.crc32(counters))


def _unpack(data: bytes) -> tuple[int, int] | None:
    """Return the counters, or None when they are not those that were written."""
    counters = data[: _COUNTERS.size]
    if data[_COUNTERS.size :] != _CHECKSUM.pack(zlib.crc32(counters)):
        return None
    received, control = _COUNTERS.unpack(counters)
    return received, control
