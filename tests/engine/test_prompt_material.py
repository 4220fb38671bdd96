"""What stands in the document's place: its label, its tokens, and tasks for the sender's own model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import tokenizer_utils

from kvferry.core import container
from kvferry.core.evidence import Evidence, Fact
from kvferry.engine import prompt as prompts
from kvferry.engine.prompt import DEFAULT_SYSTEM, LABELS, PromptBuilder

TEXTS = ("", "The code is 4417.", "門 🚢 e\u0301 <|im_end|>\r\n <think>", "  \n")
QUESTION = "Which code?"


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> Any:
    return tokenizer_utils.load(tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer)


@pytest.fixture(scope="module")
def decoded(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_every_kind_of_material_has_a_label_of_its_own() -> None:
    assert set(LABELS) == {container.TEXT, *container.SHORTENED, container.EVIDENCE}
    assert len(set(LABELS.values())) == len(LABELS)
    assert LABELS[container.TEXT] == "Document"


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("text", TEXTS)
def test_prompts_differ_in_the_label_only(
    prompt: PromptBuilder, decoded: Callable[[list[int]], str], kind: str, text: str
) -> None:
    whole = decoded(prompt.prefix(text, kind=kind) + prompt.fresh(QUESTION))
    assert whole == (
        f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{LABELS[kind]}:\n{text}\n\nQuestion: {QUESTION}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_document_is_the_default(prompt: PromptBuilder) -> None:
    assert prompt.prefix("x") == prompt.prefix("x", DEFAULT_SYSTEM, container.TEXT)


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("text", TEXTS)
def test_material_counts_what_it_adds_to_the_prompt(prompt: PromptBuilder, kind: str, text: str) -> None:
    assert prompt.content.count(text) == len(prompt.prefix(text, kind=kind)) - len(prompt.prefix("", kind=kind))


def test_a_task_has_the_turn_to_itself(prompt: PromptBuilder, decoded: Callable[[list[int]], str]) -> None:
    task = "Summarise. <|im_end|>"
    assert decoded(prompt.task(task)) == f"\n\n{task}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.task(task).count(prompt.task("")[-1]) == prompt.task("").count(prompt.task("")[-1])


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_say_what_every_token_stands_for(
    prompt: PromptBuilder, decoded: Callable[[list[int]], str], text: str
) -> None:
    ids = prompt.prefix(text)[len(prompt.prefix("")) :]
    offsets = prompt.content.offsets(text)
    assert len(offsets) == len(ids) == prompt.content.count(text)
    for token, (start, end) in zip(ids, offsets, strict=True):
        piece = decoded([token])
        # Bytes of a longer character decode to nothing on their own.
        assert piece == text[start:end] or ("\ufffd" in piece and end - start >= 1)
    assert {at for start, end in offsets for at in range(start, end)} == set(range(len(text)))


def test_control_strings_shift_no_offset(prompt: PromptBuilder) -> None:
    before = "<|im_end|><think>" * 3
    shifted = prompt.content.offsets(before + "\n門 4417")
    assert [(start - len(before), end - len(before)) for start, end in shifted if start >= len(before)] == (
        prompt.content.offsets("\n門 4417")
    )


def test_the_blind_prompt_has_no_place_for_a_question_and_the_aware_one_ends_with_it() -> None:
    assert prompts.SUMMARY_AWARE.endswith("\n\nQuestion: ")
    assert "{" not in prompts.SUMMARY_BLIND + prompts.SUMMARY_AWARE + prompts.SUMMARY_SYSTEM
    for words in ("exactly", "numbers", "dates", "negation"):
        assert words in prompts.SUMMARY_BLIND
        assert words in prompts.SUMMARY_AWARE


@pytest.mark.parametrize("with_form", [True, False])
def test_evidence_is_asked_for_in_one_way_with_and_without_the_question(*, with_form: bool) -> None:
    blind = prompts.evidence_task(None, with_form=with_form)
    aware = prompts.evidence_task("Who? {0}", with_form=with_form)
    assert aware.endswith("\n\nQuestion: Who? {0}")
    shared = blind.split(". ", 1)[0]
    assert blind.removeprefix(shared) == "." + aware.split(".", 1)[1].removesuffix("\n\nQuestion: Who? {0}")
    fields = ("entity", "attribute", "value", "quote")
    assert [blind.index(name) for name in fields] == sorted(blind.index(name) for name in fields)
    lists = [name for name in ("facts", "notes", "unknowns") if f'"{name}"' in blind]
    assert lists == (["facts", "notes", "unknowns"] if with_form else [])
    for word in ("names", "codes", "numbers", "dates", "negations"):
        assert prompts.SUMMARY_BLIND.count(word) == prompts.SUMMARY_AWARE.count(word) == blind.count(word) == 1


@pytest.mark.parametrize("system", [DEFAULT_SYSTEM, prompts.SUMMARY_SYSTEM, prompts.EVIDENCE_SYSTEM])
def test_every_model_is_told_to_use_nothing_but_the_document(system: str) -> None:
    assert system.count("Use only what the document says.") == 1


@pytest.mark.parametrize("places", [(), ((4, 9),), ((4, 9), (14, 19))])
@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("written", ["exact", "folded"])
def test_a_reader_is_told_of_every_fact_that_the_document_does_not_confirm(
    places: tuple[tuple[int, int], ...], written: Any, *, supported: bool
) -> None:
    match = written if places else "unresolved"
    facts = tuple(Fact("A", "b", value, match, places, 0, supported) for value in ("c", "d (not)"))
    lines = prompts.evidence_text(Evidence(facts, (), (), complete=True, stop="stop")).splitlines()
    told = "" if places and supported else " (not confirmed)"
    assert lines == [f"A - b: c{told}", f"A - b: d (not){told}"]


def test_evidence_reads_as_one_line_a_statement() -> None:
    fact = Fact("A\nB", "c  d", "e\u2028f", "exact", ((0, 1),), 0, supported=True)
    lost = Fact("A", "c", "g", "unresolved", (), 0, supported=False)
    found = Evidence((fact, lost), ("n\nm",), ("u",), complete=True, stop="stop")
    assert prompts.evidence_text(found) == (
        "A B - c d: e f\nA - c: g (not confirmed)\nNote: n m\nThe document does not say: u"
    )
    assert prompts.evidence_text(Evidence((), (), (), complete=True, stop="stop")) == ""


ASKED = {name for name, value in vars(prompts).items() if isinstance(value, str) and " " in value.strip()} - {
    "__doc__",
    "DEFAULT_SYSTEM",
    "UNCONFIRMED",
}


def test_other_words_for_the_senders_model_are_other_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ASKED) >= 9
    found = {prompts.instructions()}
    assert prompts.instructions() in found
    for name in sorted(ASKED):
        monkeypatch.setattr(prompts, name, getattr(prompts, name) + " ")
        found.add(prompts.instructions())
        monkeypatch.undo()
    assert len(found) == 1 + len(ASKED)


def test_other_threads_run_while_a_long_text_is_encoded(prompt: PromptBuilder) -> None:
    """A daemon's event loop answers from another thread."""
    text = "The access code of the north warehouse is 4417. " * 20_000
    gaps: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    tokens = prompt.content.count(text)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    assert tokens > 100_000
    # Held back throughout, the other thread would have one gap of nearly all of it.
    assert max(gaps) < 0.6 * seconds
