"""The whole table of text methods through two daemons, as a program uses them: the SDK sends, and asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.client import Client, ModelError
from kvferry.core import container, evidence, words
from kvferry.core.stored import Stored, read
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import DEFAULT_SYSTEM, evidence_text

DOCUMENT = "The access code of the south pier is 2093. Größe: 12 m², 門 🚢. The mill opens at 7:30, not before. " * 4
QUESTION = "What is the access code?"
SHORTENED = {
    "A2": container.ENDS,
    "A3": container.EXCERPTS,
    "A3-aware": container.EXCERPTS,
    "A4": container.SUMMARY,
    "A4-aware": container.SUMMARY,
    "A5": container.EVIDENCE,
    "A5-aware": container.EVIDENCE,
}


@pytest.fixture(scope="module")
def client(pair: Any) -> Iterator[Client]:
    with Client(sender=pair.sender, receiver=pair.receiver) as opened:
        yield opened


def at_the_receiver(pair: Any, artifact: str) -> Stored:
    return read(pair.folder / "receiver" / "artifacts" / artifact, bytes.fromhex(artifact))


def material(stored: Stored, kind: str) -> str:
    """What an artifact has a receiver read, from its own bytes."""
    data = bytes(stored.sections.read(kind))
    if kind == container.EVIDENCE:
        return evidence_text(evidence.evidence_from_bytes("evidence", data, len(DOCUMENT)))
    return data.decode("utf-8")


@pytest.mark.parametrize("method", ["A0", "A1", "A7", *SHORTENED])
def test_the_answer_is_the_models_own_from_what_was_sent(
    client: Client,
    pair: Any,
    pair_model: LoadedModel,
    own_answer: Callable[..., tuple[int, ...]],
    method: str,
) -> None:
    aware, kind = method.endswith("-aware"), SHORTENED.get(method)
    given = {"budget": 120} if kind else {}
    report = client.send(text=DOCUMENT, method=method, question=QUESTION if aware else None, **given)
    answer = report.ask(QUESTION, max_tokens=6)
    text = "" if method == "A0" else DOCUMENT
    if kind:
        text = material(at_the_receiver(pair, report.artifact_id), kind)
        assert 0 < pair_model.prompt.content.count(text) == answer.ledger.tokens.material <= 120
        assert answer.ledger.outcome["tokens"] == answer.ledger.tokens.material
    prefix = pair_model.prompt.prefix(text, DEFAULT_SYSTEM, kind or container.TEXT)
    assert answer.token_ids == own_answer(pair_model, prefix, pair_model.prompt.fresh(QUESTION), 6)
    assert (answer.ledger.method, answer.ledger.fallback) == (method, None)
    assert answer.ledger.wire_bytes == report.wire_bytes > 0


def test_references_are_sent_and_followed(client: Client, pair: Any) -> None:
    report = client.send(text=DOCUMENT, method="A6", budget=400)
    data = at_the_receiver(pair, report.artifact_id).sections.read("document.references")
    found = evidence.references_from_bytes("references", data, len(DOCUMENT)).references
    named = next(item for item in found if words.terms(item.entity))
    answer = report.ask(named.entity, max_tokens=6)
    lookups = answer.ledger.lookups
    assert (lookups.hit, lookups.calls, lookups.missing) == (True, 1, ())
    assert 0 < lookups.text_bytes <= 2000
    assert lookups.count >= 1
    assert answer.ledger.wire_bytes == report.wire_bytes + lookups.bytes
    assert answer.ledger.outcome["references"] == len(found)


def test_a_compressor_that_is_not_there_is_named_and_the_sender_goes_on(client: Client) -> None:
    with pytest.raises(ModelError, match=r"pip install 'kvferry\[llmlingua\]'|hf download microsoft/"):
        client.send(text=DOCUMENT, method="A8", budget=60)
    assert client.send(text=DOCUMENT, method="A2", budget=60).ask(QUESTION, max_tokens=1).ledger.method == "A2"
