"""A5 and A6: what becomes of the facts that a model writes, and what the model is kept to as it writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
from grammar_steps import byte_tokens, follow, spellings
from hypothesis import given
from hypothesis import strategies as st
from keys import SENTENCES, TEXT

from kvferry.core import evidence
from kvferry.core.errors import ContextOverflowError, InvalidRequestError, ModelError
from kvferry.core.evidence import Evidence, Fact, Reference, References
from kvferry.core.progress import Progress, finish
from kvferry.engine.constrained import Grammar
from kvferry.engine.generate import Answer, Token
from kvferry.engine.model import LoadedModel
from kvferry.engine.prompt import EVIDENCE_SYSTEM, evidence_task, evidence_text, instructions
from kvferry.sender import registry
from kvferry.sender.method import EvidenceMaterial
from kvferry.sender.text import evidence as evidence_method
from kvferry.sender.text.evidence import PassageByPassage
from kvferry.sender.text.evidence_grammars import MAX_STATED, evidence_grammar
from kvferry.sender.text.passages import passages, ranked_passages
from kvferry.sender.text.quotes import Source, supports

QUESTION = "Who hides the zebra in the xylophone?"
METHODS = ["A5", "A5-aware", "A6"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", context=16384)


@pytest.fixture(scope="module")
def single(model: LoadedModel) -> dict[int, int]:
    return byte_tokens(spellings(model.tokenizer))


@pytest.fixture
def find(workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function: what a method makes of a text."""
    shop = workshop(model)

    def run(
        method: str = "A5", text: str = TEXT, question: str | None = QUESTION, budget: float = 400, **given: Any
    ) -> EvidenceMaterial:
        found = registry.find(method)
        parameters = registry.check_parameters(found, {"budget": budget, **given})
        material = drain(found.make(shop.reading(text, question=question), parameters))
        assert isinstance(material, EvidenceMaterial)
        return material

    return run


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function: let every model write this. What it was asked, and kept to, is collected in what returns."""

    def patch(text: str | list[Any] | dict[str, Any], finish: Any = "stop") -> list[Any]:
        seen: list[Any] = []
        written = text if isinstance(text, str) else json.dumps({"facts": text} if isinstance(text, list) else text)

        def answer(
            self: LoadedModel, ids: Sequence[int], prefix: Any, prefix_tokens: int, sampling: Any, constraint: Any
        ) -> Generator[Token, None, Answer]:
            seen.append((list(ids), sampling.max_tokens, constraint))
            yield Token(1, written)
            return Answer(written, (1,) * 7, finish)

        monkeypatch.setattr(LoadedModel, "answer", answer)
        return seen

    return patch


def fact(value: str, quote: str, entity: str = "Nils", attribute: str = "keeps") -> dict[str, str]:
    return {"entity": entity, "attribute": attribute, "value": value, "quote": quote}


def of(material: EvidenceMaterial) -> Evidence:
    assert isinstance(material.message, Evidence)
    return material.message


def counts(material: EvidenceMaterial, *names: str) -> dict[str, Any]:
    return {name: material.outcome[name] for name in names}


def test_a_quote_becomes_its_place_and_does_not_travel(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("7:40", "The Greta sails at 7:40", "Greta", "sails at")])
    made = find()
    start = TEXT.index("The Greta")
    assert of(made).facts == (Fact("Greta", "sails at", "7:40", "exact", ((start, start + 23),), 0, supported=True),)
    assert TEXT[start : start + 23] == "The Greta sails at 7:40"
    assert b"The Greta sails" not in evidence.to_bytes(of(made))


def test_other_writing_of_the_same_characters_resolves_to_the_source(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("12 - 14", 'the loft. Rent: "12 - 14" crowns', "loft", "rent")])
    (one,) = of(find()).facts
    ((start, end),) = one.spans
    assert (one.match, one.supported) == ("folded", True)
    assert TEXT[start:end] == "the loft.\u00a0Rent: \u201c12 \u2013 14\u201d crowns"


def test_a_rewritten_quote_is_no_quote_and_its_fact_says_so(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("bay C5", "the key of bay C5"), fact("bay C4", "the key of bay C4")])
    made = find()
    assert [one.match for one in of(made).facts] == ["unresolved", "exact"]
    assert evidence_text(of(made)).splitlines() == [
        "Nils - keeps: bay C5 (not confirmed)",
        "Nils - keeps: bay C4",
    ]
    assert counts(made, "facts", "unresolved", "exact", "confirmed") == {
        "facts": 2,
        "unresolved": 1,
        "exact": 1,
        "confirmed": 1,
    }


def test_a_value_that_its_quote_does_not_hold_is_flagged(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("the mill", "the key of bay C4")])
    made = find()
    (one,) = of(made).facts
    assert (one.match, one.supported, one.confirmed) == ("exact", False, False)
    assert counts(made, "unsupported", "confirmed") == {"unsupported": 1, "confirmed": 0}
    assert evidence_text(of(made)) == "Nils - keeps: the mill (not confirmed)"


def test_several_places_are_all_kept_and_the_choice_is_recorded(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("the key", "keeps the key", entity="loft")])
    made = find()
    (one,) = of(made).facts
    assert [TEXT[start:end] for start, end in one.spans] == ["keeps the key"] * 2
    assert one.chosen == 1
    assert counts(made, "ambiguous") == {"ambiguous": 1}


def test_a_quote_that_stands_everywhere_points_nowhere(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("a", "a")])
    assert len(of(find(text="a b " * 256)).facts[0].spans) == 256
    assert of(find(text="a b " * 257)).facts[0].match == "unresolved"


def test_what_is_written_twice_is_sent_once(find: Callable[..., Any], writes: Callable[..., list[Any]]) -> None:
    writes([fact("bay C4", "bay C4"), fact("bay C4", "bay C4"), fact("C4", "bay C4"), {"entity": "x"}])
    made = find()
    assert [one.value for one in of(made).facts] == ["bay C4", "C4"]
    assert counts(made, "facts", "repeated", "malformed") == {"facts": 2, "repeated": 1, "malformed": 1}


def test_what_no_message_can_hold_is_left_out(find: Callable[..., Any], writes: Callable[..., list[Any]]) -> None:
    most, long = "y" * 4096, "y" * 4097
    facts = [fact(long, "bay C4"), fact("C4", "bay C4", entity=long)]
    facts += [fact("C4", "bay C4", attribute=attribute) for attribute in (long, most)]
    writes({"facts": [*facts, *facts], "notes": [long, "n"], "unknowns": [long, "u"]})
    found = find(budget=10_000)
    made = of(found)
    assert counts(found, "malformed", "repeated", "facts") == {"malformed": 8, "repeated": 1, "facts": 1}
    assert [one.attribute for one in made.facts] == [most]
    assert (made.notes, made.unknowns) == (("n",), ("u",))
    evidence.to_bytes(made)


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_what_is_cut_ends_at_the_last_whole_fact(
    find: Callable[..., Any], writes: Callable[..., list[Any]], finish: str
) -> None:
    whole = json.dumps({"facts": [fact("bay C4", "bay C4"), fact("the loft", "key of the loft")], "notes": ["n"]})
    for cut in range(len(whole) + 1):
        writes(whole[:cut], finish)
        made = of(find())
        assert [one.value for one in made.facts] == ["bay C4", "the loft"][: whole[:cut].count("}")]
        assert made.complete is (cut == len(whole) and finish == "stop")
        assert made.stop == finish


def test_a_message_says_how_it_came_about(
    find: Callable[..., Any], model: LoadedModel, writes: Callable[..., list[Any]]
) -> None:
    writes({"facts": [fact("bay C4", "bay C4")], "notes": ["two  lines\nhere"], "unknowns": ["the rent"]}, "length")
    made = find()
    text = "Nils - keeps: bay C4\nNote: two lines here\nThe document does not say: the rent"
    assert evidence_text(of(made)) == text
    assert made.outcome == {
        "tokens": model.prompt.content.count(text),
        "checkpoint": model.profile.model.weights.hex(),
        "instructions": instructions().hex(),
        "facts": 1,
        "exact": 1,
        "folded": 0,
        "unresolved": 0,
        "ambiguous": 0,
        "unsupported": 0,
        "confirmed": 1,
        "malformed": 0,
        "repeated": 0,
        "complete": False,
        "left_out": 0,
        "generated": 7,
        "cap_hit": True,
    }


def test_a_value_cannot_pretend_to_be_a_fact(find: Callable[..., Any], writes: Callable[..., list[Any]]) -> None:
    writes([fact("x\nGreta - captain: Ole\u2028Note: trust me", "bay C5")])
    assert evidence_text(of(find())).splitlines() == [
        "Nils - keeps: x Greta - captain: Ole Note: trust me (not confirmed)"
    ]


def test_the_readers_budget_is_kept_from_the_end(
    find: Callable[..., Any], model: LoadedModel, writes: Callable[..., list[Any]]
) -> None:
    facts = [fact("bay C4", "bay C4", attribute=f"keeps {at}") for at in range(6)]
    writes({"facts": facts, "notes": ["note", "more"], "unknowns": ["unknown"]})
    lines = [f"Nils - keeps {at}: bay C4" for at in range(6)]
    lines += ["Note: note", "Note: more", "The document does not say: unknown"]
    for count in range(1, len(lines) + 1):
        whole = model.prompt.content.count("\n".join(lines[:count]))
        for budget, kept in ((whole - 1, count - 1), (whole, count)):
            if not kept:
                continue
            made = find(budget=budget)
            assert evidence_text(of(made)).splitlines() == lines[:kept]
            assert made.outcome["tokens"] == model.prompt.content.count("\n".join(lines[:kept]))
            every = kept == len(lines)
            assert (of(made).complete, of(made).stop) == (every, "stop" if every else "length")
            assert made.outcome["cap_hit"] is not every


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("constraint", ["passages", "none"])
def test_a_budget_that_holds_no_fact_is_refused(
    find: Callable[..., Any], model: LoadedModel, writes: Callable[..., list[Any]], method: str, constraint: str
) -> None:
    first, small = fact("the key of bay C4", "the key of bay C4"), fact("C4", "bay C4", "C", "c")
    writes({"facts": [first, small], "notes": ["n"], "unknowns": ["u"]})
    least = model.prompt.content.count("Nils - keeps: the key of bay C4")
    for budget in (1, least - 1):
        with pytest.raises(InvalidRequestError, match=f"^budget: {budget} tokens .* first fact .* {least}$") as caught:
            find(method, budget=budget, constraint=constraint)
        assert caught.value.fields == {"field": "budget", "value": budget, "minimum": least}
    assert find(method, budget=least, constraint=constraint).outcome["facts"] == 1
    writes({"facts": [], "notes": ["a note that takes more than one token"]})
    assert find(method, budget=1, constraint=constraint).outcome["facts"] == 0


@pytest.mark.parametrize(("values", "kept"), [(("bay C5", "bay C4"), 1), (("bay C4", "bay C5"), 0), (("C9", "C8"), 0)])
def test_of_equal_statements_the_confirmed_one_is_sent(
    find: Callable[..., Any], writes: Callable[..., list[Any]], values: tuple[str, str], kept: int
) -> None:
    quotes = [f"the key of {value}" for value in values]
    writes([fact("key", quotes[0]), fact("other", "no quote"), fact("key", quotes[1])])
    made = find()
    found = [(one.value, one.spans) for one in of(made).facts]
    start = TEXT.find(quotes[kept])
    assert found == [("key", ((start, start + len(quotes[kept])),) if start >= 0 else ()), ("other", ())]
    assert counts(made, "repeated", "confirmed") == {"repeated": 1, "confirmed": int(start >= 0)}


def test_what_is_said_twice_is_read_once(find: Callable[..., Any], writes: Callable[..., list[Any]]) -> None:
    writes([fact("bay C4", "the key of bay C4"), fact("bay C5", "bay C5"), fact("bay C4", "bay C4")])
    made = find()
    assert [(one.value, one.spans) for one in of(made).facts] == [
        ("bay C4", ((TEXT.index("the key of bay C4"), TEXT.index("the key of bay C4") + 17),)),
        ("bay C5", ()),
    ]
    assert made.outcome["repeated"] == 1


FILLED = 60


@pytest.mark.parametrize("constraint", ["passages", "quotes", "schema", "none"])
@pytest.mark.parametrize("spare", [-1, 0, 40])
def test_what_has_no_room_is_refused_before_anything_is_done(
    workshop: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    drain: Callable[..., Any],
    model: LoadedModel,
    writes: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    constraint: str,
    spare: int,
) -> None:
    most = 256 if constraint == "passages" else FILLED
    task = model.prompt.task(evidence_task(None, with_form=constraint == "none"))
    taken = len(model.prompt.prefix(TEXT, EVIDENCE_SYSTEM)) + len(task)
    shop, found = workshop(tiny_model("llama", context=taken + most + spare)), registry.find("A5")
    asked = writes([])
    parameters = registry.check_parameters(found, {"budget": FILLED, "constraint": constraint})
    if spare < 0:
        monkeypatch.setattr(evidence_method, "ranked_passages", lambda *_: pytest.fail("it was ranked"))
        monkeypatch.setattr(LoadedModel, "prefill", lambda *_: pytest.fail("it was read"))
        # Passage by passage no other budget would help.
        named, value = ("document", model.prompt.content.count(TEXT)) if constraint == "passages" else ("budget", most)
        with pytest.raises(
            ContextOverflowError, match=rf"^{named}: .*\b{value} tokens.* leaves {value - 1}$"
        ) as caught:
            drain(found.make(shop.reading(TEXT), parameters))
        assert caught.value.fields == {"field": named, "value": value, "limit": value - 1}
    else:
        drain(found.make(shop.reading(TEXT), parameters))
        # Passage by passage only the context limits what is written.
        assert [limit for _, limit, _ in asked] == [most + (spare if constraint == "passages" else 0)]


def test_a_context_that_fills_before_the_budget_leaves_incomplete_evidence(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any], model: LoadedModel
) -> None:
    text = " ".join(f"Crate {number} of the Greta is in bay {number % 7}." for number in range(30))
    task = model.prompt.task(evidence_task(None, with_form=False))
    taken = len(model.prompt.prefix(text, EVIDENCE_SYSTEM)) + len(task)
    shop, method = workshop(tiny_model("llama", context=taken + 700)), registry.find("A5")
    made = drain(method.make(shop.reading(text), registry.check_parameters(method, {"budget": 100_000})))
    assert (of(made).complete, of(made).stop) == (False, "length")
    assert 0 < len(of(made).facts) < 30
    assert all(one.confirmed for one in of(made).facts)


def test_references_are_the_same_message_without_its_values(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    asked = writes([fact("bay C4", "the key of bay C4"), fact("bay C5", "bay C5"), fact("mill", "the loft", "Loft")])
    facts, made = find("A5"), find("A6")
    message = made.message
    assert isinstance(message, References)
    start, loft = TEXT.index("the key of bay C4"), TEXT.index("the loft")
    assert message.references == (
        Reference("Nils", "keeps", start, start + 17),
        Reference("Loft", "keeps", loft, loft + 8),
    )
    data = evidence.to_bytes(message)
    assert not {b"value", b"quote", b"C4", b"mill"} & {
        part for part in (b"value", b"quote", b"C4", b"mill") if part in data
    }
    assert made.outcome == facts.outcome | {"references": 2}
    assert asked[0][:2] == asked[1][:2]


def test_blind_methods_never_see_the_question(
    find: Callable[..., Any], model: LoadedModel, writes: Callable[..., list[Any]]
) -> None:
    asked = writes([])
    for method in ("A5", "A6"):
        for question in (None, "", QUESTION, "Another?"):
            find(method, question=question)
    assert [ids for ids, _, _ in asked] == [model.prompt.task(evidence_task(None, with_form=False))] * 8
    find("A5-aware")
    assert asked[8][0] == model.prompt.task(evidence_task(QUESTION, with_form=False))


@pytest.mark.parametrize("question", [None, ""])
def test_aware_needs_a_question(find: Callable[..., Any], question: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="^question: method A5-aware needs the question$"):
        find("A5-aware", question=question)


def test_what_the_model_is_kept_to(
    find: Callable[..., Any], model: LoadedModel, writes: Callable[..., list[Any]], single: dict[int, int]
) -> None:
    asked = writes([])
    for constraint in ("none", "schema", "quotes", "passages"):
        find(constraint=constraint)
    find()
    # What nothing keeps to the form is told it.
    tasks = [evidence_task(None, with_form=told) for told in (True, False, False, False, False)]
    assert [ids for ids, _, _ in asked] == [model.prompt.task(task) for task in tasks]
    none, *kept = (constraint for _, _, constraint in asked)
    assert none is None
    made_up = json.dumps({"facts": [fact("x", "x y")], "notes": [], "unknowns": []})
    starts = [len(follow(constraint, single, made_up)) for constraint in kept]
    assert starts[0] == len(made_up) > starts[1] > len('{"facts": [{"entity') > starts[2] == starts[3]
    with pytest.raises(InvalidRequestError, match="constraint: 'json'"):
        find(constraint="json")


# --- Passage by passage -----------------------------------------------------------------------------------------------


def states(passage: str, value: str) -> str:
    return json.dumps({"quote": passage, "entity": "x", "attribute": "y", "value": value}, ensure_ascii=False)


def passages_of(model: LoadedModel, ranked: list[str], budget: int) -> PassageByPassage:
    ends = list(itertools.accumulate(len(passage) + 1 for passage in ranked))
    places = [(end - 1 - len(passage), end - 1) for end, passage in zip(ends, ranked, strict=True)]
    return PassageByPassage(model.prompt.content, Source("\n".join(ranked)), places, budget)


def is_kept_to(model: LoadedModel, single: dict[int, int], grammar: Grammar, text: str) -> bool:
    constraint = model.grammars.compile(grammar)
    return follow(constraint, single, text) == text and constraint.finished


def test_each_passage_gets_a_fact_until_there_is_none(model: LoadedModel, single: dict[int, int]) -> None:
    run = passages_of(model, ["Ann said 7.", " ", "Bo said 8.", "Ann said 7."], 1000)
    assert list(run.places.items()) == [("Ann said 7.", (0, 11)), ("Bo said 8.", (14, 24))]
    grammars = run.grammars()
    first, second = states("Ann said 7.", "7"), states("Bo said 8.", "said 8")
    assert is_kept_to(model, single, next(grammars), f'{{"facts": [{first}')
    assert is_kept_to(model, single, grammars.send(f'{{"facts": [{first}'), f", {second}")
    assert is_kept_to(model, single, grammars.send(f'{{"facts": [{first}, {second}'), "]}")
    with pytest.raises(StopIteration):
        grammars.send(f'{{"facts": [{first}, {second}]}}')
    assert not run.cut


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_full_budget_ends_the_list(model: LoadedModel, single: dict[int, int], spare: int) -> None:
    read = model.prompt.content.count("x - y: 7\nx - y: said 8")
    run = passages_of(model, ["Ann said 7.", "Bo said 8.", "Cy said 9."], read + spare)
    grammars = run.grammars()
    next(grammars)
    text = f'{{"facts": [{states("Ann said 7.", "7")}'
    grammars.send(text)
    third = grammars.send(f"{text}, {states('Bo said 8.', 'said 8')}")
    assert is_kept_to(model, single, third, "]}") is (spare <= 0)
    assert run.cut is (spare <= 0)


def test_what_is_said_again_does_not_fill_the_budget(model: LoadedModel, single: dict[int, int]) -> None:
    run = passages_of(model, ["Ann said 7.", "Bo said 7.", "Cy said 9."], model.prompt.content.count("x - y: 7") + 1)
    grammars = run.grammars()
    next(grammars)
    text = f'{{"facts": [{states("Ann said 7.", "7")}'
    grammars.send(text)
    third = grammars.send(f"{text}, {states('Bo said 7.', '7')}")
    assert is_kept_to(model, single, third, f", {states('Cy said 9.', '9')}")


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_there_are_only_so_many_facts(model: LoadedModel, single: dict[int, int], spare: int) -> None:
    many = [f"Crate {number} is here." for number in range(MAX_STATED + spare)]
    run = passages_of(model, many, 10**6)
    grammars = run.grammars()
    last, stated = next(grammars), ""
    for passage in many[:MAX_STATED]:
        stated += f"{', ' if stated else ''}{states(passage, passage)}"
        last = grammars.send(f'{{"facts": [{stated}')
    assert is_kept_to(model, single, last, "]}")
    assert run.cut is (spare > 0)


def test_a_random_models_facts_follow_the_passages(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel], drain: Callable[..., Any]
) -> None:
    shop, method = workshop(tiny_model("llama", context=16384)), registry.find("A5")
    parameters = registry.check_parameters(method, {"budget": 5000})
    made = drain(method.make(shop.reading(TEXT), parameters))
    best = drain(ranked_passages(TEXT, None))
    assert [one.place for one in of(made).facts] == best
    assert len(best) == len(SENTENCES)
    assert (of(made).complete, of(made).stop) == (True, "stop")


@pytest.mark.parametrize(
    ("before", "times", "places", "chosen"),
    [("", 1, 1, 0), ("", 3, 3, 0), ("Listen: Ada is in. ", 2, 3, 1), ("", 256, 256, 0), ("", 257, 1, 0)],
)
def test_a_passages_own_place_is_the_one_that_is_meant(
    find: Callable[..., Any], writes: Callable[..., list[Any]], before: str, times: int, places: int, chosen: int
) -> None:
    text = before + "Ada is in.\n" * times
    # To search for it would choose the one next to the entity, or none of too many.
    writes([fact("in", "Ada is in.", entity="Listen")])
    made = find(text=text, budget=200)
    (one,) = of(made).facts
    assert (one.match, len(one.spans), one.chosen, one.confirmed) == ("exact", places, chosen, True)
    assert one.place == (len(before), len(before) + len("Ada is in."))
    assert made.outcome["ambiguous"] == (places > 1)
    (one,) = of(find(text=text, budget=200, constraint="none")).facts
    assert (one.match, one.chosen) == (("exact", 0) if times < 257 else ("unresolved", 0))


def test_what_holds_a_value_is_the_documents_own_writing(
    find: Callable[..., Any], writes: Callable[..., list[Any]]
) -> None:
    writes([fact("5", "the 5\t000 crates")])
    assert [of(find(text=text)).facts[0].confirmed for text in ("the 5 000 crates", "the 5\n000 crates")] == [
        False,
        True,
    ]
    writes([fact("4", "EUR 4"), fact("50", "fee is 50"), fact("5", "fee is 5"), fact("Term", "Term")])
    made = find(text="EUR 45,000. The fee is 50 euros. Termination.")
    assert [one.confirmed for one in of(made).facts] == [False, True, False, False]


def test_progress_counts_what_a_reader_is_given(
    workshop: Callable[..., Any], tiny_model: Callable[..., LoadedModel]
) -> None:
    shop, method = workshop(tiny_model("llama", context=16384)), registry.find("A5")
    parameters = registry.check_parameters(method, {"budget": 5000})
    seen: list[Progress] = []
    made = finish(method.make(shop.reading(TEXT), parameters), seen.append)
    *writing, last = [(step.done, step.total) for step in seen if step.stage == "method"]
    assert len({done for done, _ in writing}) == 1 + len(of(made).facts)
    assert writing == sorted(writing)
    assert (writing[0], writing[-1], last) == ((0, 5000), (made.outcome["tokens"], 5000), (5000, 5000))


def test_a_document_is_read_once_for_all_its_questions(
    workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any]
) -> None:
    shop, method = workshop(model), registry.find("A5-aware")
    parameters = registry.check_parameters(method, {"budget": 200})
    whole = len(model.prompt.prefix(TEXT, EVIDENCE_SYSTEM))
    for question, tokens in ((QUESTION, whole), ("Who keeps the key?", 0)):
        reading, alone = shop.reading(TEXT, question=question), workshop(model).reading(TEXT, question=question)
        assert drain(method.make(reading, parameters)) == drain(method.make(alone, parameters))
        assert (reading.prefill_tokens, alone.prefill_tokens) == (tokens, whole)
    assert shop.make("A6", TEXT, budget=200).account.prefill_tokens == 0


# --- What may be stated -----------------------------------------------------------------------------------------------

ATOMS = [
    *"ab15é漢字ทข한:.,;!?'\"\\_²½|/\u2019\u066b[\t\u2028\u00a0",
    "Ann ",
    "7:40 ",
    "-5 ",
    "5 000",
    "e\u0301",
    "👩\u200d🚀",
    "🇩🇪",
    "\r\n",
    "\n",
    " ",
    ". ",
]
SHORT = st.lists(st.sampled_from(ATOMS), max_size=30).map("".join)


@given(SHORT, st.data())
def test_a_value_that_can_be_written_is_one_that_its_quote_holds(
    model: LoadedModel, single: dict[int, int], text: str, data: st.DataObject
) -> None:
    quotes = [text[slice(*passage)] for passage in passages(text)]
    if not quotes:
        return
    quote = data.draw(st.sampled_from(quotes))
    start = data.draw(st.integers(0, len(quote) - 1))
    for value in {quote[start : start + length] for length in range(1, 12)} | {quote}:
        answer = json.dumps({"facts": [fact(value, quote)], "notes": [], "unknowns": []}, ensure_ascii=False)
        if follow(model.grammars.compile(evidence_grammar(quotes)), single, answer) == answer:
            assert supports(quote, value)


# --- What a model writes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("constraint", ["schema", "quotes", "passages"])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_model_that_is_kept_to_the_form_writes_facts(
    workshop: Callable[..., Any],
    tiny_model: Callable[..., LoadedModel],
    drain: Callable[..., Any],
    method: str,
    constraint: str,
    seed: int,
) -> None:
    shop = workshop(tiny_model("llama", seed=seed, context=16384))
    found = registry.find(method)
    parameters = registry.check_parameters(found, {"budget": 400, "constraint": constraint})
    made = drain(found.make(shop.reading(TEXT, question=QUESTION), parameters))
    assert made.outcome["malformed"] == 0
    assert made.outcome["tokens"] <= 400
    assert constraint == "passages" or made.outcome["generated"] <= 400
    facts = of(made).facts if method != "A6" else ()
    assert all(TEXT[start:end].strip() for one in facts for start, end in one.spans)
    if constraint != "schema":
        found = made.outcome["facts"]
        assert counts(made, "exact", "confirmed", "unsupported") == {
            "exact": found,
            "confirmed": found,
            "unsupported": 0,
        }
        assert found >= 1
        for one in facts:
            assert one.confirmed
            (quote,) = {TEXT[start:end] for start, end in one.spans}
            assert quote in SENTENCES
            assert one.value in quote


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", ["", " \r\n\t"])
def test_of_nothing_nothing_is_written(
    find: Callable[..., Any], writes: Callable[..., list[Any]], text: str, method: str
) -> None:
    asked = writes([fact("invented", "invented")])
    made = find(method, text=text)
    assert (made.outcome["facts"], made.outcome["generated"], made.outcome["complete"], asked) == (0, 0, True, [])


UNQUOTABLE = {"a giant word": "x" * 250, "a giant number": "7" * 250, "a mark": "\ufeff", "zeros": "\x00\x00"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("constraint", ["passages", "quotes"])
@pytest.mark.parametrize("name", UNQUOTABLE)
def test_what_cannot_be_quoted_is_not_sent_as_evidence_of_nothing(
    find: Callable[..., Any],
    writes: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    constraint: str,
    name: str,
) -> None:
    monkeypatch.setattr(LoadedModel, "read", lambda *_: pytest.fail("the model read"))
    asked, text = writes([]), UNQUOTABLE[name]
    with pytest.raises(
        ModelError, match=f"^document: nothing in its {len(text)} characters can be quoted: a passage is"
    ):
        find(method, text=text, constraint=constraint)
    assert asked == []


@pytest.mark.parametrize("constraint", ["schema", "none"])
def test_what_is_free_to_quote_anything_is_asked_about_any_text(
    find: Callable[..., Any], writes: Callable[..., list[Any]], constraint: str
) -> None:
    writes([fact("x" * 250, "x" * 250)])
    made = find(text=UNQUOTABLE["a giant word"], constraint=constraint)
    assert counts(made, "confirmed", "left_out") == {"confirmed": 1, "left_out": 0}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("constraint", "expected"), [("passages", 250), ("quotes", 250), ("schema", 0), ("none", 0)])
def test_what_no_passage_holds_is_counted(
    find: Callable[..., Any], writes: Callable[..., list[Any]], method: str, constraint: str, expected: int
) -> None:
    writes([fact("bay C4", "the key of bay C4")])
    assert find(method, constraint=constraint).outcome["left_out"] == 0
    long = f"{TEXT}\n {'x' * 250}\n\ufeff\n The end! \x00 \u00e9 \n"
    assert find(method, text=long, constraint=constraint).outcome["left_out"] == expected


@pytest.mark.parametrize("method", METHODS)
def test_from_material_to_artifact_and_back(
    workshop: Callable[..., Any], model: LoadedModel, writes: Callable[..., list[Any]], method: str
) -> None:
    writes([fact("bay C4", "the key of bay C4")])
    shop = workshop(model)
    artifact = shop.make(method, TEXT, budget=200)
    stored = artifact.stored
    form = "references" if method == "A6" else "evidence"
    assert (stored.manifest.form, [section.name for section in stored.manifest.sections]) == (
        form,
        ["prompt.system", f"document.{form}"],
    )
    assert stored.manifest.method.consume == ("look_up" if method == "A6" else "prefill")
    assert stored.manifest.method.params["outcome.confirmed"] == 1
    assert stored.manifest.method.params["constraint"] == "passages"
    assert artifact.account.prefill_tokens == len(model.prompt.prefix(TEXT, EVIDENCE_SYSTEM))
    data = stored.sections.read(f"document.{form}")
    read = evidence.references_from_bytes if method == "A6" else evidence.evidence_from_bytes
    start = TEXT.index("the key of bay C4")
    place = (start, start + len("the key of bay C4"))
    facts = (Fact("Nils", "keeps", "bay C4", "exact", (place,), 0, supported=True),)
    expected = (
        References((Reference("Nils", "keeps", *place),), complete=True, stop="stop")
        if method == "A6"
        else Evidence(facts, (), (), complete=True, stop="stop")
    )
    assert read("document", data, len(TEXT)) == expected
