"""What a look-up says of itself, with a sender that gives as many passages as a test tells it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.addresses import Address
from kvferry.core.errors import UnavailableError
from kvferry.core.evidence import Reference, References
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.progress import Progress, finish
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.core.wire import MethodInfo
from kvferry.engine.backend import runtime_versions
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM
from kvferry.engine.residency import Residency
from kvferry.receiver.looking_up import Finder, Question
from kvferry.receiver.lookups import Place
from kvferry.receiver.span_client import Spent
from kvferry.sender.artifacts import ArtifactMaker
from kvferry.sender.method import EvidenceMaterial, NoParameters
from kvferry.sender.reading import Reading

DOCUMENT = "Größe, 門 🚢; " * 200
LONG = "lamp\nof the " + "north " * 30
# The better one's window is 1060..1270; of the other's, 1000..1060 and 1270..1400 are left.
FOUND = (Reference("gate", LONG, 1040, 1240), Reference("gate", "code", 1100, 1110))


class Given:
    info = MethodInfo("A6", "references", "references", "custom", aware=False, source="a test", summary="")
    parameters = NoParameters

    def make(self, reading: Reading, parameters: NoParameters) -> Generator[Progress, None, EvidenceMaterial]:
        yield Progress("method", 1, 1)
        return EvidenceMaterial(References(FOUND, complete=True, stop="stop"))


class Spans:
    configured = Address("127.0.0.1", 7411)

    def __init__(self, gives: int | None) -> None:
        self.gives = gives

    async def fetch(self, _: Address, __: bytes, places: Sequence[Place], ___: int, spent: Spent) -> list[str]:
        spent.calls, spent.sent, spent.ms = 1, 30, 5.0
        if self.gives is None:
            raise UnavailableError("gone")
        spent.received = 400
        return [DOCUMENT[start:end] for start, end in places[: self.gives]]


@pytest.fixture
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def stored(tmp_path: Path, model: LoadedModel) -> Iterator[Stored]:
    store = ArtifactStore(tmp_path / "made")
    maker = ArtifactMaker(model, store, 1024, runtime_versions())
    reading = Reading(model, Residency(0), DOCUMENT, DEFAULT_SYSTEM, None)
    yield finish(maker.make(Given(), reading, NoParameters()), lambda _: None).stored
    store.close()


@pytest.mark.parametrize(
    ("gives", "count", "came", "outcome"),
    [
        (3, 2, DOCUMENT[1000:1400], "fetched"),
        (2, 1, DOCUMENT[1000:1270], "fetched"),
        (0, 0, "", "fetched"),
        (None, 0, "", "failed"),
    ],
)
async def test_references_count_when_whole_and_every_look_up_by_what_it_came_to(
    bench: Callable[..., Any],
    model: LoadedModel,
    stored: Stored,
    gives: int | None,
    count: int,
    came: str,
    outcome: str,
) -> None:
    metrics = ReceiverMetrics("tiny", runtime_versions())
    finder = Finder(bench(model).answerer, Spans(gives), metrics)  # type: ignore[arg-type]
    found = await finder.find(stored, Question("Which code opens the gate?", allow_fallback=True))
    # Of the first word only the last letter came, and the last character may go on: paid for, and not read.
    assert (found.lookups.count, found.message.text) == (count, came[1:-1])
    assert found.lookups.left_out == (0 if gives is None else 2 - count)
    assert found.lookups.text_bytes == len(came.encode())
    assert metrics.registry.get_sample_value("kvferry_lookups_total", {"outcome": outcome}) == 1
    await finder.find(stored, Question("?!"))
    assert metrics.registry.get_sample_value("kvferry_lookups_total", {"outcome": "no_hit"}) == 1
    if gives is None:
        first, second = found.lookups.missing
        assert first == "gate code"
        assert second.startswith("gate lamp of the north")
        assert (len(second), second[-1]) == (80, "…")
