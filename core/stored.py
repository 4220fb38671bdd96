"""A published artifact as it lies on disk, and reading it from there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from kvferry.core import json_records, manifest
from kvferry.core.errors import IntegrityError, KvferryError, NotFoundError, StoreError
from kvferry.core.ledger import SenderAccount, Traffic
from kvferry.core.manifest import Manifest
from kvferry.core.partial import MANIFEST_FILE, PAYLOAD_FILE
from kvferry.core.payloads import FilePayload, Sections
from kvferry.core.plan import Plan, make_plan

RECORD_FILE = "record.json"
REASON_FILE = "reason.txt"


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


def read(path: Path, artifact_id: bytes) -> Stored:
    """Read the artifact in a directory.

    Raises:
        NotFoundError: when it is not there.
        StoreError: when its files cannot be read.
        IntegrityError: when its manifest is another one.
    """
    name = artifact_id.hex()
    try:
        encoded = (path / MANIFEST_FILE).read_bytes()
        record = json_records.decode((path / RECORD_FILE).read_bytes(), Record)
    except FileNotFoundError as error:
        raise NotFoundError(f"artifact {name}: not here", artifact=name) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"artifact {name}: {error}", artifact=name) from error
    check_identity(artifact_id, encoded)
    return Stored(artifact_id, manifest.decode(encoded), encoded, record, path)


def check_identity(artifact_id: bytes, encoded: bytes) -> None:
    """Check that a manifest is the artifact's own.

    Raises:
        IntegrityError: when it is another one.
    """
    if manifest.artifact_id(encoded) != artifact_id:
        raise IntegrityError(f"artifact {artifact_id.hex()}: its manifest on disk has changed", field="manifest")


def problem(path: Path, artifact_id: bytes) -> str:
    """Return what can be seen to be wrong with an artifact without reading its payload, "" for nothing.

    Raises:
        StoreError: when its files are there and cannot be read now, which says nothing about them.
    """
    for name in (MANIFEST_FILE, RECORD_FILE, PAYLOAD_FILE):
        if not (path / name).is_file():
            return f"{name} is missing"
    try:
        stored = read(path, artifact_id)
        length = stored.payload_path.stat().st_size
    except KvferryError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error, NotFoundError):
            raise
        return error.message
    except FileNotFoundError:
        return f"{PAYLOAD_FILE} is missing"
    expected = stored.manifest.payload.length
    return "" if length == expected else f"{PAYLOAD_FILE} has {length} bytes, the manifest says {expected}"


def reason(path: Path) -> str:
    """Return why an artifact was put aside."""
    try:
        return (path / REASON_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return "the reason was not recorded"


def size(path: Path) -> int:
    """Return the bytes of a copy's manifest and payload, 0 when there is no copy."""
    files = (path / MANIFEST_FILE, path / PAYLOAD_FILE)
    return sum(file.stat().st_size for file in files if file.exists())


def used_at(path: Path) -> float:
    """Return when a copy was last used, or last written to while it is on its way in. Seconds since 1970."""
    record = path / RECORD_FILE
    times = (entry.stat().st_mtime for entry in path.iterdir())
    return record.stat().st_mtime if record.exists() else max(times, default=path.stat().st_mtime)
