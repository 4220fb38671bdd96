"""Finding and reading an artifact on disk beside its store: no lock is taken and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core import config, json_records, manifest, stored
from kvferry.core.artifact_file import ArtifactFile
from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.errors import InvalidRequestError, KvferryError, NotFoundError, StoreError
from kvferry.core.ledger import SenderAccount
from kvferry.core.limits import MAX_MANIFEST_BYTES
from kvferry.core.manifest import Manifest
from kvferry.core.partial import MANIFEST_FILE, PAYLOAD_FILE
from kvferry.core.plan import make_plan
from kvferry.core.stored import RECORD_FILE, Record

_STATES = {"artifacts": "committed", "partial": "on its way in", "quarantine": "put aside"}
_WHOLE_ID = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_ID_OR_PREFIX = re.compile(rf"[0-9a-f]{{8,{2 * DIGEST_BYTES}}}")


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact as it lies on disk.

    Attributes:
        path: of the manifest file.
        state: "committed", "on its way in", "put aside" or "outside a store".
        encoded: the manifest's bytes.
        payload_bytes: size of the payload file beside the manifest; None when there is none.
        record: what a store knows beside the manifest; None when there is no record.
        problems: what is not as it should be.
        also_in: other stores' manifest files of the same artifact.
    """

    path: Path
    state: str
    encoded: bytes
    manifest: Manifest
    payload_bytes: int | None
    record: Record | None
    problems: tuple[str, ...]
    also_in: tuple[Path, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "artifact_id": manifest.artifact_id(self.encoded).hex(),
            "state": self.state,
            "path": str(self.path),
            "also_in": [str(path) for path in self.also_in],
            "manifest_bytes": len(self.encoded),
            "payload_bytes": self.manifest.payload.length,
            "payload_bytes_on_disk": self.payload_bytes,
            "problems": list(self.problems),
            "record": msgspec.to_builtins(self.record),
            "manifest": manifest.to_json(self.manifest),
        }


def find(target: str, stores: Sequence[Path]) -> StoredArtifact:
    """Find an artifact.

    Args:
        target: a manifest file, a directory that holds one, an artifact id, or at least its first 8 digits.
        stores: directories to search for an id; when empty, those of this machine's daemons.

    Raises:
        InvalidRequestError: when the target is none of these, or begins several ids.
        NotFoundError: when there is no such artifact.
        StoreError: when its manifest cannot be read.
        ManifestError: when its manifest is malformed.
    """
    path = Path(target)
    if path.is_dir():
        if not (path / MANIFEST_FILE).is_file():
            raise NotFoundError(f"{target}: holds no {MANIFEST_FILE}", path=target)
        return read(path / MANIFEST_FILE)
    if path.is_file():
        return read(path)
    given = _digits(target)
    return _search(given, stores or default_stores())


def read(path: Path, also_in: tuple[Path, ...] = ()) -> StoredArtifact:
    """Read the artifact with this manifest file.

    Raises:
        StoreError: when the file cannot be read.
        ManifestError: when it is malformed.
    """
    path = path.resolve()
    try:
        with path.open("rb") as file:
            encoded = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
    decoded = manifest.decode(encoded)
    payload = path.with_name(PAYLOAD_FILE)
    payload_bytes = payload.stat().st_size if payload.is_file() else None
    state = _STATES.get(path.parents[1].name, "outside a store") if len(path.parents) > 1 else "outside a store"
    record, record_problem = _read_record(path.with_name(RECORD_FILE))
    problems = list(_problems(path, encoded, decoded, payload_bytes))
    if state == "committed" and record_problem:
        problems.append(record_problem)
    if state == "put aside":
        problems.insert(0, f"put aside: {stored.reason(path.parent)}")
    return StoredArtifact(path, state, encoded, decoded, payload_bytes, record, tuple(problems), also_in)


def _read_record(path: Path) -> tuple[Record | None, str]:
    try:
        return json_records.decode(path.read_bytes(), Record), ""
    except OSError as error:
        return None, f"{path.name}: {error.strerror}"
    except msgspec.MsgspecError as error:
        return None, f"{path.name}: {error}"


def _problems(path: Path, encoded: bytes, decoded: Manifest, payload_bytes: int | None) -> Iterator[str]:
    folder = path.parent.name
    if _WHOLE_ID.fullmatch(folder) and folder != manifest.artifact_id(encoded).hex():
        yield "the manifest is not that of the artifact that its directory is named for"
    if _WHOLE_ID.fullmatch(folder) and payload_bytes != decoded.payload.length:
        there = "missing" if payload_bytes is None else f"{payload_bytes} bytes long"
        yield f"the payload is {there}, the manifest says {decoded.payload.length} bytes"
    try:
        make_plan(decoded)
    except KvferryError as error:
        yield error.message


def directories(stores: Sequence[Path], folders: Sequence[str], given: str = "") -> list[Path]:
    """Return the directories of all artifacts in some folders of some stores, whose ids begin with ``given``."""
    found = [path for store in stores for folder in folders for path in sorted((store / folder).glob(f"{given}*"))]
    return [path for path in found if _WHOLE_ID.fullmatch(path.name) and path.is_dir()]


def account(found: StoredArtifact) -> SenderAccount | None:
    """Return what an artifact cost its sender: from its record, or from the sender's notes beside its store."""
    if found.record is not None and found.record.account is not None:
        return found.record.account
    artifact_id = manifest.artifact_id(found.encoded).hex()
    for path in sorted(found.path.parents[2].glob("made/*")) if found.state == "committed" else ():
        try:
            made = json_records.decode(path.read_bytes(), _Made)
        except (OSError, msgspec.MsgspecError):
            continue
        if made.artifact == artifact_id:
            return made.account
    return None


class _Made(msgspec.Struct, frozen=True):
    artifact: str
    account: SenderAccount


def copies(given: str, stores: Sequence[Path]) -> list[Path]:
    """Return the directories of one artifact's published copies, and of those that were put aside.

    Args:
        given: an artifact id, or at least its first 8 digits.
        stores: where to look.

    Raises:
        InvalidRequestError: when it is no id, or begins several.
        NotFoundError: when there is no such artifact.
    """
    digits = _digits(given)
    found = directories(stores, ("artifacts", "quarantine"), digits)
    _check_one({path.name for path in found}, digits, stores)
    return found


def whole(found: StoredArtifact) -> ArtifactFile:
    """Return a published artifact as one that can be carried.

    Raises:
        InvalidRequestError: when it is still on its way in, or was put aside.
    """
    artifact_id = manifest.artifact_id(found.encoded).hex()
    if found.state in ("on its way in", "put aside"):
        raise InvalidRequestError(
            f"artifact {artifact_id}: is {found.state} in {found.path.parents[2]}", field="artifact"
        )
    return ArtifactFile(found.path.with_name(PAYLOAD_FILE), found.manifest, found.encoded, account(found), 0)


def _digits(given: str) -> str:
    digits = given.strip().lower()
    if not _ID_OR_PREFIX.fullmatch(digits):
        raise InvalidRequestError(
            f"{given!r} is neither a path here nor an artifact id (at least its first 8 hexadecimal digits)",
            field="target",
            value=given,
        )
    return digits


def _search(given: str, stores: Sequence[Path]) -> StoredArtifact:
    held = [path for path in directories(stores, tuple(_STATES), given) if (path / MANIFEST_FILE).is_file()]
    # Of several copies the published one comes first, wherever it is.
    held.sort(key=lambda path: list(_STATES).index(path.parent.name))
    _check_one({path.name for path in held}, given, stores)
    first, *others = (path / MANIFEST_FILE for path in held)
    return read(first, tuple(others))


def _check_one(names: Collection[str], given: str, stores: Sequence[Path]) -> None:
    searched = ", ".join(map(str, stores))
    if not names:
        raise NotFoundError(f"artifact {given}: not in {searched}", artifact=given)
    if len(names) > 1:
        raise InvalidRequestError(
            f"artifact {given}: begins {len(names)} ids in {searched}: {', '.join(sorted(names)[:4])}",
            field="target",
            value=given,
        )


def default_stores() -> list[Path]:
    """Return where this machine's daemons keep their artifacts."""
    kinds = (config.SenderConfig, config.ReceiverConfig)
    return [config.store_path(config.load(kind, None)) for kind in kinds]
