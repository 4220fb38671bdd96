"""Which token a stored artifact counts against, and whether there is room for one more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.core import json_records
from kvferry.core.errors import QuotaError
from kvferry.core.tokens import Token

OWNER_FILE = "owner"


class _Owned(msgspec.Struct, frozen=True):
    """The part of an artifact's record that matters here."""

    owner: str | None = None


@dataclass
class _Usage:
    artifacts: int = 0
    bytes: int = 0


class Ownership:
    """What each token has stored. Not thread-safe: the store holds its lock."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[str, int]] = {}
        self._usage: dict[str, _Usage] = {}

    def owner(self, artifact_id: bytes) -> str | None:
        """Return the name of the token that an artifact counts against."""
        return self._entries.get(artifact_id, (None, 0))[0]

    def check(self, token: Token | None, artifact_id: bytes, size: int) -> None:
        """Check that a token may store an artifact.

        Args:
            token: who asks; None has no limits.
            artifact_id: what is asked for; an earlier copy of it, which it replaces, does not count.
            size: bytes of manifest and payload.

        Raises:
            QuotaError: naming the limit, what is used and what was asked.
        """
        if token is None:
            return
        usage = self._usage.get(token.name, _Usage())
        owner, replaced = self._entries.get(artifact_id, (None, 0))
        if owner == token.name:
            usage = _Usage(usage.artifacts - 1, usage.bytes - replaced)
        for limit_name, used, asked, limit in (
            ("max_artifacts", usage.artifacts, 1, token.max_artifacts),
            ("max_bytes", usage.bytes, size, token.max_bytes),
        ):
            if limit is not None and used + asked > limit:
                raise QuotaError(
                    f"{limit_name}: token {token.name} has {used} stored and asks for {asked} more, the limit is "
                    f"{limit}; drop what is no longer needed",
                    field=limit_name,
                    token=token.name,
                    current=used,
                    asked=asked,
                    limit=limit,
                )

    def add(self, artifact_id: bytes, owner: str, size: int) -> None:
        """Count an artifact against its owner; an artifact that is counted already is counted anew."""
        self.remove(artifact_id)
        self._entries[artifact_id] = (owner, size)
        usage = self._usage.setdefault(owner, _Usage())
        usage.artifacts += 1
        usage.bytes += size

    def remove(self, artifact_id: bytes) -> None:
        """Give an artifact's share back."""
        owner, size = self._entries.pop(artifact_id, (None, 0))
        if owner is None:
            return
        usage = self._usage[owner]
        usage.artifacts -= 1
        usage.bytes -= size
        if not usage.artifacts:
            del self._usage[owner]

    def recover(self, folder: Path, owner_file: str, counted_files: Iterable[str]) -> None:
        """Count what an earlier process stored.

        Args:
            folder: directory of artifacts, each in a directory named for its id.
            owner_file: the file in it that names the owner, JSON.
            counted_files: those whose size counts.
        """
        counted = tuple(counted_files)
        for path in folder.iterdir():
            # Foreign files and damaged entries are the store's to report when they are used.
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                owner = json_records.decode((path / owner_file).read_bytes(), _Owned).owner
                if owner is not None:
                    size = sum((path / name).stat().st_size for name in counted if (path / name).exists())
                    self.add(bytes.fromhex(path.name), owner, size)


def owner_record(owner: str) -> bytes:
    """Return the content of ``OWNER_FILE``."""
    return msgspec.json.encode(_Owned(owner))
