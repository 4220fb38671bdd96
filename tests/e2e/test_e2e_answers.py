"""`kvferry ablate answers` with daemons in processes of their own: what is recorded is what the models said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.ablations.answers import bench as answers
from kvferry.ablations.answers.figures import of_record, outcome
from kvferry.ablations.answers.grid import AnswerGrid
from kvferry.ablations.answers.questions import Examined, Question
from kvferry.ablations.harness.settings import Setting
from kvferry.core import container
from kvferry.engine.model import LoadedModel

pytestmark = pytest.mark.slow

CODE = Question("What is the access code?", ("4417",), "warehouse is 4417", "code")
BOAT = Question("When does the ferry leave?", ("dawn",), "leaves at dawn", "date")
TEXT = "The access code of the north warehouse is 4417. Größe: 12 m². The ferry leaves at dawn with eleven crates."
TOKENS = 8


def said(model: LoadedModel, ids: tuple[int, ...]) -> str:
    """Return the text of some tokens, as it is read while they come."""
    detokenizer = model.tokenizer.detokenizer
    detokenizer.reset()
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def test_answers_through_real_daemons(
    tmp_path: Path,
    tiny_model_dir: Callable[..., Path],
    tiny_model: Callable[..., LoadedModel],
    local_answer: Callable[..., tuple[int, ...]],
) -> None:
    settings = (Setting("A0"), Setting("A1"), Setting("A3-aware", (("budget", 30),)))
    grid = AnswerGrid((str(tiny_model_dir()),), settings, TOKENS)
    document = Examined("notes", TEXT, (CODE, BOAT))
    records = answers.run(grid, (document,), tmp_path / "records.jsonl", lambda _text, _share: None)
    assert [(record.method, record.question, record.status) for record in records] == [
        (setting.method, question.question, "done") for setting in settings for question in (CODE, BOAT)
    ]
    found = {(record.method, record.question): of_record(record) for record in records}
    model = tiny_model()
    for question in (CODE, BOAT):
        asked = question.question
        none, whole, aware = (found[method, asked] for method in ("A0", "A1", "A3-aware"))
        assert whole.prediction == said(model, local_answer(model, TEXT, asked, TOKENS))
        # What the receiver reads: the frame of the prompt, the material in it, and the question.
        frame, text = len(model.prompt.prefix("")), len(model.prompt.prefix(TEXT))
        fresh = len(model.prompt.fresh(asked))
        assert whole.receiver_prefill_tokens == text + fresh
        assert none.receiver_prefill_tokens == frame + fresh
        excerpts = len(model.prompt.prefix("", kind=container.EXCERPTS))
        assert aware.receiver_prefill_tokens <= excerpts + fresh + 30
        for answer in (none, whole, aware):
            assert answer.document_bytes == len(TEXT.encode())
            assert answer.artifact_bytes == answer.manifest_bytes + answer.payload_bytes + answer.control_bytes
            assert answer.wire_bytes == answer.artifact_bytes
            assert answer.first_token_ms is None or answer.first_token_ms > 0
        assert whole.payload_bytes - none.payload_bytes >= len(TEXT.encode())
    assert len({answer.artifact for (method, _), answer in found.items() if method == "A1"}) == 1
    assert len({answer.artifact for (method, _), answer in found.items() if method == "A3-aware"}) == 2
    told: list[dict[str, Any]] = [outcome(record) for record in records if record.method == "A3-aware"]
    assert [item["hit"] for item in told] == [True, True]
    assert all(0 < item["tokens"] <= 30 for item in told)
