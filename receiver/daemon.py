"""The receiver as a process: load the model, open the store, serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

import grpc

from kvferry.core import addresses, logs, security, serving
from kvferry.core.config import ReceiverConfig, ledger_path, store_path
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.security import ServerSecurity
from kvferry.core.store import ArtifactStore
from kvferry.engine import model_store
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import load
from kvferry.engine.residency import Residency
from kvferry.engine.worker import Worker
from kvferry.receiver import intake_service
from kvferry.receiver.answering import Answerer
from kvferry.receiver.intake import Intake
from kvferry.receiver.ledger_file import LedgerFile
from kvferry.receiver.service import ReceiverParts, ReceiverServicer
from kvferry.receiver.tcp_worker import TcpWorker


async def run(config: ReceiverConfig, *, announce_json: bool = False) -> None:
    """Run a receiver until it is told to stop.

    Raises:
        KvferryError: when the model, the store, the address or a file that protects it cannot be used.
    """
    protection = security.for_server(config)
    root = store_path(config)
    store = ArtifactStore(root, budget=config.max_store_bytes, ttl_seconds=config.ttl_seconds, durable=config.durable)
    worker = Worker()
    try:
        model = await worker.run(
            lambda: load(
                str(model_store.resolve(config.model)),
                adapter=config.adapter,
                revision=config.revision,
                prefill_chunk=config.prefill_chunk,
                max_payload_bytes=config.max_payload_bytes,
            )
        )
        versions = runtime_versions()
        residency = Residency(config.cache_bytes)
        metrics = ReceiverMetrics(model.profile.model.id, versions)
        metrics.watch_store(store)
        metrics.watch_engine(
            lambda: residency.nbytes, evicted=lambda: residency.evicted, queue_depth=lambda: worker.queue_depth
        )
        parts = ReceiverParts(
            config=config,
            model=model,
            store=store,
            intake=Intake(store, model.profile, metrics),
            answerer=Answerer(model, residency, versions, config.parity),
            residency=residency,
            ledger=LedgerFile(ledger_path(config)),
            worker=worker,
            versions=versions,
            metrics=metrics,
        )

        def register(server: grpc.aio.Server) -> Iterable[str]:
            intake_service.register(ReceiverServicer(parts), server)
            return [intake_service.SERVICE]

        log = logs.logger("receiver")
        log.info("ready", model=model.profile.model.id, unsupported=model.profile.unsupported, **versions)
        with _tcp_worker(parts, protection) as tcp:
            await serving.serve(
                config, register, protection=protection, metrics=metrics, tcp=tcp, announce_json=announce_json
            )
    finally:
        worker.close()
        store.close()


@contextlib.contextmanager
def _tcp_worker(parts: ReceiverParts, protection: ServerSecurity) -> Iterator[TcpWorker | None]:
    if not parts.config.tcp:
        yield None
        return
    address = addresses.parse(parts.config.tcp, "tcp")
    worker = TcpWorker(address, parts.intake, parts.metrics, protection.gate.admission, protection.context)
    try:
        yield worker
    finally:
        # Closed with the server already, unless that did not come up.
        worker.close()


def main(config: ReceiverConfig, *, announce_json: bool = False) -> None:
    """Run a receiver in this process."""
    logs.configure(config.log_level, config.log_format)
    asyncio.run(run(config, announce_json=announce_json))
