"""What a store does when it opens: clears up after an earlier process and counts what that left."""

from __future__ import annotations

import time

from kvferry.core import stored
from kvferry.core.errors import StoreError
from kvferry.core.ownership import OWNER_FILE, Ownership
from kvferry.core.partial import MANIFEST_FILE, PAYLOAD_FILE
from kvferry.core.quarantine import Quarantine
from kvferry.core.retention import Retention
from kvferry.core.store_directory import ARTIFACTS, PARTIAL, QUARANTINE, StoreDirectory
from kvferry.core.stored import RECORD_FILE


def recover(directory: StoreDirectory, quarantine: Quarantine, ownership: Ownership, retention: Retention) -> None:
    """Clear what was being written, put aside what is not whole, and count all that is there.

    Raises:
        StoreError: when the disk refuses.
    """
    with directory.errors():
        directory.clear_aside()
        _judge(directory, quarantine)
        _count(directory, ownership, retention)


def _judge(directory: StoreDirectory, quarantine: Quarantine) -> None:
    for artifact_id in directory.ids(ARTIFACTS):
        try:
            problem = stored.problem(directory.path(ARTIFACTS, artifact_id), artifact_id)
        except StoreError as error:
            problem = error.message
        if problem:
            quarantine.put(artifact_id, f"found damaged at start: {problem}")
        else:
            # Still there if the process ended right after the artifact was published anew.
            quarantine.replaced(artifact_id)


def _count(directory: StoreDirectory, ownership: Ownership, retention: Retention) -> None:
    now = time.time()
    # Of two copies with one id, the later entry says when it was last used and whose it is.
    for folder, owner_file in ((QUARANTINE, RECORD_FILE), (PARTIAL, OWNER_FILE), (ARTIFACTS, RECORD_FILE)):
        ownership.recover(directory.root / folder, owner_file, (MANIFEST_FILE, PAYLOAD_FILE))
        for artifact_id in directory.ids(folder):
            idle_seconds = now - stored.used_at(directory.path(folder, artifact_id))
            retention.add(artifact_id, directory.size(artifact_id), idle_seconds)
