"""What a sender's model writes for a reader with another tokenizer: as much as the budget holds of its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvferry.core.errors import ContextOverflowError
from kvferry.core.progress import Progress
from kvferry.engine.content import ContentEncoder
from kvferry.engine.generate import Answer, Token
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import EVIDENCE_SYSTEM, SUMMARY_BLIND, SUMMARY_SYSTEM, evidence_task, evidence_text
from kvferry.sender import registry
from kvferry.sender.text.evidence import ROOM_FOR_A_FACT

TEXT = "The access code of the north warehouse is 4417. Tür, 門 und 🚢. The ferry leaves at dawn.\n" * 3


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


def edited(model: LoadedModel, change: Callable[[dict[str, Any]], None]) -> ContentEncoder:
    state, ends = json.loads(model.prompt.content.description)
    change(state)
    return ContentEncoder(json.dumps([state, ends]).encode())


@pytest.fixture(scope="module")
def bytewise(model: LoadedModel) -> ContentEncoder:
    """Many tokens to a text: one a byte."""

    def change(state: dict[str, Any]) -> None:
        state["model"]["merges"] = []

    return edited(model, change)


@pytest.fixture(scope="module")
def wordwise(model: LoadedModel) -> ContentEncoder:
    """Few: one a run of letters or of other signs."""

    def change(state: dict[str, Any]) -> None:
        state["pre_tokenizer"] = {"type": "Whitespace"}
        state["model"] = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}

    return edited(model, change)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Return a function: let models write this, a character a token. The rooms that they get are in what returns."""

    def patch(text: str) -> list[int]:
        rooms: list[int] = []

        def answer(
            self: LoadedModel, ids: Any, prefix: Any, prefix_tokens: int, sampling: Any, constraint: Any
        ) -> Generator[Token, None, Answer]:
            rooms.append(sampling.max_tokens)
            said = text[: sampling.max_tokens]
            for number, char in enumerate(said):
                yield Token(number, char)
            return Answer(said, tuple(range(len(said))), "stop" if said == text else "length")

        monkeypatch.setattr(LoadedModel, "answer", answer)
        return rooms

    return patch


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are counted from here on, by whatever tokenizer."""
    texts: list[str] = []
    count = ContentEncoder.count
    monkeypatch.setattr(ContentEncoder, "count", lambda self, text: texts.append(text) or count(self, text))
    return texts


@pytest.fixture
def make(workshop: Callable[..., Any], drain: Callable[..., Any]) -> Callable[..., Any]:
    def run(model: LoadedModel, counter: ContentEncoder, method: str, text: str = TEXT, **given: Any) -> Any:
        found = registry.find(method)
        reading = workshop(model).reading(text)
        reading.counter = counter
        return drain(found.make(reading, registry.check_parameters(found, given)))

    return run


def test_the_two_count_differently(model: LoadedModel, bytewise: ContentEncoder, wordwise: ContentEncoder) -> None:
    own = model.prompt.content.count(TEXT)
    assert bytewise.count(TEXT) == len(TEXT.encode()) > 1.4 * own
    assert wordwise.count(TEXT) < own / 2


@pytest.mark.parametrize("budget", [1, 2, 7, 30])
def test_a_summary_fills_the_readers_budget_and_is_never_over_it(
    make: Callable[..., Any],
    model: LoadedModel,
    bytewise: ContentEncoder,
    wordwise: ContentEncoder,
    writes: Callable[..., list[int]],
    budget: int,
) -> None:
    writes("word " * 100)
    made = make(model, wordwise, "A4", budget=budget)
    assert made.text == ("word " * budget).strip()
    assert made.outcome["tokens"] == wordwise.count(made.text) == budget
    assert made.outcome["cap_hit"] is True
    made = make(model, bytewise, "A4", budget=budget)
    assert made.text == ("word " * 100)[:budget]
    assert made.outcome["generated"] == budget + 1


def test_one_that_ends_by_itself_is_whole(
    make: Callable[..., Any], model: LoadedModel, wordwise: ContentEncoder, writes: Callable[..., list[int]]
) -> None:
    writes("The code is 4417.")
    made = make(model, wordwise, "A4", budget=40)
    assert (made.text, made.outcome["cap_hit"], made.outcome["tokens"]) == ("The code is 4417.", False, 5)
    assert made.outcome["generated"] == len("The code is 4417.")


def test_a_budget_of_the_readers_is_no_promise_about_the_models_own_context(
    make: Callable[..., Any], tiny_model: Callable[..., LoadedModel], bytewise: ContentEncoder, wordwise: ContentEncoder
) -> None:
    spare = 9
    model = tiny_model("llama", context=1000)
    fixed = len(model.prompt.prefix(TEXT, SUMMARY_SYSTEM)) + len(model.prompt.task(SUMMARY_BLIND))
    model = tiny_model("llama", context=fixed + spare)
    # Half of the document in bytes is more than there is room for, and need not be taken.
    assert bytewise.count(TEXT) // 2 > spare
    made = make(model, bytewise, "A4", budget=0.5)
    assert 0 < made.outcome["generated"] <= spare
    assert made.outcome["cap_hit"] is True
    assert make(model, wordwise, "A4", budget=1000).outcome["generated"] <= spare
    full = tiny_model("llama", context=fixed)
    with pytest.raises(ContextOverflowError, match="^document: it takes .* and what is to be written 1, which leaves"):
        make(full, bytewise, "A4", budget=0.5)


def test_what_a_random_model_writes_keeps_to_it(
    make: Callable[..., Any], model: LoadedModel, bytewise: ContentEncoder, wordwise: ContentEncoder
) -> None:
    for counter in (bytewise, wordwise):
        for budget in (8, 20):
            made = make(model, counter, "A4", budget=budget)
            assert 0 < made.outcome["tokens"] == counter.count(made.text) <= budget


FACTS = [
    {"entity": f"pier {number}", "attribute": "code", "value": "4417", "quote": "code of the north warehouse is 4417"}
    for number in range(30)
]
WRITTEN = json.dumps({"facts": FACTS, "notes": [], "unknowns": []})


def test_evidence_is_written_until_the_readers_budget_is_full(
    make: Callable[..., Any], model: LoadedModel, wordwise: ContentEncoder, writes: Callable[..., list[int]]
) -> None:
    writes(WRITTEN)
    for budget in (100, 300):
        made = make(model, wordwise, "A5", budget=budget, constraint="none")
        # It stops where its own writing is that long, as with one tokenizer.
        end = next(end for end in range(len(WRITTEN)) if wordwise.count(WRITTEN[:end]) > budget)
        facts = WRITTEN[:end].count("}")
        assert len(made.message.facts) == facts > 1
        assert made.outcome["tokens"] == wordwise.count(evidence_text(made.message)) <= budget
        assert (made.message.complete, made.message.stop) == (False, "length")
        assert made.outcome["generated"] > budget


@pytest.mark.parametrize("constraint", ["schema", "quotes"])
def test_what_is_kept_to_a_form_is_cut_as_well(
    make: Callable[..., Any], model: LoadedModel, bytewise: ContentEncoder, constraint: str
) -> None:
    made = make(model, bytewise, "A5", budget=300, constraint=constraint)
    assert made.outcome["tokens"] <= 300
    assert made.outcome["generated"] <= 300


def test_passage_by_passage_there_must_be_room_for_a_fact_in_the_models_own_tokens(
    make: Callable[..., Any], tiny_model: Callable[..., LoadedModel], bytewise: ContentEncoder
) -> None:
    model = tiny_model("llama", context=2000)
    fixed = len(model.prompt.prefix(TEXT, EVIDENCE_SYSTEM)) + len(
        model.prompt.task(evidence_task(None, with_form=False))
    )
    small = tiny_model("llama", context=fixed + ROOM_FOR_A_FACT - 1)
    with pytest.raises(ContextOverflowError, match=f"^document: .* what is to be written {ROOM_FOR_A_FACT}, "):
        make(small, bytewise, "A5", budget=400)


def test_what_takes_none_of_the_readers_tokens_is_not_written_for_ever(
    make: Callable[..., Any],
    model: LoadedModel,
    wordwise: ContentEncoder,
    writes: Callable[..., list[int]],
    counted: list[str],
) -> None:
    rooms = writes("word " * 50 + "\n" * 9000)
    made = make(model, wordwise, "A4", budget=50)
    assert made.text == ("word " * 50).strip()
    assert rooms[0] == made.outcome["generated"] == 50 * 32
    # Counted at every token, it would be half of its square.
    assert sum(map(len, counted)) < 80 * rooms[0] < rooms[0] ** 2 / 2


def test_progress_counts_the_readers_tokens(
    workshop: Callable[..., Any], model: LoadedModel, wordwise: ContentEncoder, writes: Callable[..., list[int]]
) -> None:
    writes("word " * 100)
    found = registry.find("A4")
    reading = workshop(model).reading(TEXT)
    reading.counter = wordwise
    steps = list(found.make(reading, registry.check_parameters(found, {"budget": 12})))
    seen = [step for step in steps if isinstance(step, Progress) and step.stage == "method"]
    assert {step.total for step in seen} == {12}
    done = [step.done for step in seen]
    assert done == sorted(done)
    assert set(done) > {0, 12}


def test_a_text_is_counted_now_and_then(
    make: Callable[..., Any],
    model: LoadedModel,
    wordwise: ContentEncoder,
    writes: Callable[..., list[int]],
    counted: list[str],
) -> None:
    writes("word " * 1000)
    made = make(model, wordwise, "A4", budget=400)
    assert made.outcome["generated"] > 1900
    assert len(counted) < 200
