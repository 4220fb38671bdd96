"""A8 from document to answer, through two daemons, with its package and a tiny random compressor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressors
import pytest
import regex
from compressors import BERT, LONG, XLMR

from kvferry.core import container, spans
from kvferry.core.stored import read
from kvferry.engine.model import LoadedModel

pytestmark = [
    pytest.mark.llmlingua,
    # Other people's packages, in the versions that go together, warn of each other's future.
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning", "default::UserWarning"),
]

QUESTION = "What is the access code of the north warehouse?"


def words_of(text: str) -> list[str]:
    return regex.findall(r"[\w\p{M}]|[^\w\s]", text)


@pytest.mark.parametrize("name", [XLMR, BERT])
@pytest.mark.parametrize("budget", [300, 0.4])
def test_from_document_to_answer(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tiny_model: Callable[..., LoadedModel],
    own_answer: Callable[..., tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    budget: float,
) -> None:
    import tiktoken

    compressors.install(tmp_path / "home")
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tiktoken, "encoding_for_model", {"gpt-3.5-turbo": compressors.encoding_of_bytes()}.__getitem__)
    shape = {"model_type": "llama", "context": 16384}
    model = tiny_model(**shape)
    both = peers(*(here(role, tiny_model_dir(**shape)).address for role in ("sender", "receiver")))
    whole = model.prompt.content.count(LONG)
    allowed = budget if isinstance(budget, int) else int(whole * budget)

    sent = both.send(LONG, "A8", parameters={"budget": budget, "model": name})
    assert (sent.end.method, sent.end.form) == ("A8", "text")
    assert 0 < sent.end.payload_bytes < len(LONG.encode())
    asked = both.ask(sent.artifact_id, QUESTION, max_tokens=6)
    assert both.send(LONG, "A8", parameters={"budget": budget, "model": name}).end.reused

    stored = read(tmp_path / "receiver" / "artifacts" / sent.artifact_id.hex(), sent.artifact_id)
    text = bytes(stored.sections.read(container.COMPRESSED)).decode()
    marks = spans.from_bytes("spans", stored.sections.read(container.SPANS), len(text), len(LONG))
    params = stored.manifest.method.params
    # The words of the document that are left, in its order; as a text that was generated it has no spans.
    rest = iter(words_of(LONG))
    assert all(word in rest for word in words_of(text))
    assert marks == ()
    assert len(words_of(text)) < len(words_of(LONG))
    assert 0 < model.prompt.content.count(text) == asked.ledger["tokens"]["material"] <= allowed
    assert params["outcome.tokens"] == asked.ledger["tokens"]["material"]
    assert (params["outcome.source_tokens"], params["outcome.package"]) == (whole, "llmlingua 0.2.2")
    ids = model.prompt.prefix(text, kind=container.COMPRESSED)
    assert asked.ids == own_answer(model, ids, model.prompt.fresh(QUESTION), 6)
    assert json.loads(sent.end.account_json)["prefill_tokens"] == 0
