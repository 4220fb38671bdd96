"""Material that is not the whole document: its label, its tokens, its spans."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.core import container
from kvferry.core.errors import ContainerError
from kvferry.engine.model import LoadedModel
from kvferry.receiver import reconstruct

DOCUMENT = "The access code of the north warehouse is 4417. Tür und Tor, 門, 🚢. The ferry leaves at dawn. " * 3
QUESTIONS = ("What is the access code?", "Who keeps the keys, and when?")
LABELS = {
    "A0": "Document",
    "A1": "Document",
    "A2": "Beginning and end of the document",
    "A3": "Excerpts from the document",
    "A4": "Summary of the document",
}
KINDS = {"A2": container.ENDS, "A3": container.EXCERPTS, "A4": container.SUMMARY}


class Given:
    """Sections as a test wants them."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents

    def __contains__(self, name: str) -> bool:
        return name in self._contents

    def read(self, name: str) -> bytes:
        return self._contents[name]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


def prompt_ids(model: LoadedModel, label: str, text: str, question: str) -> list[int]:
    """Return the ids of a prompt with nothing of special-token look in it, encoded by the tokenizer itself."""
    pieces = model.prompt.prefix("", kind=container.TEXT)
    wanted = model.tokenizer.decode(pieces, skip_special_tokens=False).replace("Document:\n", "")

    def encode(part: str) -> list[int]:
        return list(model.tokenizer.encode(part, add_special_tokens=False))

    system = wanted.split("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
    opening = encode("<|im_start|>system\n") + encode(system) + encode(f"<|im_end|>\n<|im_start|>user\n{label}:\n")
    closing = encode("\n\nQuestion: ") + encode(question) + encode("<|im_end|>\n<|im_start|>assistant\n")
    return opening + encode(text) + closing


@pytest.mark.parametrize("method", LABELS)
def test_answers_come_from_the_material_under_its_label(
    bench: Callable[..., Any],
    artifact: Callable[..., Any],
    own_answer: Callable[..., tuple[int, ...]],
    model: LoadedModel,
    method: str,
) -> None:
    receiver = bench(model)
    given = {"budget": 40} if method in KINDS else {}
    stored = receiver.take(artifact(model, method, DOCUMENT, **given))
    text = reconstruct.message(stored.manifest, stored.sections).text
    assert (text == DOCUMENT) is (method == "A1")
    for question in QUESTIONS:
        answer, ledger = receiver.ask(stored, question)
        ids = prompt_ids(model, LABELS[method], text, question)
        assert ledger.tokens.receiver_prefill == len(ids)
        assert answer.token_ids == own_answer(model, [], ids, 6)
    # The prompt's own words, and at most the budget.
    frame = len(prompt_ids(model, LABELS[method], "", question))
    assert 0 < len(ids) - frame <= 40 if method in KINDS else (len(ids) == frame) is (method == "A0")


@pytest.mark.parametrize("method", KINDS)
def test_the_message_says_what_it_is_and_where_it_is_from(
    artifact: Callable[..., Any], model: LoadedModel, method: str
) -> None:
    stored = artifact(model, method, DOCUMENT, budget=40)
    message = reconstruct.message(stored.manifest, stored.sections)
    assert message.kind == KINDS[method]
    assert (len(message.spans) > 0) is (method != "A4")
    for at, start, end in message.spans:
        assert message.text[at : at + end - start] == DOCUMENT[start:end] != ""


@pytest.mark.parametrize("method", ["A0", "A1", "A7", "B0"])
def test_the_document_itself_has_no_spans(artifact: Callable[..., Any], model: LoadedModel, method: str) -> None:
    stored = artifact(model, method, DOCUMENT)
    message = reconstruct.message(stored.manifest, stored.sections)
    assert (message.kind, message.spans) == (container.TEXT, ())


@pytest.mark.parametrize(
    "row",
    [(0, 4, 4), (0, 0, len(DOCUMENT) + 1), (10**6, 0, 1), (0, 5, 4)],
    ids=["empty", "outside the document", "outside the text", "backwards"],
)
def test_spans_that_do_not_fit_are_refused(
    artifact: Callable[..., Any], model: LoadedModel, row: tuple[int, int, int]
) -> None:
    stored = artifact(model, "A2", DOCUMENT, budget=40)
    contents = {section.name: bytes(stored.sections.read(section.name)) for section in stored.manifest.sections}
    contents[container.SPANS] = struct.pack("<III", *row)
    with pytest.raises(ContainerError, match=r"^section document\.spans: "):
        reconstruct.message(stored.manifest, Given(contents))


def test_references_have_no_material_until_something_is_looked_up(
    artifact: Callable[..., Any], model: LoadedModel
) -> None:
    stored = artifact(model, "A1", DOCUMENT)
    references = msgspec.structs.replace(stored.manifest, form="references")
    with pytest.raises(ContainerError, match="holds no material of its own"):
        reconstruct.message(references, stored.sections)
