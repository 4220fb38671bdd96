"""How fast artifacts move: Offer + Put + Commit with every digest verified, against a raw TCP socket in the same run.

Each transport's receiver is a process of its own. Transports take turns, so that a noisy machine is noisy for all of
them; a row is the median of its turns, and ``ratio`` compares it with the raw socket's median at the same size.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np

from kvferry.ablations.speed import synthetic
from kvferry.core import channel, logs
from kvferry.core.addresses import Address
from kvferry.core.admission import Admission
from kvferry.core.limits import DEFAULT_CHUNK_BYTES
from kvferry.core.metrics import ReceiverMetrics, SenderMetrics
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.receiver import intake_service
from kvferry.receiver.intake import Intake
from kvferry.receiver.intake_service import IntakeServicer
from kvferry.receiver.tcp_worker import TcpWorker
from kvferry.sender.transfer import Transfer

TRANSPORTS = ("raw", "grpc", "tcp")
SIZES_MB = (1, 16, 64, 256)
MEGABYTE = 1_000_000
_SECONDS = 120.0
_FIRST_BYTES = 4096
_LOOPBACK = Address("127.0.0.1", 0)


@dataclass(frozen=True)
class Row:
    """One transport at one size.

    Attributes:
        mb_per_s: megabytes (10^6 bytes) of payload a second, median over the turns.
        ratio: to the raw socket's median at the same size.
        durable: whether Commit waited for the disk.
        sender_extra_mb, receiver_extra_mb: growth of the peak resident memory of either end.
    """

    transport: str
    megabytes: float
    mb_per_s: float
    ratio: float
    durable: bool
    sender_extra_mb: float
    receiver_extra_mb: float


def run(
    sizes_mb: tuple[float, ...], turns: int, *, durable: tuple[bool, ...], advance: Callable[[str, float], None]
) -> list[Row]:
    """Measure every transport at every size.

    Args:
        sizes_mb: payload sizes in megabytes.
        turns: how often each transport is measured; the median counts.
        durable: which stores to measure: False holds payloads in the system's memory, True waits for the disk.
        advance: told what happens and which share of the whole is done.
    """
    rows: list[Row] = []
    steps = len(sizes_mb) * len(durable)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        first = synthetic.artifact(Path(folder) / "first", _FIRST_BYTES, DEFAULT_CHUNK_BYTES)
        for number, size in enumerate(sizes_mb):
            artifact = synthetic.artifact(Path(folder) / f"sender-{number}", int(size * MEGABYTE), DEFAULT_CHUNK_BYTES)
            for place, is_durable in enumerate(durable):
                advance(
                    f"{size:g} MB, {'on disk' if is_durable else 'in memory'}", (number * len(durable) + place) / steps
                )
                rows += _measure((first, artifact), Path(folder), turns, durable=is_durable)
    return rows


def _measure(artifacts: tuple[Stored, Stored], folder: Path, turns: int, *, durable: bool) -> list[Row]:
    speeds: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    sender_extra: dict[str, float] = dict.fromkeys(TRANSPORTS, 0.0)
    receiver_extra: dict[str, float] = dict.fromkeys(TRANSPORTS, 0.0)
    length = artifacts[1].manifest.payload.length
    for turn in range(turns):
        for name in TRANSPORTS:
            root = folder / f"receiver-{name}-{length}-{durable}-{turn}"
            seconds, ours, theirs = _turn(name, artifacts, root, durable=durable)
            speeds[name].append(length / MEGABYTE / seconds)
            sender_extra[name] = max(sender_extra[name], ours)
            receiver_extra[name] = max(receiver_extra[name], theirs)
    raw = statistics.median(speeds["raw"])
    return [
        Row(
            transport=name,
            megabytes=length / MEGABYTE,
            mb_per_s=statistics.median(speeds[name]),
            ratio=statistics.median(speeds[name]) / raw,
            durable=durable,
            sender_extra_mb=sender_extra[name],
            receiver_extra_mb=receiver_extra[name],
        )
        for name in TRANSPORTS
    ]


def _turn(name: str, artifacts: tuple[Stored, Stored], root: Path, *, durable: bool) -> tuple[float, float, float]:
    """Return the seconds of one delivery and the extra peak memory of sender and receiver in megabytes."""
    context = multiprocessing.get_context("spawn")
    receiver_end, receiver_side = context.Pipe()
    receiver = context.Process(
        target=_serve, args=(name, root, artifacts[1].manifest.payload.length, durable, receiver_side)
    )
    receiver.start()
    port = receiver_end.recv()
    sender_end, sender_side = context.Pipe()
    sender = context.Process(target=_deliver, args=(name, artifacts, port, sender_side))
    sender.start()
    try:
        seconds, ours = sender_end.recv()
        receiver_end.send("stop")
        theirs = receiver_end.recv()
    finally:
        for process in (sender, receiver):
            process.join(10)
            process.kill()
    return seconds, ours, theirs


def _deliver(name: str, artifacts: tuple[Stored, Stored], port: int, report: Connection) -> None:
    """Deliver once, in a process of its own, so that its peak memory is its own too.

    The first of the two artifacts goes before the clock starts: both ends are daemons that have done this before.
    """
    address, (first, artifact) = Address("127.0.0.1", port, tcp=name == "tcp"), artifacts
    with asyncio.Runner() as runner:
        if name != "raw":
            runner.run(_deliver_artifact(first, address))
        _warm(artifact)
        before = _peak_mb()
        start = time.perf_counter()
        if name == "raw":
            _deliver_raw(artifact, address)
        else:
            runner.run(_deliver_artifact(artifact, address))
        report.send((time.perf_counter() - start, _peak_mb() - before))


def _warm(artifact: Stored) -> None:
    """Read the payload once: the sender has just made it, so it is in the system's memory."""
    for index in range(artifact.plan.count):
        artifact.read_chunk(index)


def _deliver_raw(artifact: Stored, address: Address) -> None:
    with socket.create_connection((address.host, address.port)) as endpoint:
        for index in range(artifact.plan.count):
            endpoint.sendall(artifact.read_chunk(index))
        endpoint.recv(1)


async def _deliver_artifact(artifact: Stored, address: Address) -> None:
    transfer = Transfer(artifact, synthetic.ACCOUNT, address, _SECONDS, SenderMetrics("synthetic", synthetic.VERSIONS))
    async with contextlib.aclosing(transfer.run()) as steps:
        async for _ in steps:
            pass


def _serve(name: str, root: Path, length: int, durable: bool, control: Connection) -> None:  # noqa: FBT001
    """Receive in a process of its own. Says its port, waits for a word, answers with its extra peak memory."""
    logs.configure("warning", "text")
    if name == "raw":
        _serve_raw(length, control)
        return
    store = ArtifactStore(root, durable=durable)
    metrics = ReceiverMetrics("synthetic", synthetic.VERSIONS)
    intake = Intake(store, synthetic.profile(), metrics)
    if name == "tcp":
        worker = TcpWorker(_LOOPBACK, intake, metrics, Admission(None, max_calls=1))
        _report(worker.address.port, control)
        worker.close()
    else:
        asyncio.run(_serve_grpc(intake, metrics, control))
    store.close()


def _report(port: int, control: Connection) -> None:
    before = _peak_mb()
    control.send(port)
    control.recv()
    control.send(_peak_mb() - before)


async def _serve_grpc(intake: Intake, metrics: ReceiverMetrics, control: Connection) -> None:
    server = grpc.aio.server(options=channel.server_options())
    servicer = IntakeServicer(intake, metrics)  # type: ignore[abstract]  # the other calls are not measured
    intake_service.register(servicer, server)
    port = server.add_insecure_port(str(_LOOPBACK))
    await server.start()
    await asyncio.to_thread(_report, port, control)
    await server.stop(0)


def _serve_raw(length: int, control: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_drain, args=(listener, length))
        thread.start()
        _report(listener.getsockname()[1], control)
        thread.join()


def _drain(listener: socket.socket, length: int) -> None:
    endpoint, _ = listener.accept()
    with endpoint:
        # What a receiver must do at the least: have the bytes in memory.
        view, filled = np.empty(length, dtype=np.uint8).data, 0
        while filled < length:
            count = endpoint.recv_into(view[filled : filled + DEFAULT_CHUNK_BYTES])
            if count == 0:
                return
            filled += count
        endpoint.sendall(b"k")


def _peak_mb() -> float:
    """Return the peak resident memory of this process in megabytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak is inherited from the process that started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / MEGABYTE
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / MEGABYTE
