"""A store that became read-only while its receiver ran: what is there answers, everything else is an error of ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors
from kvferry.core.store import Stored
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import receiver_service_pb2 as pb

pytestmark = pytest.mark.slow

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? "
QUESTION = "What is the access code?"
# Permissions mean nothing to root until the process gives the right to ignore them up (CAP_DAC_OVERRIDE).
HUMBLE = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def launcher() -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ()
    if sys.platform != "linux":
        pytest.skip("permissions mean nothing to root")
    return ("-c", HUMBLE)


def protect(root: Path, *, on: bool) -> None:
    for path in (root, *root.rglob("*")):
        path.chmod((0o555 if path.is_dir() else 0o444) if on else (0o755 if path.is_dir() else 0o644))


def chunks(stored: Stored) -> Iterator[pb.PutRequest]:
    for index in range(stored.plan.count):
        yield pb.PutRequest(artifact_id=stored.artifact_id, index=index, data=stored.read_chunk(index))


def test_a_store_that_takes_nothing_more(
    launcher: tuple[str, ...],
    node: Callable[..., Any],
    peers: Callable[..., Any],
    artifact: Callable[..., Stored],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    local_answer: Callable[..., tuple[int, ...]],
    tmp_path: Path,
) -> None:
    model, root = tiny_model(), tmp_path / "store"
    stored, half, new = (artifact(model, "B1", text + DOCUMENT) for text in ("", "Half. ", "New. "))
    # Nothing is kept in memory, so that every answer reads the store.
    receiver = node("receiver", tiny_model_dir(), launcher, store=root, cache_bytes=0)
    receiver.ready()
    driver = peers(receiver=receiver.address)
    for one in (stored, half):
        driver.offer(one.encoded)
        driver.put(chunks(one))
    driver.commit(stored.artifact_id)
    payload = root / "artifacts" / stored.artifact_id.hex() / "payload.safetensors"
    expected = local_answer(model, DOCUMENT, QUESTION)
    assert driver.ask(stored.artifact_id, QUESTION).ids == expected

    protect(root, on=True)
    try:
        assert driver.ask(stored.artifact_id, QUESTION).ids == expected
        for refused in (
            lambda: driver.offer(new.encoded),
            lambda: driver.commit(half.artifact_id),
            lambda: driver.drop(stored.artifact_id),
        ):
            with pytest.raises(errors.StoreError, match=f"^store {root}: Permission denied"):
                refused()
        assert driver.listed() == {stored.artifact_id}
        assert driver.ask(stored.artifact_id, QUESTION).ids == expected
        # Damage is found as ever. It cannot be put aside, and is found again.
        true = payload.read_bytes()
        payload.chmod(0o644)
        payload.write_bytes(true[:-1] + bytes([true[-1] ^ 1]))
        payload.chmod(0o444)
        for _ in range(2):
            with pytest.raises(errors.IntegrityError, match="^section layers.1.values: chunk"):
                driver.ask(stored.artifact_id, QUESTION)
        payload.chmod(0o644)
        payload.write_bytes(true)
        payload.chmod(0o444)
        assert driver.ask(stored.artifact_id, QUESTION).ids == expected
    finally:
        protect(root, on=False)

    driver.drop(half.artifact_id)
    for one in (half, new):
        driver.offer(one.encoded)
        driver.put(chunks(one))
        driver.commit(one.artifact_id)
    assert driver.listed() == {one.artifact_id for one in (stored, half, new)}

    # A receiver does not start on such a store, and says so in one line.
    receiver.process.send_signal(signal.SIGTERM)
    assert receiver.process.wait(30) == 0
    receiver.process.stdout.close()
    protect(root, on=True)
    try:
        receiver.start()
        assert receiver.process.wait(60) == 1
        assert f"store {root}: Permission denied" in receiver.log.read_text().splitlines()[-1]
    finally:
        protect(root, on=False)
