"""A2: a beginning and an end of the document, never more than the budget, never half a character."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core import container
from kvferry.core.errors import InvalidRequestError
from kvferry.core.progress import Progress
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.text.assembly import Piece
from kvferry.sender.text.counted import CountedText, within
from kvferry.sender.text.head_tail import MARK, head_and_tail

TEXTS = {
    "emoji": "Ana 👩🏽\u200d🚀 und Bo 👨\u200d👩\u200d👧\u200d👦: 🇩🇰🇸🇪 7\ufe0f\u20e3 ❤\ufe0f\u200d🔥!",
    "chinese": "冷藏库的温度应保持在零下十八度，误差不得超过两度；电话是6203-4471。",
    "combining": "Ca\u0308fe\u0301 Z\u0337\u0347\u0308a\u0338\u0324\u035d l\u0334 हिन्दी में क्षि 한각",
    "arabic": "تبقى حرارة غرفة التبريد عند ١٨ درجة تحت الصفر.",
    "crlf": "one\r\n\r\ntwo\r\nthree\r\n",
    "ascii": "The access code of the north warehouse is 4417. The south warehouse opens at 7:30.",
    "control strings": "a <|im_end|> b <think> c <|im_start|>system",
    "replacement": "it was \ufffd already \ufffd there",
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def length(model: LoadedModel) -> Callable[[str], int]:
    """Return a function: how many tokens a text adds to the receiver's prompt."""
    empty = len(model.prompt.prefix("", kind=container.ENDS))
    return lambda text: len(model.prompt.prefix(text, kind=container.ENDS)) - empty


@pytest.mark.parametrize("name", TEXTS)
def test_every_budget(model: LoadedModel, length: Callable[[str], int], name: str) -> None:
    text = TEXTS[name]
    document = CountedText(model.prompt.content, text)
    edges = {0, *(match.end() for match in regex.finditer(r"\X", text))}
    whole = length(text)
    for budget in range(whole + 2):
        made = head_and_tail(model.prompt.content, document, budget)
        assert length(made.text) <= budget
        assert (made.text == text) is (budget >= whole)
        assert made.text.count("\ufffd") <= text.count("\ufffd")
        if made.text == text:
            continue
        head, mark, tail = made.text.partition(MARK)
        if not mark and not text.startswith(head):
            # The first character alone is more than its half of the budget.
            head, tail = "", head
        assert text.startswith(head)
        assert text.endswith(tail)
        assert {len(head), len(text) - len(tail)} <= edges
        expected = [(0, 0, len(head))] * bool(head)
        if tail:
            expected.append((len(head) + len(mark), len(text) - len(tail), len(text)))
        assert [tuple(span) for span in made.spans] == expected


@pytest.mark.parametrize("name", ["ascii", "control strings"])
def test_the_budget_is_used(model: LoadedModel, length: Callable[[str], int], name: str) -> None:
    # Every character here is a token at most, so nothing is lost at the cuts but what encoding anew may cost.
    document = CountedText(model.prompt.content, TEXTS[name])
    for budget in range(document.tokens):
        assert budget - length(head_and_tail(model.prompt.content, document, budget).text) <= 2


def test_halves_are_equal_and_an_odd_token_goes_to_the_head(model: LoadedModel, length: Callable[[str], int]) -> None:
    # One token a character, whatever stands beside it.
    text = "".join(chr(code) for code in range(0x21, 0x7F) if not chr(code).isalpha()) * 3
    document = CountedText(model.prompt.content, text)
    assert document.tokens == len(text)
    mark = length(MARK)
    for budget in (mark + 2, mark + 3, mark + 10, mark + 11):
        head, found, tail = head_and_tail(model.prompt.content, document, budget).text.partition(MARK)
        assert found
        assert (len(head), len(tail)) == (-(-(budget - mark) // 2), (budget - mark) // 2)
    for budget in range(mark + 2):
        made = head_and_tail(model.prompt.content, document, budget)
        assert made.text == text[:budget]


def test_the_middle_is_marked_so_that_halves_never_make_a_new_word(model: LoadedModel) -> None:
    text = "44" + " and so on" * 40 + " 17"
    document = CountedText(model.prompt.content, text)
    for budget in range(document.tokens):
        made = head_and_tail(model.prompt.content, document, budget).text
        assert "4417" not in made
        assert made in text or MARK in made


def test_a_fraction_is_of_the_documents_tokens(workshop: Callable[..., Any], model: LoadedModel) -> None:
    text = TEXTS["ascii"] * 5
    tokens = model.prompt.content.count(text)
    for fraction in (0.1, 0.5, 1.0):
        params = workshop(model).make("A2", text, budget=fraction).stored.manifest.method.params
        assert params["budget"] == fraction
        assert fraction * tokens - 3 <= params["outcome.tokens"] <= fraction * tokens


HEAVY = {
    "ships": "🚢 the ferry leaves at seven in the evening 🚢",
    "planes": "𐍈 is a letter of Gothic, and so is this one: 𐍈",
    "flags": "🇩🇰 Denmark is a country in the north of Europe, and so is 🇸🇪",
    "family": "👨\u200d👩\u200d👧\u200d👦 family",
    "spaced": "\n \u3000\t" * 9 + TEXTS["chinese"] + "\u3000\n \t" * 9,
}


@pytest.mark.parametrize("name", [*TEXTS, *HEAVY])
def test_a_larger_budget_is_never_refused_where_a_smaller_one_is_not(
    workshop: Callable[..., Any], model: LoadedModel, name: str
) -> None:
    text = (TEXTS | HEAVY)[name]
    document = CountedText(model.prompt.content, text)
    sent = [head_and_tail(model.prompt.content, document, budget).text for budget in range(document.tokens + 1)]
    least = next(budget for budget, made in enumerate(sent) if made)
    assert all(made.replace(MARK, "").strip() for made in sent[least:])
    for budget in range(1, least):
        with pytest.raises(InvalidRequestError, match=f"^budget: {budget} tokens do not suffice") as caught:
            workshop(model).make("A2", text, budget=budget)
        assert caught.value.fields == {"field": "budget", "value": budget, "minimum": least}
    assert workshop(model).make("A2", text, budget=least).stored.manifest.method.params["outcome.tokens"] <= least


@pytest.mark.parametrize("name", ["ships", "planes", "flags"])
def test_the_beginning_has_everything_where_mark_and_an_end_do_not_fit(
    model: LoadedModel, length: Callable[[str], int], name: str
) -> None:
    text = HEAVY[name]
    document = CountedText(model.prompt.content, text)
    edges = [found.end() for found in regex.finditer(r"\X", text)]
    alone = 0
    for budget in range(document.tokens):
        made = head_and_tail(model.prompt.content, document, budget).text
        if MARK in made:
            break
        longest = max((text[:end] for end in edges if length(text[:end]) <= budget), key=len, default="")
        # Within the whole text tokens may end elsewhere than in a part of it.
        assert longest.startswith(made)
        assert length(longest) - length(made) <= 2
        alone += bool(made)
    assert alone > 3
    # Once both are there, more tokens do not take one away.
    for more in range(budget, document.tokens):
        assert MARK in head_and_tail(model.prompt.content, document, more).text


def test_where_nothing_of_the_beginning_fits_the_end_has_everything(model: LoadedModel) -> None:
    text = HEAVY["family"]
    document = CountedText(model.prompt.content, text)
    heavy = model.prompt.content.count(text.removesuffix(" family"))
    end = model.prompt.content.count(" family")
    for budget in range(end, heavy):
        assert head_and_tail(model.prompt.content, document, budget).text == " family"
    assert head_and_tail(model.prompt.content, document, heavy).text == text.removesuffix(" family")


def test_where_every_cut_of_the_budget_takes_more_tokens_anew_the_smallest_piece_is_sent() -> None:
    text = "abcdefghij"
    counter: Any = SimpleNamespace(
        # Twice what a part took within the text.
        count=lambda part: 2 * len(part),
        offsets=lambda whole: [(at, at + 1) for at in range(len(whole))],
    )
    document = CountedText(counter, text)
    sent = [head_and_tail(counter, document, budget).text for budget in range(11)]
    assert sent == ["", "", *["a"] * 8, text]


def test_nothing_of_nothing_is_sent(workshop: Callable[..., Any], model: LoadedModel) -> None:
    assert workshop(model).make("A2", " \n\u3000", budget=1).stored


@pytest.mark.parametrize("budget", [0, -1, 1.5, 0.0, "200KB", None, True])
def test_a_budget_that_is_none(workshop: Callable[..., Any], model: LoadedModel, budget: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^budget: "):
        workshop(model).make("A2", "text", budget=budget)


def test_the_artifact_holds_text_and_spans(workshop: Callable[..., Any], model: LoadedModel) -> None:
    text = TEXTS["emoji"] * 3
    stored = workshop(model).make("A2", text, budget=40).stored
    assert [section.name for section in stored.manifest.sections] == [
        "prompt.system",
        "document.ends",
        "document.spans",
    ]
    sent = bytes(stored.sections.read("document.ends")).decode()
    numbers = memoryview(bytes(stored.sections.read("document.spans"))).cast("I").tolist()
    (at, start, end), (later, resumes, stops) = numbers[:3], numbers[3:]
    assert (at, start, stops) == (0, 0, len(text))
    assert sent == text[:end] + MARK + text[resumes:]
    assert later == end + len(MARK)


def test_progress(workshop: Callable[..., Any], model: LoadedModel) -> None:
    method = registry.find("head-tail")
    steps = method.make(workshop(model).reading("text"), registry.check_parameters(method, {}))
    assert list(steps) == [Progress("method", 0, 1), Progress("method", 1, 1)]


@pytest.mark.parametrize("name", TEXTS)
def test_a_beginning_within_a_budget(model: LoadedModel, length: Callable[[str], int], name: str) -> None:
    text = TEXTS[name]
    edges = {0, *(match.end() for match in regex.finditer(r"\X", text))}
    lengths = []
    for budget in range(length(text) + 1):
        kept = within(model.prompt.content, text, budget)
        assert text.startswith(kept)
        assert len(kept) in edges
        assert length(kept) <= budget
        lengths.append(len(kept))
    assert lengths[0] == 0
    assert lengths[-1] == len(text)


@pytest.mark.parametrize("name", ["ascii", "control strings"])
def test_a_beginning_uses_its_budget(model: LoadedModel, length: Callable[[str], int], name: str) -> None:
    for budget in range(length(TEXTS[name])):
        assert budget - length(within(model.prompt.content, TEXTS[name], budget)) <= 2


def test_of_a_character_that_a_token_shares_nothing_is_kept(model: LoadedModel) -> None:
    # Three tokens a sign, one byte each.
    counted = CountedText(model.prompt.content, "門x門")
    assert [counted.head(tokens) for tokens in range(8)] == [0, 0, 0, 1, 2, 2, 2, 3]
    assert [counted.tail(tokens) for tokens in range(8)] == [3, 3, 3, 2, 1, 1, 1, 0]


RANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted).map(tuple), min_size=1, max_size=8)


@given(RANGES)
@example([(0, 1), (1, 3), (0, 1), (3, 4)])
@example([(0, 1), (1, 4), (1, 2), (2, 5)])
def test_ranges_that_step_back_give_cuts_and_costs_that_do_not(ranges: list[tuple[int, int]]) -> None:
    counter: Any = SimpleNamespace(offsets=lambda _: ranges)
    counted, tokens = CountedText(counter, "abcdefghij"), len(ranges)
    heads = [counted.head(kept) for kept in range(tokens + 1)]
    tails = [counted.tail(tokens - kept) for kept in range(tokens + 1)]
    assert (heads, tails) == (sorted(heads), sorted(tails))
    assert all(head <= tail for head, tail in zip(heads, tails, strict=True))
    costs = counted.costs([Piece(at, at + 1) for at in range(10)])
    assert min(costs) >= 0
    # One that begins before a token that precedes it counts where that one begins.
    assert costs == [sum(max(ranges[: at + 1])[0] == place for at in range(tokens)) for place in range(10)]
