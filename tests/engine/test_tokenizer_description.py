"""Descriptions of tokenizers: what of another machine's is refused before the library sees a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvferry.core.errors import ModelError
from kvferry.core.limits import MIB
from kvferry.engine.content import ContentEncoder
from kvferry.engine.tokenizer_description import MAX_ENTRIES, MAX_ENTRY, MAX_GROWTH, MAX_STEPS_BYTES

LETTERS = {"a": 0, "b": 1}


def state(model: Any = None, normalizer: Any = None, before: Any = None) -> dict[str, Any]:
    """Return a tokenizer as its library writes it, without what no description has."""
    tokenizer = Tokenizer(model or models.BPE(vocab=LETTERS, merges=[]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if before is not None:
        tokenizer.pre_tokenizer = before
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


def in_turn(times: int, *steps: Callable[[], Any]) -> normalizers.Normalizer:
    return normalizers.Sequence([step() for _ in range(times) for step in steps])


BOTH = "normalizer, pre_tokenizer"
SPACES = pre_tokenizers.WhitespaceSplit()
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
        f"{BOTH}: characters that may become of one: {1000**5}, the limit is {MAX_GROWTH}",
    ),
    "forms that grow": (
        state(normalizer=in_turn(6, lambda: normalizers.Replace("a", "\ufdfa"), normalizers.NFKD)),
        f"{BOTH}: characters that may become of one: {18**6}, ",
    ),
    "signs that are set apart": (
        state(normalizer=in_turn(10, lambda: normalizers.Replace(" ", "中"), normalizers.BertNormalizer)),
        f"{BOTH}: characters that may become of one: {12**10}, ",
    ),
    "bytes of bytes": (
        state(before=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)] * 6)),
        f"{BOTH}: characters that may become of one: {4**6}, ",
    ),
    "pieces with a sign in front": (
        state(before=pre_tokenizers.Sequence([pre_tokenizers.Metaspace(replacement=sign) for sign in "abcdefghijkl"])),
        f"{BOTH}: characters that may become of one: {2**12}, ",
    ),
    "steps without end": (
        state(normalizer=normalizers.Sequence([normalizers.NFC()] * 30), before=pre_tokenizers.Sequence([SPACES] * 3)),
        f"{BOTH}: steps: 33, the limit is 32",
    ),
    "an expression without end": (
        state(before=pre_tokenizers.Split(Regex(r"\p{L}" * 1000), "isolated")),
        f"{BOTH}: characters of a pattern: 5000, the limit is 4096",
    ),
    "a text without end that is replaced": (
        state(normalizer=normalizers.Replace("a" * 5000, "b")),
        f"{BOTH}: characters of a pattern: 5000, the limit is 4096",
    ),
    "an entry without end": (
        with_model(vocab={"a": 0, "a" * (MAX_ENTRY + 1): 1}),
        f"model.vocab: characters of an entry: {MAX_ENTRY + 1}, the limit is {MAX_ENTRY}",
    ),
    "an entry without end, another kind": (
        # The library built from it here would end this process.
        state() | {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0], ["a" * 200_000, -1.0]]}},
        f"model.vocab: characters of an entry: 200000, the limit is {MAX_ENTRY}",
    ),
    "pieces that grow": (
        with_model(continuing_subword_prefix="a" * 65),
        "model.continuing_subword_prefix: characters: 65, the limit is 64",
    ),
    "pieces that grow at their end": (
        with_model(end_of_word_suffix="a" * 65),
        "model.end_of_word_suffix: characters: 65, the limit is 64",
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


def test_of_nothing_there_are_no_tokens() -> None:
    # A budget is kept by cutting until nothing is left, and then it must be kept.
    encoder = ContentEncoder(described(state(normalizer=normalizers.Replace(Regex("^"), "a"))))
    assert encoder.encode("b") == [0, 1]
    assert encoder.encode("") == []
    assert encoder.count("") == len(encoder.offsets("")) == 0


def test_what_is_decoded_with_is_not_built() -> None:
    # Compiled, an expression takes thousands of times its size, and nothing is decoded here.
    written = state() | {"decoder": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}
    assert ContentEncoder(described(written)).encode("ab") == [0, 1]
