"""The prompt's version stands for every word that a receiver's model is given: other words are another version."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from mlx_lm import tokenizer_utils

from kvferry.core import container
from kvferry.core.evidence import Evidence, Fact, Reference
from kvferry.engine.prompt import LABELS, PROMPT_VERSION, PromptBuilder, evidence_text
from kvferry.receiver import lookups

GIVEN = {3: "941f25b68157521da1802e9e5c77b1f5391c7a8eea83c8043f2d086bc6586b67"}
"""The digest of ``rendered`` at a version. One that was released stays as it is."""

DOCUMENT = "Nils keeps the key of bay C4. The Greta sails at 7:40.\n" * 20
TURNS = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}[assistant]"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
TWICE = ((22, 28), (77, 83))


def facts() -> Iterator[Fact]:
    for match in ("exact", "folded", "unresolved"):
        for spans in ((),) if match == "unresolved" else (TWICE[:1], TWICE):
            for supported in (True, False):
                yield Fact("Nils\nof bay", "keeps", " C4  or\tC5", match, spans, len(spans) // 2, supported)


def materials() -> Iterator[tuple[str, str]]:
    """Yield texts, each with its kind: as they are sent, as evidence reads, and as what was looked up does."""
    for kind in LABELS:
        yield kind, ""
        yield kind, "Nils keeps the key.\n...\nThe Greta sails."
    every = tuple(facts())
    remarks = ("a note\nof two lines", "another"), ("the rent", "who\nsails")
    for listed, (notes, unknowns) in ((every, remarks), (every, ((), ())), ((), remarks), ((), ((), ()))):
        for complete in (True, False):
            stop = "stop" if complete else "length"
            yield container.EVIDENCE, evidence_text(Evidence(listed, notes, unknowns, complete, stop))
    references = [Reference("Nils", "key", at, at + 6) for at in (22, 220, 1000)]
    for question in ("Who has the key?", "Zebra?"):
        wanted = lookups.choose(references, question, len(DOCUMENT))
        texts = [DOCUMENT[start:end] for start, end in wanted.places]
        yield container.EXCERPTS, lookups.put_together(wanted, texts, len(DOCUMENT)).text


def rendered(tokenizer: Any) -> list[str]:
    """Return prompts with material of every kind, as text: what they are does not hang on a vocabulary."""
    prompt = PromptBuilder(tokenizer)
    prefixes = [prompt.prefix(text, kind=kind) for kind, text in materials()]
    prefixes += [prompt.prefix("Nils."), prompt.prefix("Nils.", "Another system prompt.")]
    turns = [prompt.fresh(question) for question in ("", "Who has\nthe key?")]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in [*prefixes, *turns]]


@pytest.fixture
def given(tiny_tokenizer_dir: Path) -> Callable[[], list[str]]:
    """Return a function: every prompt, by a template with a place for the system prompt and by one without."""

    def run() -> list[str]:
        found: list[str] = []
        for template in (TURNS, NO_SYSTEM + TURNS):
            tokenizer = tokenizer_utils.load(tiny_tokenizer_dir)
            tokenizer.chat_template = template
            found += rendered(tokenizer)
        return found

    return run


def test_the_words_of_a_prompt_are_those_of_its_version(given: Callable[[], list[str]]) -> None:
    digest = blake3(json.dumps(given()).encode()).hexdigest()
    assert GIVEN.get(PROMPT_VERSION) == digest, (
        "A receiver's model is given something else than this version stands for, and an artifact of an older sender "
        f"would be read in other words than it was made for. Raise PROMPT_VERSION (it is {PROMPT_VERSION}), and put "
        f"the digest {digest} beside the new number here."
    )


def test_prompts_of_every_kind_are_looked_at(given: Callable[[], list[str]]) -> None:
    texts = given()
    with_role, without = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    assert {text.split("]")[0] for text in with_role[:-2]} == {"[system"}
    assert {text.split("]")[0] for text in without[:-2]} == {"[user"}
    for label in LABELS.values():
        assert sum(f"{label}:\n" in text for text in with_role) >= 2
    assert max(text.count("Nils of bay - keeps: C4 or C5") for text in texts) == 10
    assert any("C4. The Greta" in text and "sails at 7:40.\nNils" in text for text in texts)
