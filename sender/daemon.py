"""The sender as a process: load the model, open the store, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from kvferry.core import logs, security, serving
from kvferry.core.config import SenderConfig, store_path
from kvferry.core.metrics import SenderMetrics
from kvferry.core.store import ArtifactStore
from kvferry.engine import model_store
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import load
from kvferry.engine.residency import Residency
from kvferry.engine.worker import Worker
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.proto.v1 import sender_service_pb2_grpc as pb_grpc
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.documents import DocumentStore
from kvferry.sender.service import SenderParts, SenderServicer


async def run(config: SenderConfig, *, announce_json: bool = False) -> None:
    """Run a sender until it is told to stop.

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
            )
        )
        versions = runtime_versions()
        residency = Residency(config.cache_bytes)
        metrics = SenderMetrics(model.profile.model.id, versions)
        metrics.watch_store(store)
        metrics.watch_engine(
            lambda: residency.nbytes, evicted=lambda: residency.evicted, queue_depth=lambda: worker.queue_depth
        )
        maker = ArtifactMaker(model, store, config.chunk_bytes, versions)
        documents = DocumentStore(root / "documents")
        parts = SenderParts(config, model, store, maker, documents, residency, worker, versions, metrics)

        def register(server: grpc.aio.Server) -> Iterable[str]:
            pb_grpc.add_SenderServiceServicer_to_server(SenderServicer(parts), server)
            return [pb.DESCRIPTOR.services_by_name["SenderService"].full_name]

        logs.logger("sender").info(
            "ready", model=model.profile.model.id, unsupported=model.profile.unsupported, **versions
        )
        await serving.serve(config, register, protection=protection, metrics=metrics, announce_json=announce_json)
    finally:
        worker.close()
        store.close()


def main(config: SenderConfig, *, announce_json: bool = False) -> None:
    """Run a sender in this process."""
    logs.configure(config.log_level, config.log_format)
    asyncio.run(run(config, announce_json=announce_json))
