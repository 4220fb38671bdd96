"""Payload bytes where they lie, chunk by chunk, and the sections that are read from them, verified."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from kvferry.core import container
from kvferry.core.errors import ContainerError, IntegrityError, StoreError
from kvferry.core.manifest import Manifest, Section
from kvferry.core.plan import Plan


class Payload(Protocol):
    """A whole payload, readable by chunk."""

    def read_chunk(self, index: int) -> bytes:
        """Return a chunk as it is stored, not verified.

        Raises:
            ContainerError: when there is no such chunk.
            StoreError: when it cannot be read.
        """


class Carriable(Payload, Protocol):
    """A whole artifact, wherever it lies."""

    @property
    def artifact_id(self) -> bytes:
        """Digest of the manifest."""

    @property
    def manifest(self) -> Manifest:
        """The manifest."""

    @property
    def encoded(self) -> bytes:
        """The manifest's bytes."""

    @property
    def plan(self) -> Plan:
        """How the payload is cut into chunks."""


class FilePayload:
    """A payload in a file, from byte ``offset`` on."""

    def __init__(self, path: Path, plan: Plan, offset: int = 0) -> None:
        self._path = path
        self._plan = plan
        self._offset = offset

    def read_chunk(self, index: int) -> bytes:
        """Return a chunk as it is on disk."""
        start, end = self._plan.range(index)
        try:
            with self._path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), end - start, self._offset + start)
        except OSError as error:
            raise StoreError(f"chunk {index}: {error.strerror}", chunk=index) from error
        if len(data) != end - start:
            raise StoreError(f"chunk {index}: the stored payload is cut short", chunk=index)
        return data


class Sections:
    """The verified sections of a stored artifact, read one at a time."""

    def __init__(self, manifest: Manifest, plan: Plan, payload: Payload) -> None:
        self._sections: dict[str, Section] = {section.name: section for section in manifest.sections}
        self._plan = plan
        self._payload = payload

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    def read(self, name: str) -> bytes | memoryview:
        """Return a section's verified content.

        Raises:
            ContainerError: when stored bytes are no longer those of the manifest, or there is no such section.
            StoreError: when they cannot be read.
        """
        section = self._sections.get(name)
        if section is None:
            raise ContainerError(f"section {name}: the artifact has none of this name", field=name)
        first, end = self._plan.section_chunks[name]
        chunks = []
        for index in range(first, end):
            data = self._payload.read_chunk(index)
            try:
                self._plan.check(index, data)
            except IntegrityError as error:
                raise IntegrityError(f"section {name}: {error.message}", **{**error.fields, "field": name}) from error
            chunks.append(data)
        return container.decode_section(section, chunks[0] if len(chunks) == 1 else b"".join(chunks))
