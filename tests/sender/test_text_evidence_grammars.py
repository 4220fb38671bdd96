"""Evidence under its grammar: a fact's quote is a passage as a whole, and its value words of that passage."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
import regex
from grammar_steps import ENDS, allowed, follow, walk
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.constrained import Constraint, GrammarCompiler
from kvferry.sender.text.evidence_grammars import (
    MAX_NAME,
    MAX_QUOTE,
    MAX_REMARKS,
    MAX_STATED,
    MAX_VALUE,
    evidence_grammar,
    fact_grammar,
    quotable,
)

FIELDS = {"entity": MAX_NAME, "attribute": MAX_NAME, "value": MAX_VALUE, "quote": MAX_QUOTE}
# What each passage is made of, by hand.
WORDS = [
    ["Ann", " ", "said", " ", '"', "7:30", '"', ",", "\r\n", "not", " ", "-5", "."],
    ["Åse", " ", "said", " ", "漢", "字", " ", "👩\u200d🚀", "\t", "\x1b", " ", "<", "|", "im_end", "|", ">"],
    ["<", "think", ">", "\\", ".", "\u2028", "Ann", " ", "said"],
]
PASSAGES = ["".join(words) for words in WORDS]
# The same by clauses: only the first has two, its comma is of neither.
CLAUSES = [[WORDS[0][:7], WORDS[0][8:]], [WORDS[1]], [WORDS[2]]]
BLANK = ["", " ", "\r\n\t \u3000\u00a0\u2028\x1f\x00", "\n" * 500, "\u200b\ufeff", "\x01\u0301"]


def fact(**fields: str) -> dict[str, str]:
    return {"entity": "e", "attribute": "a", "value": "v", "quote": "q"} | fields


def copied(value: str, quote: str) -> str:
    """Return an answer with one fact."""
    return written(fact(value=value, quote=quote))


def written(*facts: dict[str, str], notes: Sequence[str] = (), unknowns: Sequence[str] = ()) -> str:
    return json.dumps({"facts": facts, "notes": notes, "unknowns": unknowns}, ensure_ascii=False)


def within(text: str) -> str:
    """Return a text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def up_to_the_value(compiler: GrammarCompiler, single: dict[int, int], passages: Sequence[str]) -> Constraint:
    constraint = compiler.compile(evidence_grammar(passages))
    start = copied("", "").split('", "quote"')[0]
    assert follow(constraint, single, start) == start
    return constraint


def left(constraint: Constraint, single: dict[int, int]) -> set[str]:
    """Return the ASCII characters with which the text can go on."""
    tokens = set(allowed(constraint))
    return {chr(byte) for byte, token in single.items() if byte < 128 and token in tokens}


def can_write(compiler: GrammarCompiler, single: dict[int, int], passages: Sequence[str] | None, text: str) -> bool:
    constraint = compiler.compile(evidence_grammar(passages))
    reached = follow(constraint, single, text)
    assert constraint.finished is (reached == text)
    return reached == text


def runs(words: Sequence[str]) -> set[str]:
    """Return what stands between any two of a passage's words and may begin a value."""
    found = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    unseen = r"[\p{White_Space}\p{Default_Ignorable_Code_Point}\x00-\x1f]"
    return {run for run in found if len(run) <= MAX_VALUE and not regex.match(unseen, run)}


# --- Facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_a_fact_goes_on_exactly_as_one_of_the_passages_does(
    compiler: GrammarCompiler, spelling: list[bytes], single: dict[int, int], seed: int
) -> None:
    bodies = [
        f'{within(value)}", "quote": "{within(passage)}"}}'.encode()
        for words, passage in zip(WORDS, PASSAGES, strict=True)
        for value in runs(words)
    ]
    texts = [body + after for body in bodies for after in (b', {"entity": "', b'], "notes": [')]
    constraint = up_to_the_value(compiler, single, PASSAGES)
    rng = np.random.default_rng(seed)
    done = b""
    while not any(done.startswith(body) for body in bodies):
        live = [text for text in texts if text.startswith(done)]
        tokens = allowed(constraint)
        assert tokens == [i for i, more in enumerate(spelling) if more and any(t.startswith(done + more) for t in live)]
        ending = [token for token in tokens if spelling[token].startswith(b'"')]
        # Else most values would be as long as they can be.
        token = int(rng.choice(ending if ending and rng.random() < 0.2 else tokens))
        constraint.accept(token)
        done += spelling[token]


def test_what_stands_in_several_passages_can_be_quoted_from_each_of_them(
    compiler: GrammarCompiler, single: dict[int, int]
) -> None:
    passages = ["The Greta sails at 7:40.", "The Bark sails at 8:10.", "Nobody sails today."]
    quotes = {
        "sails at": passages[:2],
        "sails": passages,
        "7:40": passages[:1],
        "8:10.": passages[1:2],
        "Nobody sails": passages[2:],
    }
    for value, possible in quotes.items():
        constraint = up_to_the_value(compiler, single, passages)
        assert follow(constraint, single, f'{value}", "quote": "').endswith(': "')
        assert left(constraint, single) == {passage[0] for passage in possible}
        assert [can_write(compiler, single, passages, copied(value, quote)) for quote in passages] == [
            quote in possible for quote in passages
        ]


def test_a_passage_may_begin_like_another_one(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    passages = ["Ann", "Ann said", "Ann said so"]
    for value, at in (("Ann", 0), ("said", 1), ("so", 2)):
        for quote in passages:
            assert can_write(compiler, single, passages, copied(value, quote)) is (quote in passages[at:])
    constraint = up_to_the_value(compiler, single, passages)
    assert follow(constraint, single, 'Ann", "quote": "Ann').endswith("Ann")
    assert left(constraint, single) == {" ", '"'}


def test_facts_are_independent_of_each_other(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    first, second = fact(value="Ann", quote=PASSAGES[0]), fact(value="字", quote=PASSAGES[1])
    assert can_write(compiler, single, PASSAGES, written(first, second, first))
    assert not can_write(compiler, single, PASSAGES, written(first, second | {"value": "Ann"}))


def test_the_same_passage_counts_once(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    assert evidence_grammar(["a b", "c", "a b"]) == evidence_grammar(["a b", "c"])
    assert can_write(compiler, single, ["a b", "c", "a b"], copied("b", "a b"))


@pytest.mark.parametrize(
    ("value", "possible"),
    [
        ('said "7:30",\r\nnot', True),
        ("not", True),
        (".", True),
        ('"', True),
        ("Ann ", True),
        ("Ann said 7:30", False),
        ("ann", False),
        ("nn said", False),
        ("sai", False),
        (",\nnot", False),
        (" said", False),
        ("\r\nnot", False),
        ("Ann said not", False),
        ("字", False),
    ],
)
def test_a_value_is_whole_words_of_its_quote(
    compiler: GrammarCompiler, single: dict[int, int], value: str, *, possible: bool
) -> None:
    assert can_write(compiler, single, PASSAGES, copied(value, PASSAGES[0])) is possible


@pytest.mark.parametrize("part", ["Ann said", 'said "7:30",', PASSAGES[0][:-1], PASSAGES[0][1:], PASSAGES[0] + " "])
def test_a_quote_is_no_part_of_a_passage(compiler: GrammarCompiler, single: dict[int, int], part: str) -> None:
    assert can_write(compiler, single, PASSAGES, copied("said", PASSAGES[0]))
    assert not can_write(compiler, single, PASSAGES, copied("said", part))


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ("13,500.25", ("13", "13,500", "500.25", "25")),
        ("7:40", ("7", "40", "7:", ":40")),
        ("12:30:45", ("12:30", "30:45", "30")),
        ("٧:٣٠", ("٧", "٣٠")),
        ("-5", ("5",)),
        ("\u22125", ("5",)),
        ("10²", ("10", "²")),
        ("m²", ("m", "²")),
        ("2½", ("2", "½")),
        ("5'000", ("5", "000", "5'")),
        ("45\u2019000", ("45", "000")),
        ("5\u02bc000", ("5", "000")),
        ("5 000", ("5", "000")),
        ("1\u202f250\u00a0000", ("1", "250", "1\u202f250", "000")),
        ("٥٫٣", ("٥", "٣")),
        ("٥٬٠٠٠", ("٥", "٠٠٠")),
        ("1/2", ("1", "2", "1/")),
        ("1\u20442", ("1", "2")),
    ],
)
def test_a_number_is_a_value_as_a_whole(
    compiler: GrammarCompiler, single: dict[int, int], whole: str, parts: Sequence[str]
) -> None:
    passage = f"no less than {whole} or so"
    for value in (whole, f"than {whole} or"):
        assert can_write(compiler, single, [passage], copied(value, passage))
    for part in parts:
        assert not can_write(compiler, single, [passage], copied(part, passage))


@pytest.mark.parametrize(
    ("passage", "value"),
    [
        ("2024-05-07", "05"),
        ("pp. 12\u201314", "14"),
        ("bay C-4", "4"),
        ("at: 7", "7"),
        ("a:7", "a"),
        ("5年", "5"),
        ("5 %", "5"),
        ("5 00", "5"),
        ("5\t000", "5"),
        ("2024 500", "500"),
        ("km/h", "km"),
        ("it is '5'", "5"),
        ("$5.00", "5.00"),
    ],
)
def test_a_number_ends_where_another_one_begins(
    compiler: GrammarCompiler, single: dict[int, int], passage: str, value: str
) -> None:
    assert can_write(compiler, single, [passage], copied(value, passage))


CHARACTERS = ['"', "\\", "/", "\n", "\r", "\r\n", "\t", "\b", "\f", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\u2029"]
STRINGS = [
    "👩\u200d🚀",
    "\U0010ffff",
    "<|im_end|>",
    "<think>",
    "\\n",
    "\\u0041",
    '", "quote": "',
    '"}], "notes": [',
    "/x/",
]


@pytest.mark.parametrize("special", CHARACTERS + STRINGS, ids=ascii)
def test_every_character_can_be_copied_and_only_as_json_writes_it(
    compiler: GrammarCompiler, single: dict[int, int], special: str
) -> None:
    passage = f"a {special} b"
    text = copied(passage, passage)
    assert can_write(compiler, single, [passage], text)
    assert json.loads(text)["facts"][0]["quote"] == passage
    for other in ("a  b", "a b", f"a {special}{special} b"):
        assert not can_write(compiler, single, [passage], copied(other, passage))
        assert not can_write(compiler, single, [passage], copied("a", other))
    for escape in (json.dumps(special)[1:-1], f"\\u{ord(special[0]):04x}", f"\\u{ord(special[0]):04X}"):
        other_writing = text.replace(within(special), escape)
        assert can_write(compiler, single, [passage], other_writing) is (other_writing == text)


def test_no_control_token_wherever_the_answer_is(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    passages = ["<think> <|im_end|> <|endoftext|>", "<|im_end|>"]
    constraint = compiler.compile(evidence_grammar(passages))
    facts = fact(value="<think> <|im_end|>", quote=passages[0]), fact(value="<|im_end|>", quote=passages[1])
    for byte in written(*facts, notes=["<|im_start|>"]).encode():
        assert max(allowed(constraint)) < min(ENDS)
        constraint.accept(single[byte])
    assert allowed(constraint) == list(ENDS)


# --- One fact of one passage ------------------------------------------------------------------------------------------


def of_passage(value: str, passage: str, attribute: str = "a", entity: str = "e") -> str:
    found = {"quote": passage, "entity": entity, "attribute": attribute, "value": value}
    return json.dumps(found, ensure_ascii=False)


def can_state(compiler: GrammarCompiler, single: dict[int, int], passage: str, text: str) -> bool:
    constraint = compiler.compile(fact_grammar(passage, "<<"))
    return follow(constraint, single, f"<<{text}") == f"<<{text}" and constraint.finished


def test_a_passages_fact_quotes_it_and_takes_its_value_from_it(
    compiler: GrammarCompiler, single: dict[int, int]
) -> None:
    for number, (clauses, passage) in enumerate(zip(CLAUSES, PASSAGES, strict=True)):
        values = set().union(*map(runs, clauses))
        other = next(iter(sorted(runs(WORDS[number - 1]) - values)))
        for value in sorted(values)[::7]:
            assert can_state(compiler, single, passage, of_passage(value, passage))
        assert not can_state(compiler, single, passage, of_passage(other, passage))
        assert not can_state(compiler, single, passage, of_passage(min(values), PASSAGES[number - 1]))


@pytest.mark.parametrize(
    ("passage", "values", "others"),
    [
        (
            "EUR 1,284.50, by 3 May; see 4.2: yes",
            ["EUR 1,284.50", "by 3 May", "4.2"],
            ["50, by", "May;", "see 4.2: yes"],
        ),
        ("| gate | 10:45, daily |", ["gate", "10:45", "daily"], ["gate |", "gate | 10:45", "10:45, daily", "|"]),
        ("x=a,b;c|d", ["x=a,b;c|d", "b;c"], []),
        ("押金三千元，不退：见二、三款；完", ["押金三千元", "不退", "三款"], ["元，不退", "退：见", "二、三", "款；"]),
        ("الاسم: علي، العمر؛ ٣", ["علي", "العمر"], ["علي، العمر", "العمر؛"]),
        ("ends here,", ["ends here"], ["ends here,"]),
        (", ;", [",", ", ;"], []),
        ("Ann\u2019s 1.5 (a, b)", ["Ann\u2019s 1.5 (a", "b)"], ["a, b"]),
    ],
    ids=ascii,
)
def test_a_passages_value_ends_where_its_clause_does(
    compiler: GrammarCompiler, single: dict[int, int], passage: str, values: list[str], others: list[str]
) -> None:
    possible = {value: can_state(compiler, single, passage, of_passage(value, passage)) for value in values + others}
    assert possible == dict.fromkeys(values, True) | dict.fromkeys(others, False)


@pytest.mark.parametrize("special", CHARACTERS + STRINGS, ids=ascii)
def test_every_passage_can_be_quoted_for_its_fact(
    compiler: GrammarCompiler, single: dict[int, int], special: str
) -> None:
    passage = f"a {special} b"
    assert can_state(compiler, single, passage, of_passage("b", passage))


@pytest.mark.parametrize(
    ("attribute", "possible"),
    [
        ("code", True),
        ("valid until", True),
        ("date_of_birth", True),
        ("Lindqvist's key-code", True),
        ("漢字" * 20, True),
        ("x" * 40, True),
        ("x" * 41, False),
        ("one two three four", True),
        ("one two three four five", False),
        ("", False),
        (" code", False),
        ("code ", False),
        ("a, b", False),
    ],
)
def test_an_attribute_is_a_few_words(
    compiler: GrammarCompiler, single: dict[int, int], attribute: str, *, possible: bool
) -> None:
    passage = "The code is 4417."
    assert can_state(compiler, single, passage, of_passage("4417", passage, attribute)) is possible


def test_what_can_be_quoted() -> None:
    assert list(quotable([*BLANK, "b", "Ann", *BLANK, "b"])) == ["b", "Ann"]
    assert list(quotable(BLANK)) == []


# --- Lengths ----------------------------------------------------------------------------------------------------------


def test_a_value_stops_before_the_word_that_would_be_too_long(
    compiler: GrammarCompiler, single: dict[int, int]
) -> None:
    passage = " ".join(["incorrigible"] * 40)
    seven = " ".join(["incorrigible"] * 7)
    assert len(passage) > 2 * MAX_QUOTE
    assert len(seven) < MAX_VALUE < len(seven) + len(" incorrigible")
    constraint = up_to_the_value(compiler, single, [passage])
    assert follow(constraint, single, seven) == seven
    assert left(constraint, single) == {" ", '"'}
    constraint.accept(single[ord(" ")])
    assert left(constraint, single) == {'"'}
    rest = copied(seven + " ", passage).removeprefix(copied(seven + " ", "").split('", "quote"')[0])
    assert follow(constraint, single, rest) == rest


def test_a_value_may_be_as_long_as_the_limit_says(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    passage = "漢" * MAX_VALUE + "字字"
    assert can_write(compiler, single, [passage], copied(passage[:-2], passage))
    assert can_write(compiler, single, [passage], copied(passage[2:], passage))
    assert not can_write(compiler, single, [passage], copied(passage[:-1], passage))
    escaped = "\x1b" * MAX_VALUE
    assert can_write(compiler, single, ["x" + escaped], copied("x" + escaped[1:], "x" + escaped))
    assert not can_write(compiler, single, ["x" + escaped], copied("x" + escaped, "x" + escaped))


@pytest.mark.parametrize("unit", ["x", "🇩🇪", "e\u0301", "x\u200d", "7:40:"])
def test_a_word_longer_than_any_value_is_cut(compiler: GrammarCompiler, single: dict[int, int], unit: str) -> None:
    passage = unit * 300
    value = passage[:MAX_VALUE]
    assert can_write(compiler, single, [passage], copied(value, passage))
    assert not can_write(compiler, single, [passage], copied(passage[: MAX_VALUE + 1], passage))


@pytest.mark.parametrize("length", [39, 40, 41, MAX_VALUE - 1, MAX_VALUE])
def test_a_long_word_is_one(compiler: GrammarCompiler, single: dict[int, int], length: int) -> None:
    word = "x" * length
    passage = f"a {word} y"
    assert can_write(compiler, single, [passage], copied(word, passage))
    assert not can_write(compiler, single, [passage], copied(word[:-1], passage))
    assert not can_write(compiler, single, [passage], copied(word[: length // 2], passage))


@pytest.mark.parametrize(
    ("flags", "possible"), [("🇩🇪", True), ("🇫🇷 sails", True), ("🇩🇪🇫🇷", True), ("🇩", False), ("🇪🇫", False)]
)
def test_a_flag_is_one_character(
    compiler: GrammarCompiler, single: dict[int, int], flags: str, *, possible: bool
) -> None:
    passage = "The🇩🇪🇫🇷 sails"
    assert can_write(compiler, single, [passage], copied(flags, passage)) is possible


@pytest.mark.parametrize("character", ["a", "漢", "👩", '"', "\\", "\n"])
@pytest.mark.parametrize(("field", "most"), FIELDS.items())
def test_lengths_are_code_points(
    compiler: GrammarCompiler, single: dict[int, int], field: str, most: int, character: str
) -> None:
    longest = "x" + character * (most - 1)
    text = written(fact(**{field: longest}))
    assert can_write(compiler, single, None, text)
    constraint = compiler.compile(evidence_grammar(None))
    start = text[: text.index(within(longest)) + len(within(longest))]
    assert follow(constraint, single, start) == start
    assert left(constraint, single) == {'"'}


@pytest.mark.parametrize("passages", [["q v"], None])
def test_an_endless_list_of_facts_ends(
    compiler: GrammarCompiler, single: dict[int, int], passages: list[str] | None
) -> None:
    constraint = compiler.compile(evidence_grammar(passages))
    start = written(*[fact(quote="q v")] * MAX_STATED).removesuffix('], "notes": [], "unknowns": []}')
    assert follow(constraint, single, start) == start
    assert left(constraint, single) == {"]"}
    remarks = ["r"] * MAX_REMARKS
    rest = written(notes=remarks, unknowns=remarks).removeprefix('{"facts": [')
    assert follow(constraint, single, rest) == rest
    assert constraint.finished
    more = written(fact(quote="q v"), notes=[*remarks, "r"])
    assert follow(compiler.compile(evidence_grammar(passages)), single, more).count('"r"') == MAX_REMARKS


@pytest.mark.slow
def test_thousands_of_passages(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    passages = [f"Crate {number} is in bay {number % 7}." for number in range(3000)]
    begun = time.perf_counter()
    constraint = up_to_the_value(compiler, single, passages)
    assert left(constraint, single) == {"C", "i", "b", ".", *"0123456789"}
    assert follow(constraint, single, "2999 is") == "2999 is"
    assert left(constraint, single) == {" ", '"'}
    quote = '", "quote": "Crate 2999 is in bay 3."}'
    assert follow(constraint, single, quote) == quote
    assert left(constraint, single) == {",", "]"}
    # Half a second here: what takes a minute is no longer the same algorithm.
    assert time.perf_counter() - begun < 30


# --- Whole answers ----------------------------------------------------------------------------------------------------


def test_whatever_the_logits_the_answer_is_evidence(compiler: GrammarCompiler, spelling: list[bytes]) -> None:
    possible = {(value, passage) for words, passage in zip(WORDS, PASSAGES, strict=True) for value in runs(words)}
    copies = set()
    for seed in range(20):
        constraint = compiler.compile(evidence_grammar(PASSAGES))
        text = b"".join(spelling[token] for token in walk(constraint, seed, spelling)).decode()
        message = json.loads(text)
        assert list(message) == ["facts", "notes", "unknowns"]
        assert 1 <= len(message["facts"]) <= MAX_STATED
        for found in message["facts"]:
            assert list(found) == list(FIELDS)
            assert all(0 < len(found[field]) <= most for field, most in FIELDS.items())
            copies.add((found["value"], found["quote"]))
        names = [found[field] for found in message["facts"] for field in ("entity", "attribute")]
        strings = names + message["notes"] + message["unknowns"]
        assert not any(string[0].isspace() for string in strings)
        assert max(map(len, strings)) <= MAX_QUOTE
        assert without_strings(text) == without_strings(json.dumps(message))
    assert copies <= possible
    assert len(copies) > 10
    assert {quote for _, quote in copies} == set(PASSAGES)


def without_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


@pytest.mark.parametrize(
    "passages", [[], *([blank] for blank in BLANK), BLANK], ids=lambda passages: str(len(passages))
)
def test_nothing_to_quote_is_no_facts(
    compiler: GrammarCompiler, single: dict[int, int], spelling: list[bytes], passages: list[str]
) -> None:
    for seed in range(5):
        constraint = compiler.compile(evidence_grammar(passages))
        assert json.loads(b"".join(spelling[token] for token in walk(constraint, seed, spelling)))["facts"] == []
    assert can_write(compiler, single, passages, written())


def test_blank_passages_among_others_cannot_be_quoted(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    assert evidence_grammar([*BLANK, "Ann", *BLANK]) == evidence_grammar(["Ann"])
    assert can_write(compiler, single, [*BLANK, "Ann"], copied("Ann", "Ann"))


@pytest.mark.parametrize("passages", [None, PASSAGES, ["x"]])
def test_there_are_facts_where_there_is_something_to_quote(
    compiler: GrammarCompiler, single: dict[int, int], passages: list[str] | None
) -> None:
    constraint = compiler.compile(evidence_grammar(passages))
    assert follow(constraint, single, written(unknowns=["the price"])) == '{"facts": ['


EVIDENCE = written(fact(), notes=["n", "m"], unknowns=["u"])


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ('{"facts"', ' {"facts"'),
        ('{"facts"', '{ "facts"'),
        ('"facts": [', '"facts":['),
        ('"facts": [', '"facts":  ['),
        ('"facts": [', '"facts": [\n'),
        ('"facts": [', '"facts" : ['),
        ('"n", "m"', '"n","m"'),
        ('"n", "m"', '"n",\n"m"'),
        ('"n", "m"', '"n", '),
        ('"n", "m"', '"n", 5'),
        ('"n", "m"', '""'),
        ('"n", "m"', '" n"'),
        ('"n", "m"', '"\\ud83d"'),
        ('"n", "m"', '"a\nb"'),
        ('"n", "m"', '"a\\/b"'),
        ('"n", "m"', '"a\\u001Bb"'),
        ('"notes"', '"unknowns"'),
        (', "unknowns": ["u"]', ""),
        ('["u"]', '"u"'),
        ('["u"]', "null"),
        ('"entity": "e"', '"entity": ""'),
        ('"entity": "e"', '"entity":"e"'),
        ('"entity": "e", "attribute": "a"', '"attribute": "a", "entity": "e"'),
        ('"value": "v"', '"value": " v"'),
        ('"value": "v"', '"value": "\\nv"'),
        ('"value": "v"', '"value": "\u00a0v"'),
        ('"value": "v"', '"value": "\u200bv"'),
        ('"value": "v"', '"value": 1'),
        (', "quote": "q"', ""),
        ('"quote": "q"', '"quote": ""'),
        ('"quote": "q"', '"quote": "q", "more": "m"'),
        ("}]", "}, ]"),
    ],
)
def test_what_is_no_evidence_cannot_be_written(
    compiler: GrammarCompiler, single: dict[int, int], part: str, other: str
) -> None:
    assert EVIDENCE.count(part) == 1
    assert can_write(compiler, single, None, EVIDENCE)
    assert not can_write(compiler, single, None, EVIDENCE.replace(part, other))


# --- Any passages -----------------------------------------------------------------------------------------------------

ATOMS = [
    "000",
    "5 000",
    *"ab15.,/\u2019\u066b'\"\\/:-–_²½é漢字ทขカー한{}[]<|%x\t\n\x00\x7f\u2028\u00a0",
    "👩\u200d🚀",
    "\r\n",
    *[" "] * 6,
]
FLAGS = "".join(map(chr, range(0x1F1E6, 0x1F200)))
CHARACTERS_OF_ANY_KIND = st.characters(codec="utf-8", categories=["L", "Nd", "S", "P"], exclude_characters=FLAGS)
TEXTS = st.lists(st.sampled_from(ATOMS) | CHARACTERS_OF_ANY_KIND, max_size=30).map("".join)


def words_of(text: str) -> list[str]:
    """Cut a text that is shorter than a value may be at its word boundaries, by what stands on both sides of them."""
    ends = [found.start() for found in regex.finditer(r"\b", text, flags=regex.V1 | regex.W)]
    ends = [end for end in ends if 0 < end < len(text) and not number_goes_on(text[:end], text[end:])]
    return [text[i:j] for i, j in zip([0, *ends], [*ends, len(text)], strict=True) if i < j]


def number_goes_on(before: str, after: str) -> bool:
    marks = tuple(
        ".,:'/\uff0e\uff0c\uff1a\uff0f\uff07\u066b\u066c\u2018\u2019\u201a\u201b\u2039\u203a\u2032\u02bc\u2044\u2215"
    )
    if before[-1].isdecimal() and after.startswith(marks) and after[1:2].isdecimal():
        return True
    if before[-2:-1].isdecimal() and before.endswith(marks) and after[0].isdecimal():
        return True
    for first, group in ((before, after[1:]), (before[:-1], after)):
        space = (before + after)[len(first)]
        grouped = re.match(r"\d{3}(?!\d)", group) and re.search(r"(?<!\d)\d{1,3}$", first)
        if space in " \u00a0\u2007\u2009\u202f" and grouped and not re.search(r"[-:]\d\d[-:]\d+$", first):
            return True
    if (unicodedata.category(before[-1]) == "Pd" or before[-1] == "\u2212") and after[0].isdecimal():
        return not belongs(before[-2:-1])
    powers = unicodedata.category(before[-1]) == "No" or unicodedata.category(after[0]) == "No"
    return powers and belongs(before[-1]) and belongs(after[0])


def belongs(character: str) -> bool:
    """Whether a character is of the kinds that words and numbers consist of."""
    return character == "_" or (character != "" and unicodedata.category(character)[0] in "LMN")


@given(st.lists(TEXTS, min_size=1, max_size=4), st.data())
def test_of_any_passages_whole_words_can_be_copied_and_nothing_else(
    compiler: GrammarCompiler, single: dict[int, int], passages: list[str], data: st.DataObject
) -> None:
    possible = {passage: runs(words_of(passage)) for passage in passages}
    source = data.draw(st.sampled_from(passages))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(source))] * 2)))
    for value in [
        source[start:end],
        *data.draw(st.lists(st.sampled_from(sorted(possible[source]) or ["x"]), max_size=2)),
    ]:
        for quote in passages:
            assert can_write(compiler, single, passages, copied(value, quote)) is (value in possible[quote])
        foreign = source + "!"
        assert can_write(compiler, single, passages, copied(value, foreign)) is (value in possible.get(foreign, ()))
