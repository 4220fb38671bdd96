"""A published artifact as it lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from kvferry.core.ledger import SenderAccount, Traffic
from kvferry.core.manifest import Manifest
from kvferry.core.partial import PAYLOAD_FILE
from kvferry.core.payloads import FilePayload, Sections
from kvferry.core.plan import Plan, make_plan

RECORD_FILE = "record.json"


class Record(msgspec.Struct, frozen=True):
    """What is known of an artifact beside its manifest. ``owner`` is the token that it counts against."""

    committed_at: float
    verify_ms: float
    account: SenderAccount | None
    traffic: Traffic | None
    owner: str | None = None


@dataclass(frozen=True)
class Stored:
    """A published artifact. ``path`` is its directory."""

    artifact_id: bytes
    manifest: Manifest
    encoded: bytes
    record: Record
    path: Path

    @cached_property
    def plan(self) -> Plan:
        """How the payload is cut into chunks."""
        return make_plan(self.manifest)

    @property
    def payload_path(self) -> Path:
        """The payload, a safetensors file."""
        return self.path / PAYLOAD_FILE

    def read_chunk(self, index: int) -> bytes:
        """Return one payload chunk as it is stored.

        Raises:
            ContainerError: when there is no such chunk.
            StoreError: when the file is gone, cannot be read or is shorter than the manifest says.
        """
        return FilePayload(self.payload_path, self.plan).read_chunk(index)

    @property
    def sections(self) -> Sections:
        """The verified sections, read one at a time."""
        return Sections(self.manifest, self.plan, FilePayload(self.payload_path, self.plan))
