"""What a model wrote, read as facts: all that was complete, as it was written, and nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import limits
from kvferry.sender.text.facts import RawFact, Written, read_facts

NOTHING = Written((), (), (), complete=False, dropped=0)
FACTS = (
    RawFact("gate {7}", "state", "shut", 'a [5" pipe], "so" \\ {and'),
    RawFact("Zoë", "name", "郑和 👩\u200d🚀", "tab\tline\nnul\x00"),
    RawFact("deal", "worth", "50", "The deal is worth 50"),
)
NOTES, UNKNOWNS = ("a note ] }", "Hafen – 港"), ("who?",)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
facts = st.builds(RawFact, texts, texts, texts, texts)


def entry(fact: RawFact, *, ascii_only: bool = False) -> str:
    return json.dumps(vars(fact), ensure_ascii=ascii_only)


class Message:
    """A message and where each of its parts is complete."""

    def __init__(self, found: Any, notes: Any, unknowns: Any, *, ascii_only: bool = False, gap: str = " ") -> None:
        self.text = "{" + gap
        self.ends: dict[str, list[tuple[int, Any]]] = {}
        lists = {"notes": notes, "facts": found, "unknowns": unknowns}
        for number, (key, parts) in enumerate(lists.items()):
            self.text += f'{"," if number else ""}{gap}"{key}":{gap}['
            self.ends[key] = []
            for index, part in enumerate(parts):
                spelled = json.dumps(vars(part) if key == "facts" else part, ensure_ascii=ascii_only)
                self.text += f"{gap},{gap}" * (index > 0) + spelled
                self.ends[key].append((len(self.text), part))
            self.text += gap + "]"
        self.text += gap + "}"

    def until(self, at: int, *, complete: bool = False) -> Written:
        """Return what is complete in text[:at]."""
        parts = {key: tuple(part for end, part in ends if end <= at) for key, ends in self.ends.items()}
        return Written(parts["facts"], parts["notes"], parts["unknowns"], complete=complete, dropped=0)


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("gap", ["", " \r\n\t"])
def test_a_message_cut_at_every_character(gap: str, *, ascii_only: bool) -> None:
    message = Message(FACTS, NOTES, UNKNOWNS, ascii_only=ascii_only, gap=gap)
    for prose in ("", "Here it is {as asked}:\n```json\n"):
        for at in range(len(message.text)):
            for cut in (True, False):
                assert read_facts(prose + message.text[:at], cut=cut) == message.until(at)
        assert read_facts(prose + message.text, cut=True) == message.until(len(message.text))
        whole = Written(FACTS, NOTES, UNKNOWNS, complete=True, dropped=0)
        assert read_facts(prose + message.text, cut=False) == whole
        assert read_facts(f"{prose}{message.text}\n```\nThat is {{all}} [1].", cut=False) == whole


def test_a_message_cut_at_every_byte() -> None:
    message = Message(FACTS, NOTES, UNKNOWNS)
    data = message.text.encode()
    for at in range(len(data)):
        there = len(data[:at].decode(errors="ignore"))
        for errors in ("replace", "ignore"):
            assert read_facts(data[:at].decode(errors=errors), cut=True) == message.until(there)


@given(st.lists(facts, max_size=4), st.lists(texts, max_size=3), st.data())
def test_any_message_cut_or_broken_anywhere(found: list[RawFact], notes: list[str], data: st.DataObject) -> None:
    message = Message(found, notes, ["u"], ascii_only=data.draw(st.booleans()))
    assert read_facts(message.text, cut=False) == message.until(len(message.text), complete=True)
    at = data.draw(st.integers(0, len(message.text) - 1))
    expected = message.until(at)
    assert read_facts(message.text[:at], cut=True) == expected
    # A raw NUL is valid nowhere in JSON; what stands behind it no longer counts.
    assert at == 0 or read_facts(message.text[:at] + "\x00" + message.text[at:], cut=False) == expected


PLAIN = RawFact("a", "b", "c", "d")
# Every oddity of an entry, and whether the fact is still one.
ODD = [
    (r'{"entity":"a","attribute":"b","value":"c","quote":"d"}', PLAIN),
    (r'{"quote":"d","value":"c","x":{"y":[1,{"value":"z"}]},"attribute":"b","entity":"a"}', PLAIN),
    (r'{"entity":"a","attribute":"b","value":1.50,"quote":"d"}', RawFact("a", "b", "1.50", "d")),
    (r'{"entity":"a","attribute":"b","value":0,"quote":"d"}', RawFact("a", "b", "0", "d")),
    (r'{"entity":"a","attribute":"b","value":-1E+05,"quote":"d"}', RawFact("a", "b", "-1E+05", "d")),
    (r'{"entity":"a","attribute":"b","value":false ,"quote":"d"}', RawFact("a", "b", "false", "d")),
    (r'{"\u0065ntity":"a","attribute":"b","value":"c ","quote":"\ud83d\ude80\u0000"}', RawFact("a", "b", "c ", "🚀\0")),
    (r'{"entity":"a","attribute":"b","value":12345678901234567890123,"quote":"d"}',
     RawFact("a", "b", "12345678901234567890123", "d")),
    # A string that no encoding has is no business of a fact that does not use it.
    (r'{"entity":"a","attribute":"b","value":"c","quote":"d","x":null,"y":"\ud83d"}', PLAIN),
    (r'{"entity":"a","attribute":"b","value":"c"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","Quote":"d"}', None),
    (r'{"entity":" ","attribute":"b","value":"c","quote":"d"}', None),
    (r'{"entity":"a","attribute":"","value":"c","quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":"\n","quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","quote":"\u3000"}', None),
    (r'{"entity":"a","attribute":"b","value":null,"quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":{"n":5},"quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":["c"],"quote":"d"}', None),
    (r'{"entity":5,"attribute":"b","value":"c","quote":"d"}', None),
    (r'{"entity":"a","attribute":true,"value":"c","quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","quote":1}', None),
    (r'{"entity":"a","attribute":"b","value":NaN,"quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":-Infinity,"quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","quote":"d","x":[[Infinity],1]}', None),
    (r'{"entity":"a","attribute":"b","value":"\ud83d","quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","quote":"\ude80\ud83d"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","value":"c","quote":"d"}', None),
    (r'{"entity":"a","attribute":"b","value":"c","quote":"d","x":1,"x":1}', None),
    ("{}", None),
    ('"entity"', None),
    ("5", None),
    ("null", None),
    ("NaN", None),
    ('[{"entity":"a","attribute":"b","value":"c","quote":"d"}]', None),
]  # fmt: skip


@pytest.mark.parametrize(("spelled", "fact"), ODD)
def test_an_entry_is_a_fact_or_is_dropped_and_counted(spelled: str, fact: RawFact | None) -> None:
    first, last = FACTS[0], FACTS[2]
    read = read_facts(f'{{"facts": [{entry(first)}, {spelled}, {entry(last)}]}}', cut=False)
    assert read.facts == (first, *([fact] if fact else []), last)
    assert (read.dropped, read.complete) == (fact is None, True)


@pytest.mark.parametrize(
    "spelled",
    [
        "tru",
        "True",
        "None",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "0x1",
        "'c'",
        '"c" inch"',
        '"\\x41"',
        '"\\u12"',
        '"line\nend"',
        '"c',
        '"c\\"',
        "undefined",
        '"c" /* so */',
        '"c",',
        '"c" "d"',
        "[1,]",
        "[1 2]",
        "[,1]",
        "{1}",
        '{"a":1 "b":2}',
        "{1:2}",
        '{"a" 1}',
        "[}",
        "",
        "\u0661",
        '"c"\u00a0',
    ],
)
def test_what_is_no_json_ends_the_reading(spelled: str) -> None:
    first, last = FACTS[0], FACTS[2]
    for key in ("value", "x"):
        bad = f'{{"entity":"a","attribute":"b","quote":"d","value":1,"{key}":{spelled}}}'
        read = read_facts(f'{{"facts": [{entry(first)}, {bad}, {entry(last)}]}}', cut=False)
        assert read == Written((first,), (), (), complete=False, dropped=0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "I found nothing.",
        '{"q":"The deal is worth 5',
        '{"facts": [{"entity":"deal","attribute":"worth","quote":"The deal is worth 5","value":"5',
        '{"facts": [{"entity":"deal","attribute":"worth","quote":"The deal is worth 5","value":5',
        '{"facts": [{"entity":"a","attribute":"b","value":"c","quote":"\\ud83d',
        '{"facts": [{"entity":"a","attribute":"b","value":tru',
        '{"facts": [{"entity":"a","attribute":"b","value":"c","quote":"a 5" pipe"}]}',
        '{"facts"',
        '{"facts": ',
        '{"facts": null}',
        '{"facts": {"entity":"a","attribute":"b","value":"c","quote":"d"}}',
        '{"entity":"a","attribute":"b","value":"c","quote":"d"}',
        "[]",
        "{}",
        "[1, 2]",
        '["facts"]',
        '[{"a": 1}]',
        '[{"entity": "a"',
        "null",
        '"facts"',
        "{'facts': [{'entity':'a','attribute':'b','value':'c','quote':'d'}]}",
    ],
)
def test_nothing_is_made_of_what_is_not_there(text: str) -> None:
    for cut in (True, False):
        assert read_facts(text, cut=cut) == NOTHING


def test_an_array_of_facts_alone() -> None:
    array = f"[{entry(FACTS[0])}, {entry(FACTS[1])}]"
    both = Written(FACTS[:2], (), (), complete=True, dropped=0)
    for text in (array, f"Facts [2]:\n```\n{array}\n```\nThat is {{all}}."):
        assert read_facts(text, cut=False) == both
    assert read_facts(f"[{{}}, {entry(FACTS[0])}]", cut=False) == Written(FACTS[:1], (), (), complete=True, dropped=1)
    for at in range(len(array)):
        whole = sum(at >= end for end in (len(entry(FACTS[0])) + 1, len(array) - 1))
        assert read_facts(array[:at], cut=False).facts == FACTS[:whole]
    assert read_facts(array[:-1], cut=False) == Written(FACTS[:2], (), (), complete=False, dropped=0)


def test_what_is_part_of_something_else_is_not_read() -> None:
    array = f"[{entry(FACTS[0])}]"
    assert read_facts(f'{{"thoughts": "5" pipe", "rejected": {array}}}', cut=False) == NOTHING
    assert read_facts(f'{{"plan": {{"facts": {array}}}, "x": 1}}', cut=False) == NOTHING
    assert read_facts(f'{{"a": 1}} {array}', cut=False) == NOTHING
    assert read_facts(f'{{"plan": {array}, "facts": []}}', cut=False) == Written((), (), (), complete=True, dropped=0)
    assert read_facts(f'{{"plan": {array}, "fac', cut=True) == NOTHING
    # What was said before does not stand in the way of an object that is evidence.
    assert read_facts(f'{{"form": ...}} {{"facts": {array}}}', cut=False).facts == FACTS[:1]


def test_the_first_object_counts_and_a_second_list_does_not() -> None:
    one, two = (f'"facts": [{entry(fact)}]' for fact in FACTS[:2])
    assert read_facts(f"{{{one}}} {{{two}}}", cut=False) == Written(FACTS[:1], (), (), complete=True, dropped=0)
    assert read_facts(f"{{{one}, {two}}}", cut=False) == Written(FACTS[:1], (), (), complete=False, dropped=0)


def test_notes_are_strings_and_other_keys_are_passed_over() -> None:
    text = r'{"x": {"facts": [1]}, "notes": ["a", "", 5, null, {"b": []}, "\ud83d", "c"], "unknowns": "d", "facts": []}'
    assert read_facts(text, cut=False) == Written((), ("a", "c"), (), complete=True, dropped=0)
    # Without a list of facts it is no whole message, though what it says counts.
    assert read_facts('{"notes": ["a"]}', cut=False) == Written((), ("a",), (), complete=False, dropped=0)
    assert read_facts('{"notes": [NaN, "a"], "facts": []}', cut=False) == NOTHING
    for text in ('{"x": NaN, "facts": []}', '{"x": [{"y": -Infinity}], "facts": []}'):
        assert read_facts(text, cut=False) == NOTHING


def test_entries_without_commas_end_the_reading() -> None:
    first, last = entry(FACTS[0]), entry(FACTS[2])
    assert read_facts(f'{{"facts": [{first} {last}]}}', cut=False) == Written(
        FACTS[:1], (), (), complete=False, dropped=0
    )
    assert read_facts(f'{{"facts": [{first.replace(", ", " ")}]}}', cut=False) == NOTHING
    assert read_facts(f'{{"notes": ["a" "b"], "facts": [{first}]}}', cut=False) == Written(
        (), ("a",), (), complete=False, dropped=0
    )
    assert read_facts(f'{{"notes": ["a"] "facts": [{first}]}}', cut=False).facts == ()


def test_the_limits() -> None:
    fact = entry(FACTS[2])
    for count in (limits.MAX_FACTS, limits.MAX_FACTS + 1):
        read = read_facts('{"facts": [null, ' + ", ".join([fact] * count) + "]}", cut=False)
        assert (len(read.facts), read.complete, read.dropped) == (limits.MAX_FACTS, count == limits.MAX_FACTS, 1)
        for key in ("notes", "unknowns"):
            read = read_facts(json.dumps({"facts": [], key: ["n"] * count}), cut=False)
            assert (len(getattr(read, key)), read.complete) == (limits.MAX_FACTS, count == limits.MAX_FACTS)


NUMBERS = st.sampled_from(["0", "-1.50", "1e9", "true", "false"])
VALUES = st.recursive(
    texts.map(json.dumps) | NUMBERS | st.sampled_from(["null", "NaN", "Infinity", '"\\ud800"', '" "', '""']),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda parts: f"[{','.join(parts)}]")
        | st.lists(inner, max_size=2).map(
            lambda parts: "{" + ",".join(f'"{index}":{part}' for index, part in enumerate(parts)) + "}"
        )
    ),
    max_leaves=3,
)
STRINGS = texts.map(json.dumps)
MEMBERS = st.tuples(st.sampled_from(["entity", "attribute", "value", "quote", "x"]), STRINGS | VALUES)
GOOD = st.fixed_dictionaries(dict.fromkeys(("entity", "attribute", "quote"), STRINGS) | {"value": STRINGS | VALUES})
ENTRIES = st.lists(st.lists(MEMBERS, max_size=5) | GOOD.map(lambda good: list(good.items())), max_size=4)


class Spelled(str):
    """A number, as it stood in the text."""

    __slots__ = ()


def judge(pairs: list[tuple[str, Any]]) -> RawFact | None:
    """Read an entry that Python's parser has read, with numbers as they were spelled."""
    members = dict(pairs)
    fields = [members.get(key) for key in ("entity", "attribute", "value", "quote")]
    if fields[2] is True or fields[2] is False:
        fields[2] = Spelled(str(fields[2]).lower())
    if len(members) < len(pairs) or "foreign" in repr(pairs):
        return None
    for at, said in enumerate(fields):
        if not isinstance(said, str) or not said.strip() or "\ud800" in said or (isinstance(said, Spelled) and at != 2):
            return None
    return RawFact(*(str(said) for said in fields))


@given(ENTRIES)
def test_entries_are_what_another_parser_makes_of_them(entries: list[list[tuple[str, str]]]) -> None:
    spelled = ["{" + ",".join(f'"{key}":{value}' for key, value in members) + "}" for members in entries]

    class Foreign:
        def __repr__(self) -> str:
            return "foreign\x00"

    judged = [
        judge(
            json.loads(
                one,
                parse_int=Spelled,
                parse_float=Spelled,
                parse_constant=lambda _: Foreign(),
                object_pairs_hook=list,
            )
        )
        for one in spelled
    ]
    read = read_facts('{"facts":[' + ",".join(spelled) + "]}", cut=False)
    assert read.facts == tuple(fact for fact in judged if fact)
    assert (read.dropped, read.complete) == (judged.count(None), True)


@given(
    st.lists(st.sampled_from(['{"facts":[', '{"entity":', '"a"', "[", "]", "{", "}", ",", ":", '"', "\\", "é", " 1"]))
)
def test_any_text_can_be_read(parts: list[str]) -> None:
    text = "".join(parts)
    read = read_facts(text, cut=True)
    assert not read.complete
    assert read_facts(text, cut=False).facts == read.facts


@pytest.mark.parametrize(
    "text",
    [
        '{"facts":[' + "[" * 200_000,
        '{"facts":[' + '{"x":' * 100_000 + "1" + "}" * 100_000 + "]}",
        '[{"a":' * 100_000,
        '{"' * 100_000,
        '{"a":' * 100_000,
        '{"a":1' * 30_000,
        "[{" * 200_000,
        "{ " * 100_000,
        '{"facts":["' + "\\u0041" * 100_000,
        '{"facts":[{"entity":"' + "{[\\" * 100_000,
        '{"facts":[' + "1," * 100_000,
        "{" + " " * 500_000 + "{",
    ],
    ids=range(12),
)
def test_deep_and_long_texts_are_read_in_no_time(text: str) -> None:
    start = time.process_time()
    assert read_facts(text, cut=False).facts == ()
    assert time.process_time() - start < 10


def test_a_fact_behind_a_deep_nest_is_read() -> None:
    nest = '{"x":' * 50_000 + "[]" + "}" * 50_000
    read = read_facts(f'{{"y": {nest}, "facts": [{nest}, {entry(FACTS[0])}]}}', cut=False)
    assert read == Written(FACTS[:1], (), (), complete=True, dropped=1)
