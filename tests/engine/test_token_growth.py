"""How much a text may grow before a tokenizer finds tokens in it, against what its library makes of texts."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvferry.engine import token_growth, token_reach
from kvferry.engine.token_growth import TokenGrowth
from kvferry.engine.tokenizer_description import MAX_GROWTH, MAX_STEPS_BYTES

CUT = pre_tokenizers.Split(Regex("."), "isolated")
STEPS: dict[str, tuple[list[Any], list[Any]]] = {
    "none": ([], []),
    "as long": ([normalizers.Replace(" ", "▁")], []),
    "longer": ([normalizers.Replace("a", "abc")], []),
    "longer by a part": ([normalizers.Replace("ab", "abc")], []),
    "shorter": ([normalizers.Replace("abab", "b")], []),
    "an expression": ([normalizers.Replace(Regex("a?"), "bb")], []),
    "one after another": ([normalizers.Replace("a", "aa") for _ in range(3)], []),
    "in front": ([normalizers.Prepend("▁▁")], []),
    "in front, and replaced": ([normalizers.Prepend("aa"), normalizers.Replace("a", "bb")], []),
    "bytes of bytes": ([normalizers.ByteLevel(), normalizers.ByteLevel()], []),
    "a sequence in a sequence": ([normalizers.Sequence([normalizers.Replace("a", "bb")])], []),
    "forms": ([normalizers.NFD(), normalizers.Lowercase(), normalizers.NFKD(), normalizers.NFC()], []),
    "forms of what was put in": ([normalizers.NFKD(), normalizers.Replace("a", "\ufdfa"), normalizers.NFKD()], []),
    "Bert's": ([normalizers.BertNormalizer(), normalizers.Replace(" ", "中"), normalizers.BertNormalizer()], []),
    "bytes": ([normalizers.NFC()], [pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "bytes with spaces": ([], [CUT, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]),
    "bytes twice": ([], [pre_tokenizers.ByteLevel(use_regex=False), pre_tokenizers.ByteLevel(use_regex=False)]),
    "signs in front": ([], [CUT, *(pre_tokenizers.Metaspace(sign, prepend_scheme="always") for sign in "xyz")]),
    "runs": ([], [pre_tokenizers.Digits(), pre_tokenizers.Punctuation(), pre_tokenizers.Whitespace()]),
}
TEXTS = st.text(st.sampled_from("aab b.7İé한\u1d160\ufdfa中🚢 \n\u0301ǅ"), min_size=1, max_size=12)


def measured(normalizing: list[Any], cutting: list[Any]) -> TokenGrowth:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(normalizing)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cutting)
    written = json.loads(tokenizer.to_str())
    steps = token_reach.flat(written["normalizer"], "normalizers")
    return token_growth.measure([*steps, *token_reach.flat(written["pre_tokenizer"], "pretokenizers")])


def made(normalizing: list[Any], cutting: list[Any], text: str) -> int:
    """Return how many characters the library makes of a text."""
    normal = normalizers.Sequence(normalizing).normalize_str(text)
    return sum(len(piece) for piece, _ in pre_tokenizers.Sequence(cutting).pre_tokenize_str(normal))


@pytest.mark.parametrize("name", STEPS)
@given(text=TEXTS)
def test_no_text_grows_more_than_is_measured(name: str, text: str) -> None:
    assert made(*STEPS[name], text) <= measured(*STEPS[name]).of(text)


@pytest.mark.parametrize("name", STEPS)
@given(text=st.text(st.characters(codec="ascii"), min_size=1, max_size=12))
def test_no_text_of_ascii_does(name: str, text: str) -> None:
    assert made(*STEPS[name], text) <= measured(*STEPS[name]).of(text)


@pytest.mark.parametrize(
    ("name", "text", "grown"),
    [("none", "é", 1), ("as long", " ", 1), ("longer", "a", 3), ("one after another", "a", 8), ("forms", "\ufdfa", 18)],
)
def test_what_is_measured_is_reached(name: str, text: str, grown: int) -> None:
    assert made(*STEPS[name], text) == measured(*STEPS[name]).of(text) == grown


def table(*entries: str, index: int = 8) -> dict[str, Any]:
    written = index.to_bytes(4, "little") + bytes(index) + "".join(entry + "\0" for entry in entries).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(written).decode()}


def test_a_table_grows_by_its_longest_entry() -> None:
    assert token_growth.measure([table("fi", "xyz", "a")]) == TokenGrowth(3, 3)
    assert token_growth.measure([table("fi"), table("門の門")]) == TokenGrowth(6, 6)
    # What it puts in may grow in what follows, also where the text was of ASCII.
    assert token_growth.measure([table("門"), {"type": "NFKD"}]) == TokenGrowth(18, 18)
    assert token_growth.measure([table("a"), {"type": "NFKD"}]) == TokenGrowth(18, 1)


def test_texts_of_ascii_count_less() -> None:
    growth = measured([normalizers.NFC()], [pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert growth == TokenGrowth(16, 1)
    assert growth.of("abc") == 3
    assert growth.of("abcé門") == 3 + 2 * 16


IN_USE: dict[str, list[Any]] = {
    "GPT-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "Qwen2.5": [normalizers.NFC(), CUT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    "Llama 2": [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    "CLIP": [
        normalizers.NFC(),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Lowercase(),
        CUT,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "BERT": [normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()],
}


@pytest.mark.parametrize("name", IN_USE)
def test_those_in_use_are_far_below_the_limit(name: str) -> None:
    steps = [json.loads(step.__getstate__()) for step in IN_USE[name]]
    assert token_growth.measure(steps).any_text <= MAX_GROWTH / 10


def test_the_largest_in_use_is_below_it() -> None:
    # ALBERT's; its table is XLM-RoBERTa's: 18 characters of one, and 0.3 MB.
    before = [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    behind = [normalizers.Replace(Regex(" {2,}"), " "), pre_tokenizers.Metaspace()]
    steps = [json.loads(step.__getstate__()) for step in before]
    steps.append(table("ص" * 18, index=236_000))
    steps += [json.loads(step.__getstate__()) for step in behind]
    assert token_growth.measure(steps).any_text == 18 * 18 * 3 * 2 <= MAX_GROWTH
    assert len(json.dumps(steps)) < MAX_STEPS_BYTES / 3
