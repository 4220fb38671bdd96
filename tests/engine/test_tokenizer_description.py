"""Descriptions of tokenizers: what of another machine's is refused before the library sees a text."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers

from kvferry.core.errors import ModelError
from kvferry.core.limits import MIB
from kvferry.engine import tokenizer_description
from kvferry.engine.content import ContentEncoder
from kvferry.engine.tokenizer_description import MAX_ENTRIES, MAX_GROWTH, MAX_STEPS_BYTES, growth

LETTERS = {"a": 0, "b": 1}


def state(model: Any = None, normalizer: Any = None) -> dict[str, Any]:
    """Return a tokenizer as its library writes it, without what no description has."""
    tokenizer = Tokenizer(model or models.BPE(vocab=LETTERS, merges=[]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    written: dict[str, Any] = json.loads(tokenizer.to_str())
    del written["padding"], written["truncation"]
    return written


def described(written: dict[str, Any]) -> bytes:
    return json.dumps([written, [0]]).encode()


def with_model(**fields: Any) -> dict[str, Any]:
    written = state()
    return written | {"model": written["model"] | fields}


def replaces(times: int, content: str) -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Replace("a", content) for _ in range(times)])


FIXED = {"strategy": {"Fixed": 1000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
CUTS = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
NOT_ONE = "its description is not one: "
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # These would give every text 1,000 tokens, or none more than two.
    "padding": (state() | {"padding": FIXED | {"pad_token": "a"}}, NOT_ONE + ".*unknown field `padding`"),
    "truncation": (state() | {"truncation": CUTS}, NOT_ONE + ".*unknown field `truncation`"),
    "no padding, but said": (state() | {"padding": None}, NOT_ONE + ".*unknown field `padding`"),
    "a part of a later day": (state() | {"later": 1}, NOT_ONE + ".*unknown field `later`"),
    "a part less": ({"model": state()["model"]}, NOT_ONE + ".*missing required field"),
    "an id without end": (state() | {"added_tokens": [{"id": float("inf"), "content": "a", "special": True}]}, NOT_ONE),
    "an id that is no number": (with_model(vocab={"a": "0"}), NOT_ONE),
    "lists in the place of a vocabulary": (with_model(vocab=[[]] * 9), NOT_ONE),
    "another text every time": (with_model(dropout=0.5), "model.dropout: 0.5"),
    "a vocabulary without end": (
        with_model(vocab={str(number): number for number in range(MAX_ENTRIES + 1)}),
        f"model.vocab: entries: {MAX_ENTRIES + 1}, the limit is {MAX_ENTRIES}",
    ),
    "a long normalizer": (
        state(normalizer=normalizers.Prepend("a" * MIB)),
        rf"normalizer: bytes: \d+, the limit is {MAX_STEPS_BYTES}",
    ),
    "texts that grow": (
        state(normalizer=replaces(5, "a" * 1000)),
        f"normalizer: characters that may become of one: {1000**5}, the limit is {MAX_GROWTH}",
    ),
    "pieces that grow": (
        with_model(continuing_subword_prefix="a" * 65),
        "model.continuing_subword_prefix: 65, the limit is 64",
    ),
    "pieces that grow at their end": (
        with_model(end_of_word_suffix="a" * 65),
        "model.end_of_word_suffix: 65, the limit is 64",
    ),
    "a word that is looked up for hours": (
        state(models.WordPiece(vocab={"a": 0}, unk_token="a", max_input_chars_per_word=1001)),  # noqa: S106
        "model.max_input_chars_per_word: 1001, the limit is 1000",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_description_that_would_do_harm_is_refused_and_says_why(name: str) -> None:
    written, reason = REFUSED[name]
    with pytest.raises(ModelError, match=f"^tokenizer: {reason}"):
        ContentEncoder(described(written))


@pytest.mark.parametrize("id_", ["1e999", "1" * 400, "-1"])
def test_a_number_beyond_all_bounds_is_one_error(id_: str) -> None:
    whole = described(state() | {"added_tokens": [{"id": 7, "content": "a", "special": True}]}).decode()
    assert ContentEncoder(whole.encode()).forbidden == {7}
    with pytest.raises(ModelError, match="^tokenizer: "):
        ContentEncoder(whole.replace('"id": 7', f'"id": {id_}').encode())


GROWING = {
    "none": normalizers.NFC(),
    "as long": normalizers.Replace(" ", "▁"),
    "longer": normalizers.Replace("a", "abc"),
    "longer by a part": normalizers.Replace("ab", "abc"),
    "shorter": normalizers.Replace("abab", "b"),
    "a pattern": normalizers.Replace(Regex("a?"), "bb"),
    "one after another": replaces(3, "aa"),
    "in front": normalizers.Prepend("▁▁"),
    "in front, and replaced": normalizers.Sequence([normalizers.Prepend("aa"), normalizers.Replace("a", "bb")]),
    "bytes": normalizers.Sequence([normalizers.ByteLevel(), normalizers.ByteLevel()]),
    "sequences in sequences": normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "bb")])]),
}


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("text", ["a", "ab", "abab", "b", "é", "門", "🚢", " a", "aaaa" * 9])
def test_no_text_grows_more_than_is_measured(name: str, text: str) -> None:
    written = state(normalizer=GROWING[name])["normalizer"]
    assert len(GROWING[name].normalize_str(text)) <= growth(written) * len(text)


@pytest.mark.parametrize(("name", "grown"), [("none", 1), ("as long", 1), ("longer", 3), ("one after another", 8)])
def test_what_is_measured_is_reached(name: str, grown: int) -> None:
    assert growth(state(normalizer=GROWING[name])["normalizer"]) == grown


def test_a_table_grows_by_its_longest_entry() -> None:
    index = b"\0" * 8
    table = len(index).to_bytes(4, "little") + index + "fi\0門の門\0a\0".encode()
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    assert growth(step) == 3
    assert growth({"type": "Sequence", "normalizers": [step, step]}) == 9


def test_of_nothing_there_are_no_tokens() -> None:
    # A budget is kept by cutting until nothing is left, and then it must be kept.
    encoder = ContentEncoder(described(state(normalizer=normalizers.Replace(Regex("^"), "a"))))
    assert encoder.encode("b") == [0, 1]
    assert encoder.encode("") == []
    assert encoder.count("") == len(encoder.offsets("")) == 0


def test_the_longest_that_is_in_use_is_far_below_the_limits() -> None:
    # XLM-RoBERTa's and ALBERT's: a table that makes 18 characters of one, and spaces that become others.
    table = b"\0\0\0\0" + ("ص" * 18).encode() + b"\0" * 236_000
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    spaces = state(normalizer=normalizers.Replace(Regex(" {2,}"), "▁"))["normalizer"]
    whole = {"type": "Sequence", "normalizers": [step, spaces]}
    assert growth(whole) == 54 <= MAX_GROWTH
    assert len(json.dumps(whole)) < tokenizer_description.MAX_STEPS_BYTES / 3
