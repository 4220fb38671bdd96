"""Cuts between the characters that a reader sees."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core import graphemes

# As UAX #29 and the Unicode test file for it have them.
CLUSTERS = [
    ["a", "b"],
    ["\r\n", "a"],
    ["\n", "\r", "\u0301"],
    ["e\u0301", "x"],
    ["a\u0308\u0323", "\u0020\u0308"],
    ["👩\u200d🚀", "👨\u200d👩\u200d👧\u200d👦"],
    ["🇩🇰", "🇸🇪", "🇳"],
    ["a", "🇩🇰", "e\u0301", "🇸🇪"],
    ["👍🏽", "👍", "❤\ufe0f\u200d🔥"],
    ["한", "각", "ᄀ\u1161\u11a8"],
    ["क्षि", "न"],
    ["\u0600\u0661", "x"],
    ["门", "开"],
    ["7\ufe0f\u20e3", "1\ufe0f\u20e3"],
]
ODD = st.sampled_from(
    "ab .\r\n\u0301\u200d👩🚀🇩🇪각ᄀ\u1161\u11a8क\u094dि\u0600\u200b\x00门\ufe0f❤🏽가\u200cക\u0d4d\u0d4e‼",
)
texts = st.lists(ODD, max_size=30).map("".join)


@pytest.mark.parametrize("clusters", CLUSTERS, ids=range(len(CLUSTERS)))
def test_known_clusters(clusters: list[str]) -> None:
    text = "".join(clusters)
    edges = [0]
    for cluster in clusters:
        edges.append(edges[-1] + len(cluster))
    for at in range(len(text) + 1):
        assert graphemes.floor(text, at) == max(edge for edge in edges if edge <= at)
        assert graphemes.ceil(text, at) == min(edge for edge in edges if edge >= at)


@given(texts, st.data())
def test_a_search_that_begins_in_the_middle_finds_what_a_scan_finds(text: str, data: st.DataObject) -> None:
    edges = [0, *(match.end() for match in regex.finditer(r"\X", text))]
    at = data.draw(st.integers(0, len(text)))
    since = data.draw(st.sampled_from([edge for edge in edges if edge <= at]))
    assert graphemes.floor(text, at, since) == max(edge for edge in edges if edge <= at)
    assert graphemes.ceil(text, at, since) == min(edge for edge in edges if edge >= at)


@given(texts)
@example("🇩🇪\u0d4dക")
@example("가\u11a8")
@example("각\u11a8각\u1161")
def test_all_boundaries_are_those_of_a_scan(text: str) -> None:
    found = [at for at, edge in enumerate(graphemes.edges(text)) if edge]
    assert found == [0, *(match.end() for match in regex.finditer(r"\X", text))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: "🇩🇰" * 50_000,
        lambda: "🇩🇰" * 50_000 + "e\u0301",
        lambda: "a" + "\u0301" * 100_000,
        lambda: "👩\u200d" * 50_000,
        lambda: "각" * 100_000,
        lambda: "\r\n" * 50_000,
        lambda: "e\u0301" * 50_000,
    ],
    ids=["flags", "flags and a mark", "marks", "joiners", "syllables", "line ends", "decomposed"],
)
def test_long_runs_take_no_time(make: Callable[[], str]) -> None:
    text = make()
    start = time.process_time()
    for at in (len(text) // 2 + 1, len(text) - 1):
        assert graphemes.floor(text, at) <= at <= graphemes.ceil(text, at)
    assert graphemes.edges(text)[-1]
    assert time.process_time() - start < 5


@pytest.mark.parametrize("unit", ["e\u0301", "7\ufe0f\u20e3", "。🏽", "‼🏽", "\u0600。🏽", "한\u0301", "\r\u0301"])
def test_behind_a_mark_no_search_goes_back_to_the_beginning(unit: str) -> None:
    text = unit * 20_000
    start = time.process_time()
    for at in range(len(text) - 1000, len(text)):
        assert graphemes.floor(text, at) > at - len(unit)
    assert time.process_time() - start < 1
