"""A receiver without its service, and artifacts made for it.

============  ========================================================================================================
bench         factory: store, intake, residency and answerer around one model
artifact      factory: a stored artifact of a sender with the same or another model
local_answer  what plain mlx-lm answers to the whole prompt, greedily
drain         run a generator to its end and return its result
============  ========================================================================================================
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvferry.engine  # noqa: F401  (a real BLAS, before MLX)
from kvferry.core.ledger import Ledger, SenderAccount, to_json
from kvferry.core.manifest import Scalar
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.progress import finish
from kvferry.core.store import ArtifactStore, Stored
from kvferry.engine.backend import runtime_versions
from kvferry.engine.generate import Answer, Sampling, Token
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.receiver.answering import Account, Answerer, Preparation
from kvferry.receiver.intake import Intake
from kvferry.sender import registry
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.reading import Reading

ACCOUNT = SenderAccount(77, 1000, 1.5, 2.5, 3.5, 4.5)
CONTROL = 7


@pytest.fixture(scope="session")
def drain() -> Callable[[Generator[Any, None, Any]], Any]:
    return finish


@dataclass(frozen=True)
class Bench:
    """Everything of a receiver that takes artifacts in and answers from them."""

    model: LoadedModel
    store: ArtifactStore
    intake: Intake
    residency: Residency
    answerer: Answerer

    def take(self, artifact: Stored, account: SenderAccount = ACCOUNT) -> Stored:
        """Carry an artifact in, every chunk once."""
        judgement = self.intake.offer(artifact.encoded)
        assert judgement.verdict.accepted, judgement.verdict
        for start, end in judgement.missing:
            for index in range(start, end):
                self.intake.put(artifact.artifact_id, index, artifact.read_chunk(index), CONTROL)
        return self.intake.commit(artifact.artifact_id, to_json(account), CONTROL)

    def prepare(self, stored: Stored) -> Preparation:
        prepared = finish(self.answerer.prepare(stored))
        assert isinstance(prepared, Preparation)
        return prepared

    def start(self, stored: Stored, question: str, max_tokens: int = 6) -> Generator[Token, None, Any]:
        """Prepare and return the answer's generator."""
        account = Account(time.perf_counter(), self.prepare(stored))
        return self.answerer.answer(stored, question, Sampling(max_tokens), account)

    def ask(self, stored: Stored, question: str, max_tokens: int = 6) -> tuple[Answer, Ledger]:
        answer, ledger = finish(self.start(stored, question, max_tokens))
        return answer, ledger


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Return a factory: ``bench(model, budget=2**30)``."""
    stores: list[ArtifactStore] = []

    def build(model: LoadedModel, budget: int = 2**30) -> Bench:
        stores.append(ArtifactStore(tmp_path / f"receiver-{len(stores)}"))
        residency, versions = Residency(budget), runtime_versions()
        intake = Intake(stores[-1], model.profile, ReceiverMetrics("tiny", versions))
        return Bench(model, stores[-1], intake, residency, Answerer(model, residency, versions))

    yield build
    for store in stores:
        store.close()


@pytest.fixture
def artifact(tmp_path: Path) -> Iterator[Callable[..., Stored]]:
    """Return a factory: ``artifact(model, "B1", text, system=..., fallback_for="", **parameters)``."""
    stores: list[ArtifactStore] = []
    numbers = itertools.count()

    def make(
        model: LoadedModel,
        method: str,
        text: str,
        system: str = DEFAULT_SYSTEM,
        fallback_for: str = "",
        **parameters: Scalar,
    ) -> Stored:
        stores.append(ArtifactStore(tmp_path / f"sender-{next(numbers)}"))
        maker = ArtifactMaker(model, stores[-1], 1024, runtime_versions())
        found = registry.find(method)
        reading = Reading(model, Residency(0), text, system, None)
        made = finish(maker.make(found, reading, registry.check_parameters(found, parameters), fallback_for))
        stored: Stored = made.stored
        return stored

    yield make
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def local_answer(own_answer: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Return a function: the ids that a model chooses greedily after document and question, on mlx-lm's caches."""

    def answer(
        model: LoadedModel, text: str, question: str, max_tokens: int = 6, system: str = DEFAULT_SYSTEM
    ) -> tuple[int, ...]:
        return own_answer(model, model.prompt.prefix(text, system), model.prompt.fresh(question), max_tokens)

    return answer
