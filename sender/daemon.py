"""The sender as a process: load the model, open the store, serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from kvferry.core import logs, ports, security, serving
from kvferry.core.config import SenderConfig
from kvferry.core.metrics import SenderMetrics
from kvferry.engine import node
from kvferry.engine.node import Node
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.proto.v1 import sender_service_pb2_grpc as pb_grpc
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.documents import DocumentStore
from kvferry.sender.parts import SenderParts
from kvferry.sender.service import SenderServicer
from kvferry.sender.tokenizers import Tokenizers


async def run(config: SenderConfig, *, announce_json: bool = False) -> None:
    """Run a sender until it is told to stop.

    Raises:
        KvferryError: when the model, the store, the address or a file that protects it cannot be used.
    """
    protection = security.for_server(config)
    ports.check(config)
    async with node.opened(config) as opened:
        metrics = SenderMetrics(opened.model.profile.model.id, opened.versions)
        parts = _parts(config, opened, metrics)

        def register(server: grpc.aio.Server) -> Iterable[str]:
            pb_grpc.add_SenderServiceServicer_to_server(SenderServicer(parts), server)
            return [pb.DESCRIPTOR.services_by_name["SenderService"].full_name]

        opened.ready("sender", metrics)
        await serving.serve(config, register, protection=protection, metrics=metrics, announce_json=announce_json)


def _parts(config: SenderConfig, opened: Node, metrics: SenderMetrics) -> SenderParts:
    return SenderParts(
        config=config,
        model=opened.model,
        store=opened.store,
        maker=ArtifactMaker(opened.model, opened.store, config.chunk_bytes, opened.versions),
        documents=DocumentStore(opened.store),
        tokenizers=Tokenizers(opened.model.prompt.content, opened.store, config.rpc_seconds, metrics),
        residency=opened.residency,
        worker=opened.worker,
        versions=opened.versions,
        metrics=metrics,
    )


def main(config: SenderConfig, *, announce_json: bool = False) -> None:
    """Run a sender in this process."""
    logs.configure(config.log_level, config.log_format)
    asyncio.run(run(config, announce_json=announce_json))
