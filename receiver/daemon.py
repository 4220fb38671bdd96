"""The receiver as a process: load the model, open the store, serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator

import grpc

from kvferry.core import addresses, logs, ports, security, serving
from kvferry.core.config import ReceiverConfig, ledger_path
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.security import ServerSecurity
from kvferry.engine import node
from kvferry.engine.node import Node
from kvferry.receiver import intake_service
from kvferry.receiver.answering import Answerer
from kvferry.receiver.intake import Intake
from kvferry.receiver.ledger_file import LedgerFile
from kvferry.receiver.service import ReceiverParts, ReceiverServicer
from kvferry.receiver.span_client import SpanClient
from kvferry.receiver.tcp_worker import TcpWorker


async def run(config: ReceiverConfig, *, announce_json: bool = False) -> None:
    """Run a receiver until it is told to stop.

    Raises:
        KvferryError: when the model, the store, the address or a file that protects it cannot be used.
    """
    protection = security.for_server(config)
    ports.check(config)
    async with SpanClient(config) as spans, node.opened(config, config.max_payload_bytes) as opened:
        metrics = ReceiverMetrics(opened.model.profile.model.id, opened.versions)
        parts = _parts(config, opened, metrics, spans)

        def register(server: grpc.aio.Server) -> Iterable[str]:
            intake_service.register(ReceiverServicer(parts), server)
            return [intake_service.SERVICE]

        opened.ready("receiver", metrics)
        with _tcp_worker(parts, protection) as tcp:
            await serving.serve(
                config, register, protection=protection, metrics=metrics, tcp=tcp, announce_json=announce_json
            )


def _parts(config: ReceiverConfig, opened: Node, metrics: ReceiverMetrics, spans: SpanClient) -> ReceiverParts:
    return ReceiverParts(
        config=config,
        model=opened.model,
        store=opened.store,
        intake=Intake(opened.store, opened.model.profile, metrics),
        answerer=Answerer(opened.model, opened.residency, opened.versions, config.parity),
        ledger=LedgerFile(ledger_path(config)),
        worker=opened.worker,
        versions=opened.versions,
        metrics=metrics,
        spans=spans,
    )


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
