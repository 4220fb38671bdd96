"""What is looked up: which references, how far around them, nothing twice, and what becomes of what came."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.evidence import Reference
from kvferry.receiver import lookups
from kvferry.receiver.lookups import Place, Wanted

LENGTH = 10_000
QUESTION = "Which code opens the gate?"


def at(start: int, end: int, entity: str = "gate", attribute: str = "code") -> Reference:
    return Reference(entity, attribute, start, end)


def budgeted(document: str, wanted: Wanted) -> list[str]:
    """Return what a sender gives for 2,000 bytes: passage after passage, up to the first that is too much."""
    given_texts: list[str] = []
    for start, end in wanted.places:
        if sum(len(text.encode()) for text in [*given_texts, document[start:end]]) > 2000:
            break
        given_texts.append(document[start:end])
    return given_texts


# Which references


def test_seven_that_match_are_six() -> None:
    wanted = lookups.choose([at(1000 * n, 1000 * n + 5) for n in range(7)], QUESTION, LENGTH)
    assert [reference.start for reference in wanted.references] == [0, 1000, 2000, 3000, 4000, 5000]
    assert len(wanted.places) == 6


def test_the_better_match_comes_first_and_equals_in_the_order_of_the_message() -> None:
    references = [
        at(100, 110, "ferry", "code"),
        at(200, 210, "warehouse", "keys"),
        at(300, 310, "gate", "code"),
        at(400, 410, "ferry", "code"),
    ]
    wanted = lookups.choose(references, QUESTION, LENGTH)
    assert [reference.start for reference in wanted.references] == [300, 100, 400]


def test_equals_are_equal_however_their_sums_are_rounded() -> None:
    # Five terms of the same weights, summed in two orders, differ in the last bit.
    names = ("epsilon gamma delta beta", "alpha beta epsilon gamma", "zeta")
    references = [at(10 * n, 10 * n + 5, name, "") for n, name in enumerate(names)]
    wanted = lookups.choose(references, "delta gamma epsilon zeta alpha beta", LENGTH)
    assert [reference.start for reference in wanted.references] == [0, 10, 20]


def test_a_match_of_the_only_reference_counts() -> None:
    assert lookups.choose([at(5, 9)], QUESTION, 20).places == ((0, 20),)


@pytest.mark.parametrize(
    ("references", "question"),
    [
        ([], QUESTION),
        ([at(5, 9, "ferry", "colour")], QUESTION),
        ([at(5, 9)], "Wer?"),
        ([at(5, 9)], "?!"),
        ([at(5, 9, "", "")], QUESTION),
        ([at(5, 9, " ", "\n")] * 3, QUESTION),
    ],
    ids=["none", "another word", "another language", "no word", "empty names", "blank names"],
)
def test_no_hit_fetches_nothing(references: list[Reference], question: str) -> None:
    wanted = lookups.choose(references, question, LENGTH)
    assert (wanted.references, wanted.windows, wanted.places, wanted.found(0)) == ((), (), (), 0)
    assert lookups.put_together(wanted, [], LENGTH) == lookups.Excerpts("", ())


def test_a_place_that_is_named_twice_is_followed_once() -> None:
    references = [at(100, 110), at(100, 110, "the gate", "its code"), at(100, 110), at(5000, 5010)]
    wanted = lookups.choose(references, QUESTION, LENGTH)
    assert sorted(reference.start for reference in wanted.references) == [100, 5000]
    assert sorted(wanted.places) == [(60, 270), (4960, 5170)]


def test_two_names_of_one_place_leave_room_for_six_places() -> None:
    references = [at(1000 * (n // 2), 1000 * (n // 2) + 5) for n in range(16)]
    assert len(lookups.choose(references, QUESTION, LENGTH).references) == 6


# How far


@pytest.mark.parametrize(
    ("reference", "length", "expected"),
    [
        (at(100, 110), LENGTH, (60, 270)),
        (at(0, 3), LENGTH, (0, 163)),
        (at(39, 45), LENGTH, (0, 205)),
        (at(9900, 9950), LENGTH, (9860, LENGTH)),
        (at(LENGTH - 1, LENGTH), LENGTH, (9959, LENGTH)),
        (at(0, 7), 7, (0, 7)),
        # 500 code points are the most, and the end gives way.
        (at(1000, 1300), LENGTH, (960, 1460)),
        (at(1000, 1299), LENGTH, (960, 1459)),
        (at(1000, 1301), LENGTH, (960, 1460)),
        (at(10, LENGTH), LENGTH, (0, 500)),
    ],
)
def test_a_window_is_40_before_and_160_behind_within_the_document(
    reference: Reference, length: int, expected: tuple[int, int]
) -> None:
    assert lookups.choose([reference], QUESTION, length).places == (expected,)


def test_a_worse_one_fetches_only_what_a_better_one_leaves() -> None:
    better, worse = at(1000, 1010), at(1050, 1060, "gate", "lamp")
    wanted = lookups.choose([worse, better], QUESTION, LENGTH)
    assert wanted.references == (better, worse)
    assert wanted.windows == (((960, 1170),), ((1170, 1220),))


def test_a_window_around_a_better_one_is_fetched_on_either_side() -> None:
    better, worse = at(1100, 1110), at(1040, 1240, "gate", "lamp")
    wanted = lookups.choose([worse, better], QUESTION, LENGTH)
    assert wanted.windows == (((1060, 1270),), ((1000, 1060), (1270, 1400)))
    assert [wanted.found(passages) for passages in range(4)] == [0, 1, 1, 2]


def test_a_window_inside_a_better_one_costs_nothing_and_is_found_with_it() -> None:
    better, worse = at(1000, 1100), at(1010, 1012, "gate", "lamp")
    wanted = lookups.choose([worse, better], QUESTION, LENGTH)
    assert wanted.windows == (((960, 1260),), ())
    assert [wanted.found(passages) for passages in range(2)] == [0, 2]


# The budget


@pytest.mark.parametrize("character", ["a", "é", "門", "🚢"])
def test_text_of_any_width_stays_within_2000_bytes(character: str) -> None:
    document = character * LENGTH
    wanted = lookups.choose([at(1000 * n, 1000 * n + 300) for n in range(6)], QUESTION, LENGTH)
    texts = budgeted(document, wanted)
    sizes = {"a": 4, "é": 2, "門": 1, "🚢": 1}
    assert len(texts) == wanted.found(len(texts)) == sizes[character]
    # One window always fits, and exactly: 500 of the widest characters there are.
    assert len(character.encode()) * lookups.MAX_WINDOW <= lookups.MAX_BYTES == 2000


references_of = st.lists(
    st.builds(
        lambda start, length, name: at(start, start + length, name, "code"),
        st.integers(0, 900),
        st.integers(1, 100),
        st.sampled_from(["gate", "north gate", "ferry", "ferry gate", "-"]),
    ),
    max_size=12,
)


def window(reference: Reference, length: int) -> set[int]:
    """The oracle: a window as the set of its code points."""
    points = [point for point in range(length) if reference.start - 40 <= point < reference.end + 160]
    return set(points[:500])


@given(references_of, st.sampled_from([QUESTION, "The ferry?", "north gate code", "nothing"]), st.integers(1000, 1200))
def test_every_code_point_of_the_chosen_windows_comes_once(
    references: list[Reference], question: str, length: int
) -> None:
    wanted = lookups.choose(references, question, length)
    assert len(wanted.references) <= 6
    assert len({(item.start, item.end) for item in wanted.references}) == len(wanted.references)
    taken: set[int] = set()
    for reference, own in zip(wanted.references, wanted.windows, strict=True):
        points = [point for start, end in own for point in range(start, end)]
        assert set(points) == window(reference, length) - taken
        assert len(points) == len(set(points))
        taken |= set(points)
    words = set(question.lower().replace("?", "").split())
    named = [item for item in references if words & set(f"{item.entity} code".split())]
    assert len(wanted.references) == min(len({(item.start, item.end) for item in named}), 6)


# What came of it


def fetched(document: str, *references: Reference) -> lookups.Excerpts:
    wanted = lookups.choose(references, QUESTION, len(document))
    return lookups.put_together(wanted, budgeted(document, wanted), len(document))


@given(references_of, st.data())
def test_what_came_is_put_in_the_documents_order_and_says_where_it_stands(
    references: list[Reference], data: st.DataObject
) -> None:
    words = data.draw(
        st.lists(st.sampled_from(["ab", "a", "45,000", "7", "\n", "門", "🚢", "é"]), min_size=1, max_size=9)
    )
    document = (" ".join([*words, ""]) * 1000)[:1000]
    wanted = lookups.choose(references, QUESTION, len(document))
    texts = budgeted(document, wanted)
    excerpts = lookups.put_together(wanted, texts, len(document))
    came = {point for start, end in wanted.places[: len(texts)] for point in range(start, end)}
    kept = {point for _, start, end in excerpts.spans for point in range(start, end)}
    assert kept <= came
    assert excerpts.text == "\n".join(document[start:end] for _, start, end in excerpts.spans)
    assert list(excerpts.spans) == sorted(excerpts.spans)
    for place, start, end in excerpts.spans:
        assert excerpts.text[place : place + end - start] == document[start:end] != ""
    whole = [item for item in references if set(range(item.start, item.end)) <= came]
    held = {point for item in whole if item in wanted.references for point in range(item.start, item.end)}
    assert held <= kept
    edges = {0, len(document)} | {edge for item in whole for edge in (item.start, item.end)}
    for _, start, end in excerpts.spans:
        for at in (start, end):
            # A word, or a number, is there as a whole or not at all, but for what a reference cuts itself.
            assert at in edges or not (document[at - 1].isascii() and document[at - 1 : at + 1].isalnum())
    # Nothing is left out but at the ends of what came.
    for point in came - kept:
        assert any(came - kept >= set(_until_out(point, way, came)) for way in (-1, 1))


def _until_out(point: int, way: int, came: set[int]) -> list[int]:
    """Return the points of a passage from one of them to one of its ends."""
    found = []
    while point in came:
        found.append(point)
        point += way
    return found


# Punctuation does not go on at the other side of a cut.
@pytest.mark.parametrize(
    ("places", "texts", "expected", "spans"),
    [
        ([Place(0, 2), Place(2, 4)], ["「」", "、。"], "「」、。", [(0, 0, 4)]),
        ([Place(2, 4), Place(0, 2)], ["、。", "「」"], "「」、。", [(0, 0, 4)]),
        ([Place(5, 7), Place(0, 2)], ["〉【", "「」"], "「」\n〉【", [(0, 0, 2), (3, 5, 7)]),
        ([Place(5, 7), Place(0, 2)], ["〉【"], "〉【", [(0, 5, 7)]),
        (
            [Place(4, 5), Place(0, 2), Place(2, 4), Place(9, 10)],
            ["〈", "「」", "、。", "】"],
            "「」、。〈\n】",
            [(0, 0, 5), (6, 9, 10)],
        ),
    ],
)
def test_passages_that_touch_are_one(
    places: Sequence[Place], texts: list[str], expected: str, spans: list[tuple[int, int, int]]
) -> None:
    found = lookups.put_together(Wanted((), tuple(places)), texts, 20)
    assert (found.text, [tuple(span) for span in found.spans]) == (expected, spans)


# Each 200 code points long, so that the windows of what stands between them end in the middle of the numbers.
@pytest.mark.parametrize("back", range(8))
def test_a_number_that_a_window_cuts_is_not_read_as_another(back: int) -> None:
    before, after = "Of 45,000 euros " + "門" * (24 + back), "門" * (140 + back) + " the fee is EUR 45,000 "
    document = f"{'x ' * 50}{before}GATE{after}{'x ' * 50}"
    start = document.index("GATE")
    found = fetched(document, at(start, start + 4))
    (span,) = found.spans
    assert found.text == document[span.start : span.end]
    # A window reaches 40 before and 160 behind.
    assert span.start >= start - 40
    assert span.end <= start + 164
    numbers = re.findall(r"\d[\d,]*", found.text)
    assert set(numbers) <= {"45,000"}
    assert "GATE" in found.text


def test_the_ends_of_the_document_are_no_cuts() -> None:
    document = "45 gates, and a fee of EUR 45"
    found = fetched(document, at(3, 8))
    assert (found.text, [tuple(span) for span in found.spans]) == (document, [(0, 0, len(document))])


def test_what_a_reference_points_to_is_read_to_the_letter() -> None:
    # It points into a number, and the window of 500 ends with it.
    document = "x " * 100 + "y" * 459 + "7" + "000 " + "x " * 100
    (span,) = fetched(document, at(200, 660)).spans
    assert (span.start, span.end) == (161, 660)
    # One that the window itself cuts is cut like anything else.
    found = fetched("x " * 100 + "門" * 455 + "45,000,000 " + "x " * 100, at(200, 666))
    assert found.text.endswith("門")
    assert sum(char == "門" for char in found.text) == 455


def test_a_passage_that_is_one_cut_word_is_left_out() -> None:
    wanted = Wanted((), (Place(100, 105), Place(200, 206)))
    found = lookups.put_together(wanted, ["north", "the 門 "], 1000)
    assert (found.text, [tuple(span) for span in found.spans]) == (" 門 ", [(0, 203, 206)])


def test_a_reference_that_a_better_ones_passage_covers_is_found_with_it() -> None:
    # The second window does not come, and the third lies within the first.
    wanted = lookups.choose([at(1000, 1200), at(3000, 3300), at(1050, 1060)], QUESTION, LENGTH)
    assert [len(window) for window in wanted.windows] == [1, 1, 0]
    assert [wanted.found(passages) for passages in range(3)] == [0, 2, 3]
