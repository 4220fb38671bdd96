"""A disk that keeps what should go: everything else is there as ever, and it goes when the disk lets it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import NotFoundError, StoreError
from kvferry.core.store import ArtifactStore


def test_what_expired_and_cannot_be_removed_hides_nothing_else(
    tmp_path: Path, kv_example: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, used, new = (kv_example(tokens=tokens) for tokens in (40, 41, 42))
    with contextlib.closing(ArtifactStore(tmp_path, ttl_seconds=100)) as store:
        for example in (old, used):
            example.received_by(store)
        monkeypatch.setattr(store._retention, "_clock", lambda: time.monotonic() + 200)
        with store.pinned(used.id), monkeypatch.context() as patch:

            def refuse(*_: object) -> None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

            patch.setattr(os, "rename", refuse)
            assert store.get(used.id).artifact_id == used.id
            assert used.id in store.ids()
            assert store.holds(used.id)
            with pytest.raises(StoreError, match="Read-only file system"):
                store.drop(used.id)
        new.received_by(store)
        assert store.ids() == sorted([used.id, new.id])
        with pytest.raises(NotFoundError):
            store.get(old.id)
