"""What `kvferry artifacts` lists and verifies: stores on disk, read without their lock, or a receiver's answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.cli import output, stored_artifact
from kvferry.core import stored, verification
from kvferry.core.errors import KvferryError
from kvferry.core.partial import MANIFEST_FILE, PAYLOAD_FILE
from kvferry.core.payloads import FilePayload
from kvferry.core.plan import make_plan

if TYPE_CHECKING:
    from kvferry.client import Artifact

_SHOWN_DIGITS = 16
_HEAD = ("ID", "METHOD", "FORM", "BYTES", "TOKENS", "LAST USED", "NOTE")


@dataclass(frozen=True)
class Row:
    """One artifact. ``problem`` is what can be seen to be wrong without reading the payload."""

    artifact_id: str
    method: str
    form: str
    payload_bytes: int
    prefix_tokens: int
    used_at: float
    quarantined: str | None
    problem: str | None
    where: str

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        """Return what people see."""
        used = datetime.fromtimestamp(self.used_at).astimezone().strftime("%Y-%m-%d %H:%M") if self.used_at else "-"
        note = f"put aside: {self.quarantined}" if self.quarantined else self.problem or ""
        return (
            self.artifact_id[:_SHOWN_DIGITS],
            self.method or "-",
            self.form or "-",
            output.size(self.payload_bytes),
            str(self.prefix_tokens or "-"),
            used,
            " ".join(note.split()),
        )


def of_stores(stores: Sequence[Path]) -> list[Row]:
    """Return what lies in stores, the last used first."""
    rows = [_of_directory(path) for path in stored_artifact.directories(stores, ("artifacts", "quarantine"))]
    return sorted((row for row in rows if row is not None), key=lambda row: -row.used_at)


def of_receiver(artifacts: Iterable[Artifact], receiver: str) -> list[Row]:
    """Return what a receiver says that it holds, the last used first."""
    rows = [
        Row(
            item.artifact_id,
            item.method,
            item.form,
            item.payload_bytes,
            item.prefix_tokens,
            item.used_at or item.committed_at,
            item.quarantined,
            None,
            receiver,
        )
        for item in artifacts
    ]
    return sorted(rows, key=lambda row: -row.used_at)


def table(rows: Sequence[Row]) -> str:
    """Return rows for people; where several places are listed, the last column says which one."""
    several = len({row.where for row in rows}) > 1
    lines = [row.cells() + ((row.where,) if several else ()) for row in rows]
    return output.table([_HEAD + (("WHERE",) if several else ()), *lines])


def _of_directory(path: Path) -> Row | None:
    store, artifact_id = str(path.parents[1]), path.name
    quarantined = stored.reason(path) if path.parent.name == "quarantine" else None
    try:
        used_at = stored.used_at(path)
        found = stored_artifact.read(path / MANIFEST_FILE)
    except FileNotFoundError:
        # The daemon that has the store open dropped it meanwhile.
        return None
    except KvferryError as error:
        if not path.exists():
            return None
        return Row(artifact_id, "", "", 0, 0, used_at, quarantined, error.message, store)
    manifest = found.manifest
    return Row(
        artifact_id,
        manifest.method.id,
        manifest.form,
        manifest.payload.length,
        manifest.prefix.tokens if manifest.prefix else 0,
        used_at,
        quarantined,
        "; ".join(found.problems) or None if quarantined is None else None,
        store,
    )


def problems(path: Path) -> list[str] | None:
    """Read an artifact in a store again, every byte of it.

    Args:
        path: its directory.

    Returns:
        What is wrong; None when it is not there any more.
    """
    try:
        found = stored_artifact.read(path / MANIFEST_FILE)
        listed = [problem for problem in found.problems if not problem.startswith("put aside")]
        listed += [
            error.message
            for error in verification.damage(
                found.manifest, make_plan(found.manifest), FilePayload(path / PAYLOAD_FILE, make_plan(found.manifest))
            )
        ]
    except KvferryError as error:
        listed = [error.message]
    return listed if path.exists() else None
