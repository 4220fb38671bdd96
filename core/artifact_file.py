"""An artifact in one file, to travel by any means. docs/wire.md, "The artifact file", specifies it.

magic, two lengths, manifest, account, digest of all that, payload
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvferry.core import ledger, manifest, verification
from kvferry.core.digests import DIGEST_BYTES, digest
from kvferry.core.errors import ContainerError, IntegrityError, InvalidRequestError, StoreError
from kvferry.core.files import fsync_directory
from kvferry.core.ledger import SenderAccount
from kvferry.core.limits import KIB, MAX_MANIFEST_BYTES
from kvferry.core.manifest import Manifest
from kvferry.core.payloads import Carriable, FilePayload
from kvferry.core.plan import Plan, make_plan

# A byte that is no text, and both ways to end a line: whatever takes the file for text and mends it breaks these first.
MAGIC = b"\x89KVF\r\n\x01\n"
_LENGTHS = struct.Struct("<II")
_FIXED = len(MAGIC) + _LENGTHS.size
_MAX_ACCOUNT_BYTES = 64 * KIB


@dataclass(frozen=True)
class ArtifactFile:
    """An artifact in a file.

    Attributes:
        manifest, encoded: the manifest, and its bytes.
        account: what making the artifact cost; None when whoever wrote the file did not know.
        payload_start: where the payload begins.
    """

    path: Path
    manifest: Manifest
    encoded: bytes
    account: SenderAccount | None
    payload_start: int

    @cached_property
    def artifact_id(self) -> bytes:
        """Digest of the manifest."""
        return manifest.artifact_id(self.encoded)

    @cached_property
    def plan(self) -> Plan:
        """How the payload is cut into chunks."""
        return make_plan(self.manifest)

    def read_chunk(self, index: int) -> bytes:
        """Return one payload chunk, not verified.

        Raises:
            ContainerError: when there is no such chunk.
            StoreError: when it cannot be read.
        """
        return FilePayload(self.path, self.plan, self.payload_start).read_chunk(index)

    def verify(self) -> None:
        """Verify the whole payload.

        Raises:
            ContainerError: naming the first chunk and section that is not as the manifest says.
            StoreError: when the file cannot be read.
        """
        for error in verification.damage(self.manifest, self.plan, self):
            raise type(error)(f"{self.path}: {error.message}", **error.fields)


def read(path: Path) -> ArtifactFile:
    """Read everything but the payload, and check that the file is neither cut nor longer than it says.

    Raises:
        ContainerError: when it is no artifact file, is cut or goes on after its end.
        IntegrityError: when its head has changed.
        ManifestError: when the manifest does not hold together.
        StoreError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            encoded, account = _read_head(path, file)
            start = file.tell()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
    decoded = manifest.decode(encoded)
    found = ArtifactFile(path, decoded, encoded, _account(path, account), start)
    _ = found.plan
    expected = start + decoded.payload.length
    if size != expected:
        what = (
            f"is cut short: {size} bytes of {expected}" if size < expected else f"has {size - expected} bytes too many"
        )
        raise ContainerError(f"{path}: {what}", field="payload", value=size, expected=expected)
    return found


def write(
    path: Path,
    artifact: Carriable,
    account: SenderAccount | None,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write an artifact, verifying every chunk on the way. The file is wholly there afterwards, or not at all.

    Args:
        path: the file.
        artifact: what to write.
        account: what making it cost, if that is known.
        overwrite: replace a file of that name.
        progress: told the payload bytes that are written, and all.

    Returns:
        The file's size.

    Raises:
        InvalidRequestError: when there is such a file already.
        ContainerError: when a chunk is not as the manifest says; nothing is left behind.
        StoreError: when a chunk cannot be read or the disk refuses; likewise.
    """
    aside = path.with_name(f".kvferry-{secrets.token_hex(8)}")
    try:
        _check_absent(path, overwrite=overwrite)
        with aside.open("xb") as file:
            file.write(_head(artifact.encoded, account))
            _write_payload(artifact, file, progress)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        _check_absent(path, overwrite=overwrite)
        aside.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", path=str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return size


def _check_absent(path: Path, *, overwrite: bool) -> None:
    if not overwrite and (path.exists() or path.is_symlink()):
        raise InvalidRequestError(f"{path}: is there already", field="file", path=str(path))


def _head(encoded: bytes, account: SenderAccount | None) -> bytes:
    spent = b"" if account is None else ledger.to_json(account).encode()
    head = MAGIC + _LENGTHS.pack(len(encoded), len(spent)) + encoded + spent
    return head + digest(head)


def _write_payload(artifact: Carriable, file: BinaryIO, progress: Callable[[int, int], None] | None) -> None:
    total, done = artifact.manifest.payload.length, 0
    for index in range(artifact.plan.count):
        data = artifact.read_chunk(index)
        artifact.plan.check(index, data)
        file.write(data)
        done += len(data)
        if progress is not None:
            progress(done, total)


def _read_head(path: Path, file: BinaryIO) -> tuple[bytes, bytes]:
    """Return the bytes of manifest and account."""
    fixed = file.read(_FIXED)
    magic = fixed[: len(MAGIC)]
    if magic != MAGIC[: len(magic)]:
        raise ContainerError(f"{path}: magic: {magic.hex(' ')}, an artifact file begins with {MAGIC.hex(' ')}")
    if len(fixed) < _FIXED:
        raise _cut(path)
    manifest_bytes, account_bytes = _LENGTHS.unpack(fixed[len(MAGIC) :])
    for name, value, limit in (
        ("manifest", manifest_bytes, MAX_MANIFEST_BYTES),
        ("account", account_bytes, _MAX_ACCOUNT_BYTES),
    ):
        if value > limit:
            raise ContainerError(
                f"{path}: head: {name} of {value} bytes, the limit is {limit}", field=name, value=value, limit=limit
            )
    rest = file.read(manifest_bytes + account_bytes + DIGEST_BYTES)
    if len(rest) < manifest_bytes + account_bytes + DIGEST_BYTES:
        raise _cut(path)
    said, expected = rest[-DIGEST_BYTES:], digest(fixed + rest[:-DIGEST_BYTES])
    if said != expected:
        raise IntegrityError(
            f"{path}: head: digest {expected.hex()[:16]}…, the file says {said.hex()[:16]}…",
            field="head",
            actual=expected.hex(),
            expected=said.hex(),
        )
    return rest[:manifest_bytes], rest[manifest_bytes:-DIGEST_BYTES]


def _cut(path: Path) -> ContainerError:
    return ContainerError(f"{path}: is cut short: it ends within its head", field="head")


def _account(path: Path, data: bytes) -> SenderAccount | None:
    try:
        return ledger.account_from_json(data.decode("utf-8")) if data else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ContainerError(f"{path}: account: {error}", field="account") from error
