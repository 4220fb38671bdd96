"""What either daemon is made of before it serves: a store, the MLX thread, and the model that runs on it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvferry.core import limits, logs
from kvferry.core.config import NodeConfig, store_path
from kvferry.core.metrics import NodeMetrics
from kvferry.core.store import ArtifactStore
from kvferry.engine import model_store
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel, load
from kvferry.engine.residency import Residency
from kvferry.engine.worker import Worker


@dataclass(frozen=True)
class Node:
    """The parts that are the same in a sender and in a receiver."""

    store: ArtifactStore
    worker: Worker
    model: LoadedModel
    residency: Residency
    versions: dict[str, str]

    def ready(self, role: str, metrics: NodeMetrics) -> None:
        """Let the metrics look at these parts, and say in the log what runs."""
        metrics.watch_store(self.store)
        metrics.watch_engine(
            lambda: self.residency.nbytes,
            evicted=lambda: self.residency.evicted,
            queue_depth=lambda: self.worker.queue_depth,
        )
        speed, profile = self.model.speed, self.model.profile
        metrics.watch_speed(lambda: speed.prefill_tokens_per_second)
        logs.logger(role).info(
            "ready",
            model=profile.model.id,
            unsupported=profile.unsupported,
            prefill_tokens_per_second=round(speed.prefill_tokens_per_second, 1),
            **self.versions,
        )


@contextlib.asynccontextmanager
async def opened(config: NodeConfig, max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES) -> AsyncIterator[Node]:
    """Open the store and load the model for the block.

    Args:
        config: of the daemon.
        max_payload_bytes: largest payload that it takes.

    Raises:
        KvferryError: when the store or the model cannot be used.
    """
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
                max_payload_bytes=max_payload_bytes,
                try_speed=True,
            )
        )
        # What is loaded now stays; a full collection would look through all of it and stop every thread meanwhile.
        gc.collect()
        gc.freeze()
        yield Node(store, worker, model, Residency(config.cache_bytes), runtime_versions())
    finally:
        gc.unfreeze()
        worker.close()
        store.close()
