"""The demo's model through both daemons: every lossless method answers as the model alone, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.model import LoadedModel, load

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

NAME = "smollm2-135m-instruct"
METHODS = ("A1", "A7", "B0", "B1")
FACTS = {
    "north": (
        "Inventory report. The north warehouse stores bicycles; its access code is 4471. The south warehouse stores "
        "tents; its access code is 9026. The manager of the north warehouse is Maria Lopez. The manager of the south "
        "warehouse is Peter Hahn. The report was written in Oslo in March 2021. "
    ),
    "ferry": (
        "Timetable. The ferry Karla leaves Bergen at 7:30 and reaches Stavanger at 12:15. The ferry Ada leaves "
        "Stavanger at 14:00 and reaches Bergen at 18:45. Captain of the Karla is Ingrid Moe. A ticket costs 320 "
        "crowns; crates travel at 45 crowns each. No ferry sails on Sundays. "
    ),
}
FILLER = "Every crate that arrives is weighed, counted and entered in the ledger before noon. " * 6
DOCUMENTS = {name: facts + FILLER for name, facts in FACTS.items()}
# Several chunks a document, and the last one not full.
PREFILL_CHUNK = 96
TOKENS = 14
QUESTIONS = {
    "north": ("What is the access code of the north warehouse?", "Who is the manager of the south warehouse?"),
    "ferry": ("When does the ferry Karla leave Bergen?", "Who is the captain of the Karla?"),
}
EXPECTED = dict(
    zip((question for two in QUESTIONS.values() for question in two), ("4471", "Hahn", "7:30", "Moe"), strict=True)
)


@pytest.fixture(scope="module")
def model_dir(users_models: Path) -> Path:
    path = users_models / NAME
    if not path.is_dir():
        pytest.skip(f"kvferry models add {NAME}")
    return path


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LoadedModel:
    return load(str(model_dir), prefill_chunk=PREFILL_CHUNK)


@pytest.fixture(scope="module")
def local(model: LoadedModel, local_answer: Callable[..., tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The answers of the model alone to document and question in one prompt."""
    assert all(len(model.prompt.prefix(text)) > 2 * PREFILL_CHUNK for text in DOCUMENTS.values())
    return {
        question: local_answer(model, DOCUMENTS[name], question, TOKENS)
        for name, questions in QUESTIONS.items()
        for question in questions
    }


@pytest.fixture(scope="module")
def running(
    running_pair: Callable[..., Any], model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    with running_pair(model_dir, tmp_path_factory.mktemp("real"), prefill_chunk=PREFILL_CHUNK) as pair:
        yield pair


@pytest.fixture
def driver(running: Any, peers: Callable[..., Any]) -> Any:
    return peers(running.sender, running.receiver)


def test_the_model_alone_knows_the_answers(model: LoadedModel, local: dict[str, tuple[int, ...]]) -> None:
    for question, words in EXPECTED.items():
        assert words in model.tokenizer.decode(local[question])


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_the_model_alone(driver: Any, local: dict[str, tuple[int, ...]], method: str) -> None:
    sent = {name: driver.send(text, method) for name, text in DOCUMENTS.items()}
    # At the first question every cache is rebuilt or read, at the second it is at hand. The two documents alternate.
    for number in range(2):
        for name in DOCUMENTS:
            question = QUESTIONS[name][number]
            asked = driver.ask(sent[name].artifact_id, question, TOKENS)
            assert asked.ids == local[question]
            warm = method in ("B0", "B1") and number == 1
            assert (asked.ledger["ms"]["reconstruct"] == 0) is warm


def test_a_carried_cache_spares_the_receiver_the_document(driver: Any) -> None:
    question = QUESTIONS["north"][0]
    text = "Once more. " + DOCUMENTS["north"]
    as_text, as_cache = (driver.send(text, method) for method in ("A7", "B1"))
    read, carried = (driver.ask(sent.artifact_id, question, 4) for sent in (as_text, as_cache))
    assert read.ids == carried.ids
    assert carried.ledger["tokens"]["receiver_prefill"] < 50 < read.ledger["tokens"]["receiver_prefill"]
    assert carried.ledger["tokens"]["sender_prefill"] == carried.ledger["tokens"]["reused"]
    assert carried.ledger["ms"]["receiver_prefill"] == 0 < read.ledger["ms"]["receiver_prefill"]
    # It has its price in bytes: hundreds of times the text.
    assert as_cache.end.payload_bytes > 100 * as_text.end.payload_bytes
