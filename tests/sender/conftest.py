"""A sender without its service: documents in, artifacts out.

===========  =========================================================================================================
workshop     factory: an ArtifactMaker with a store, a residency and a residency budget of its own
drain        run a generator to its end and return its result
===========  =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvferry.engine  # noqa: F401  (a real BLAS, before MLX)
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress
from kvferry.core.store import ArtifactStore
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.sender import registry
from kvferry.sender.artifacts import Artifact, ArtifactMaker
from kvferry.sender.reading import Reading


def run_to_end(generator: Generator[Any, None, Any]) -> Any:
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="session")
def drain() -> Callable[[Generator[Any, None, Any]], Any]:
    return run_to_end


@dataclass(frozen=True)
class Workshop:
    """Everything of a sender that makes artifacts."""

    model: LoadedModel
    store: ArtifactStore
    residency: Residency
    maker: ArtifactMaker

    def reading(self, text: str, system: str = DEFAULT_SYSTEM, question: str | None = None) -> Reading:
        return Reading(self.model, self.residency, text, system, question)

    def steps(
        self, method: str, text: str, system: str = DEFAULT_SYSTEM, **parameters: Scalar
    ) -> Generator[Progress, None, Artifact]:
        found = registry.find(method)
        return self.maker.make(found, self.reading(text, system), registry.check_parameters(found, parameters))

    def make(self, method: str, text: str, system: str = DEFAULT_SYSTEM, **parameters: Scalar) -> Artifact:
        artifact = run_to_end(self.steps(method, text, system, **parameters))
        assert isinstance(artifact, Artifact)
        return artifact


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Callable[..., Workshop]]:
    """Return a factory: ``workshop(model, chunk_bytes=1024, budget=2**30, store="a name")``."""
    stores: list[ArtifactStore] = []

    def open_workshop(model: LoadedModel, *, chunk_bytes: int = 1024, budget: int = 2**30, store: str = "") -> Workshop:
        stores.append(ArtifactStore(tmp_path / (store or f"store-{len(stores)}")))
        residency = Residency(budget)
        return Workshop(model, stores[-1], residency, ArtifactMaker(model, stores[-1], chunk_bytes, runtime_versions()))

    yield open_workshop
    for opened in stores:
        opened.close()
