"""The wall clock jumps by days while daemons work: no deadline moves with it, nothing expires, nothing hangs."""

from __future__ import annotations

import contextlib
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import Client, Progress
from kvferry.core import publishing, store_recovery
from kvferry.core.errors import DeadlineError
from kvferry.core.store import ArtifactStore
from kvferry.engine.model import LoadedModel

DOCUMENT = "The access code of the north warehouse is 4417. Who keeps the keys? " * 4
QUESTION = "What is the access code?"
DAY = 86_400
# Adds what a shared file says to every reading of the wall clock, and leaves the other clocks alone.
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset;

__attribute__((constructor)) static void start(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    if (file >= 0) offset = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && offset && id == CLOCK_REALTIME) now->tv_sec += *offset;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result) *result = exact.tv_sec;
    return exact.tv_sec;
}
"""


class Clock:
    """The wall clock of the processes that were started with its environment."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self._file.write_bytes(bytes(8))
        library, source = folder / "clock.so", folder / "clock.c"
        source.write_text(CLOCK)
        compiler = shutil.which("cc")
        if sys.platform != "linux" or compiler is None:
            pytest.skip("setting a process's clock takes Linux and a C compiler")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._file)}

    def jump(self, seconds: int) -> None:
        with self._file.open("r+b") as file:
            file.write(struct.pack("<q", seconds))


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"))


def test_the_clock_of_the_test_is_the_one_that_jumps(clock: Clock) -> None:
    """Else what follows would pass for nothing."""
    code = "import time; print(time.time(), time.monotonic())"
    clock.jump(-5 * DAY)
    said = subprocess.run(
        [sys.executable, "-c", code], env=clock.environment, capture_output=True, text=True, check=True
    )
    wall, monotonic = map(float, said.stdout.split())
    assert abs(time.time() - 5 * DAY - wall) < 60
    assert abs(time.monotonic() - monotonic) < 60
    clock.jump(0)


@dataclass(frozen=True)
class Watched:
    """Two daemons under one clock, and an artifact that they carried before it jumped."""

    receiver: Any
    client: Client
    kept: str
    answer: tuple[int, ...]

    def answers(self) -> bool:
        return self.client.ask(self.kept, QUESTION, max_tokens=8).token_ids == self.answer


@pytest.fixture(scope="module")
def watched(
    clock: Clock,
    node: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    tiny_model_dir: Callable[..., Path],
    local_answer: Callable[..., tuple[int, ...]],
) -> Iterator[Watched]:
    common = {"environment": clock.environment, "ttl_seconds": 3600}
    receiver = node("receiver", tiny_model_dir(), **common)
    sender = node("sender", tiny_model_dir(), chunk_bytes=1024, rpc_seconds=0.5, **common)
    for one in (receiver, sender):
        one.ready()
    with Client(sender=sender.address, receiver=receiver.address, timeout=5.0, idle_timeout=20.0) as client:
        kept = client.send(text=DOCUMENT).artifact_id
        yield Watched(receiver, client, kept, local_answer(tiny_model(), DOCUMENT, QUESTION))


@pytest.mark.endurance
@pytest.mark.parametrize("days", [10, -10])
def test_daemons_whose_clock_jumps(clock: Clock, watched: Watched, days: int) -> None:
    # In the middle of a transfer: it goes on, and what is kept has not been unused for ten days.
    jumped: list[Progress] = []

    def jump(event: Progress) -> None:
        if event.stage == "transfer" and event.done > event.total / 3 and not jumped:
            jumped.append(event)
            clock.jump(days * DAY)

    report = watched.client.send(text=f"{days}. {DOCUMENT}", progress=jump)
    assert jumped
    assert report.moved_bytes == report.payload_bytes
    assert watched.answers()
    assert watched.kept in {artifact.artifact_id for artifact in watched.client.artifacts()}

    # While a call waits for a receiver that is silent: its deadline comes when it is due.
    def jump_back(event: Progress) -> None:
        if event.stage == "offer":
            clock.jump(-days * DAY)

    watched.receiver.signal(signal.SIGSTOP)
    start = time.monotonic()
    try:
        with pytest.raises(DeadlineError):
            watched.client.send(text=f"Late {days}. {DOCUMENT}", progress=jump_back)
    finally:
        watched.receiver.signal(signal.SIGCONT)
    assert 2.0 < time.monotonic() - start < 20.0
    assert watched.answers()


class JumpingClock:
    """The wall clock as a store sees it."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:
        return time.time() + self.offset

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    made = JumpingClock()
    for module in (publishing, store_recovery):
        monkeypatch.setattr(module, "time", made)
    return made


def test_a_store_drops_nothing_because_the_clock_jumped(
    jumping: JumpingClock, artifact: Callable[..., Any], tiny_model: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    made = artifact(tiny_model(), "B1", DOCUMENT)
    with contextlib.closing(ArtifactStore(tmp_path / "store", ttl_seconds=3600)) as opened:
        partial = opened.begin(made.encoded)
        jumping.offset = 10.0 * DAY
        for index in range(made.plan.count):
            opened.partial(made.artifact_id)
            partial.put(index, made.read_chunk(index))
        jumping.offset = -10.0 * DAY
        stored = opened.commit(made.artifact_id, None)
        jumping.offset = 20.0 * DAY
        assert opened.ids() == [made.artifact_id]
        assert opened.get(made.artifact_id).record == stored.record
    # Started at a time before the file was written, as a machine without a battery is: it is new, not from the future.
    jumping.offset = -10.0 * DAY
    with contextlib.closing(ArtifactStore(tmp_path / "store", ttl_seconds=3600)) as opened:
        assert opened.ids() == [made.artifact_id]
