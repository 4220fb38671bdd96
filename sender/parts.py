"""What a sender's service works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.config import SenderConfig
from kvferry.core.metrics import SenderMetrics
from kvferry.core.store import ArtifactStore
from kvferry.engine.model import LoadedModel
from kvferry.engine.residency import Residency
from kvferry.engine.worker import Worker
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.documents import DocumentStore
from kvferry.sender.link import Links
from kvferry.sender.tokenizers import Tokenizers


@dataclass(frozen=True)
class SenderParts:
    """The parts of a running sender."""

    config: SenderConfig
    model: LoadedModel
    store: ArtifactStore
    maker: ArtifactMaker
    documents: DocumentStore
    tokenizers: Tokenizers
    residency: Residency
    worker: Worker
    versions: dict[str, str]
    metrics: SenderMetrics
    links: Links = field(default_factory=Links)
