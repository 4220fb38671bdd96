"""A sender's disk: whatever is sent, to whomever and with whatever end, its store stays within its budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors
from kvferry.core.metrics import SenderMetrics
from kvferry.core.store import ArtifactStore
from kvferry.sender import daemon as sender_daemon

BUDGET = 30_000
DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 10


def stored_bytes(store: Path) -> int:
    """What counts: documents, notes, manifests and payloads."""
    files = [path for path in store.rglob("*") if path.is_file() and path.name not in ("lock", "record.json")]
    return sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("receiver_takes", [1, 2**20])
def test_documents_that_are_refused_or_taken_never_fill_the_disk(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    receiver_takes: int,
) -> None:
    receiver = here("receiver", tiny_model_dir(), max_payload_bytes=receiver_takes)
    driver = peers(here("sender", tiny_model_dir(), max_store_bytes=BUDGET).address, receiver.address)
    for number in range(60):
        text = f"{number}. {DOCUMENT}"
        if receiver_takes == 1:
            with pytest.raises(errors.RefusedError):
                driver.send(text, "A1")
        else:
            assert driver.send(text, "A1").end.moved_bytes > len(text)
        assert stored_bytes(tmp_path / "sender") <= BUDGET
    # And what is kept is what came last.
    assert f"{59}. {DOCUMENT}" in [path.read_text() for path in (tmp_path / "sender" / "documents").iterdir()]
    with pytest.raises(errors.TooLargeError, match=f"the budget is {BUDGET}"):
        driver.send("x" * (BUDGET + 1), "A1")


def test_documents_and_notes_are_in_the_metrics(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[SenderMetrics] = []
    watch = SenderMetrics.watch_store

    def watched(self: SenderMetrics, store: ArtifactStore) -> None:
        kept.append(self)
        watch(self, store)

    monkeypatch.setattr(sender_daemon.SenderMetrics, "watch_store", watched)
    driver = peers(here("sender", tiny_model_dir()).address, here("receiver", tiny_model_dir()).address)
    driver.send(DOCUMENT * 20, "A1")
    for area in ("documents", "made", "artifacts"):
        blocks = sum(path.stat().st_blocks for path in (tmp_path / "sender" / area).rglob("*") if path.is_file())
        value = kept[0].registry.get_sample_value("kvferry_store_bytes", {"area": area})
        assert value == blocks * 512
