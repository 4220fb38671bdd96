"""Where a document is cut, and what follows the cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.ablations.methods.continuation import split
from kvferry.core.errors import InvalidRequestError
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import PromptBuilder

WORDS = "The ferry leaves at dawn with 11 crates; Tür und Tor, 門 and 🚢 are written down before noon. "


@pytest.fixture(scope="module")
def prompt(tiny_model: Callable[..., LoadedModel]) -> PromptBuilder:
    return tiny_model().prompt


@pytest.mark.parametrize("tokens", range(110, 190))
def test_prefix_and_continuation_are_the_whole_documents_own_tokens(prompt: PromptBuilder, tokens: int) -> None:
    document = WORDS * 8
    whole = prompt.prefix(document)
    cut = split(prompt, document, tokens, 12)
    assert document.startswith(cut.text)
    assert prompt.prefix(cut.text) == whole[: cut.prefix_tokens]
    assert list(cut.fed) == whole[cut.prefix_tokens : cut.prefix_tokens + 12]
    assert list(cut.truth) == whole[cut.prefix_tokens + 1 : cut.prefix_tokens + 13]
    # A character of several tokens is the longest stretch without a place to cut.
    assert tokens - 4 <= cut.prefix_tokens <= tokens


def test_no_longer_prefix_would_do(prompt: PromptBuilder) -> None:
    document = WORDS * 4
    whole = prompt.prefix(document)
    prefixes = [prompt.prefix(document[:end]) for end in range(1, len(document))]
    possible = {len(ids) for ids in prefixes if ids == whole[: len(ids)]}
    for tokens in range(110, 190):
        assert split(prompt, document, tokens, 5).prefix_tokens == max(count for count in possible if count <= tokens)


def test_the_shortest_document_that_will_do(prompt: PromptBuilder) -> None:
    document = WORDS * 3
    tokens = len(prompt.prefix(document))
    assert len(split(prompt, document, tokens - 6, 5).truth) == 5
    with pytest.raises(InvalidRequestError, match=rf"^document: {tokens} tokens .* need {tokens + 1}$"):
        split(prompt, document, tokens - 5, 5)


def test_a_prefix_that_has_no_room_for_the_document_is_refused(prompt: PromptBuilder) -> None:
    frame = len(prompt.prefix(""))
    with pytest.raises(InvalidRequestError, match=rf"^prefix_tokens: {frame}, but the prompt takes {frame} before"):
        split(prompt, WORDS * 8, frame, 5)
    assert split(prompt, WORDS * 8, frame + 1, 5).prefix_tokens == frame + 1
