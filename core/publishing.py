"""Making artifacts visible: written aside or received whole, then published by one rename."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvferry.core import container, manifest, stored
from kvferry.core.container import Content
from kvferry.core.eviction import Eviction
from kvferry.core.files import fsync_directory, write_atomic
from kvferry.core.ledger import SenderAccount, Traffic
from kvferry.core.manifest import Manifest, Payload, Section
from kvferry.core.ownership import OWNER_FILE, Ownership
from kvferry.core.partial import JOURNAL_FILE, MANIFEST_FILE, PAYLOAD_FILE
from kvferry.core.plan import make_plan
from kvferry.core.quarantine import Quarantine
from kvferry.core.retention import Retention
from kvferry.core.store_directory import ARTIFACTS, StoreDirectory
from kvferry.core.stored import RECORD_FILE, Record, Stored

Describe = Callable[[tuple[Section, ...], Payload], Manifest]


def write(aside: Path, contents: tuple[Content, ...], chunk_size: int, describe: Describe) -> bytes:
    """Write an artifact into a new directory that nobody looks at.

    Args:
        aside: the directory.
        contents: the payload's sections in order.
        chunk_size: bytes a chunk.
        describe: makes the manifest from the digests of sections and payload.

    Returns:
        The artifact's id.

    Raises:
        OSError: when the disk refuses.
    """
    aside.mkdir()
    with (aside / PAYLOAD_FILE).open("xb") as file:
        sections, payload = container.write_payload(contents, file.write, chunk_size)
        file.flush()
        os.fsync(file.fileno())
    described = describe(sections, payload)
    make_plan(described)
    encoded = manifest.encode(described)
    write_atomic(aside / MANIFEST_FILE, encoded)
    _write_record(aside, Record(time.time(), 0.0, None, None))
    return manifest.artifact_id(encoded)


class Publisher:
    """Moves whole artifacts to where they are found. Not thread-safe: the store holds its lock."""

    def __init__(
        self,
        directory: StoreDirectory,
        quarantine: Quarantine,
        ownership: Ownership,
        retention: Retention,
        eviction: Eviction,
    ) -> None:
        self._directory = directory
        self._quarantine = quarantine
        self._ownership = ownership
        self._retention = retention
        self._eviction = eviction

    def holds(self, artifact_id: bytes) -> bool:
        """Whether an artifact is published. One that can be seen to be damaged is put aside, and is not.

        Raises:
            StoreError: when its files cannot be read now, or the disk refuses.
        """
        self._eviction.sweep()
        path = self._directory.path(ARTIFACTS, artifact_id)
        if not path.exists():
            return False
        problem = stored.problem(path, artifact_id)
        if problem:
            self._quarantine.put(artifact_id, problem)
        return not problem

    def publish(self, path: Path, artifact_id: bytes) -> Stored:
        """Publish the whole artifact in a directory, which is gone afterwards.

        Raises:
            OSError: when the disk refuses.
            StoreError: likewise, or when what is published under this id cannot be read now.
        """
        target = self._directory.path(ARTIFACTS, artifact_id)
        if self.holds(artifact_id):
            shutil.rmtree(path)
        else:
            path.rename(target)
            fsync_directory(target.parent)
        # A new copy, verified whole, takes the place of one that was put aside.
        self._quarantine.replaced(artifact_id)
        self._retention.add(artifact_id, self._directory.size(artifact_id))
        return stored.read(target, artifact_id)

    def publish_received(
        self, path: Path, artifact_id: bytes, verify_ms: float, account: SenderAccount | None, traffic: Traffic
    ) -> Stored:
        """Publish a verified assembly with the record of how it came; ``path`` is its directory.

        Raises:
            StoreError: when the disk refuses, or what is published under this id cannot be read now.
        """
        with self._directory.errors():
            # While the journal is still there: if the disk is full, no chunk has to come again.
            owner = self._ownership.owner(artifact_id)
            _write_record(path, Record(time.time(), verify_ms, account, traffic, owner))
            (path / JOURNAL_FILE).unlink(missing_ok=True)
            published = self.publish(path, artifact_id)
            # Only now that the record names the owner: at no moment does nothing name it.
            (published.path / OWNER_FILE).unlink(missing_ok=True)
        return published


def _write_record(path: Path, record: Record) -> None:
    write_atomic(path / RECORD_FILE, msgspec.json.encode(record))
