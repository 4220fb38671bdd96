"""How few tokens a text can make: never more than it makes, and nothing where a tokenizer may lose what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvferry.core.errors import ContextOverflowError
from kvferry.engine import token_reach
from kvferry.engine.model import LoadedModel
from kvferry.engine.token_reach import TokenReach

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
LONG, UNKNOWN = "warehouse", "<unk>"
WORDS = [LONG[:end] for end in range(2, len(LONG) + 1)]
MERGES = [(LONG[: end - 1], LONG[end - 1]) for end in range(2, len(LONG) + 1)]


def byte_level(normalizer: Any = None, without: str = "", **options: Any) -> Tokenizer:
    """A byte-level tokenizer whose longest token is a word of nine letters."""
    entries = [*sorted(set(ALPHABET) - set(without)), *WORDS]
    made = Tokenizer(models.BPE({entry: at for at, entry in enumerate(entries)}, MERGES, **options))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def falling_back(normalizer: Any = None, splitter: Any = None, lacks: str = "") -> Tokenizer:
    """A tokenizer of characters that writes others as bytes, as those converted from SentencePiece do."""
    entries = [*(name for name in BYTES if name != lacks), *sorted(set(LONG)), *WORDS, "\u2581"]
    vocabulary = {entry: at for at, entry in enumerate(entries)}
    made = Tokenizer(models.BPE(vocabulary, MERGES, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "\u2581") if normalizer is None else normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    return made


def unigram(*, byte_fallback: bool) -> Tokenizer:
    entries = [("<unk>", -20.0), *((name, -9.0) for name in BYTES), *((word, -1.0) for word in (*LONG, LONG))]
    return Tokenizer(models.Unigram(entries, unk_id=0, byte_fallback=byte_fallback))


def reach(tokenizer: Tokenizer, *never: int) -> TokenReach | None:
    return token_reach.measure(json.loads(tokenizer.to_str()), never)


def split(behaviour: str) -> Any:
    return pre_tokenizers.Split(" ", behaviour)


PROVED = {
    "bytes": (byte_level(), 9, 9),
    "bytes, ignoring merges": (byte_level(ignore_merges=True), 9, 9),
    "bytes, composed": (byte_level(normalizers.NFC()), 36, 9),
    "bytes, composed as compatible": (byte_level(normalizers.NFKC()), 36, 9),
    "bytes, taken apart": (byte_level(normalizers.NFD()), 9, 9),
    "bytes, in lower case, composed": (
        byte_level(normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])),
        36,
        9,
    ),
    "bytes, shortened": (byte_level(normalizers.Replace("abcde", "xy")), 27, 27),
    "bytes, put in before it is composed": (
        byte_level(normalizers.Sequence([normalizers.Replace("a", "\u0308"), normalizers.NFC()])),
        36,
        36,
    ),
    "falling back on bytes": (falling_back(), 9, 9),
    "falling back on bytes, in words": (falling_back(splitter=split("merged_with_previous")), 9, 9),
    "falling back on bytes, with marks": (falling_back(splitter=pre_tokenizers.Metaspace()), 9, 9),
    "Unigram": (unigram(byte_fallback=True), 9, 9),
}
UNPROVED = {
    "a normaliser that removes": byte_level(normalizers.Strip()),
    "one that removes accents": byte_level(normalizers.StripAccents()),
    "one that removes control characters": byte_level(normalizers.BertNormalizer()),
    "a pattern": byte_level(normalizers.Replace(Regex("a+"), "a")),
    "a replacement by nothing": byte_level(normalizers.Replace("a", "")),
    "a pre-tokenizer that removes": falling_back(splitter=split("removed")),
    "one that removes white space": falling_back(splitter=pre_tokenizers.WhitespaceSplit()),
    "one of two that removes": falling_back(
        splitter=pre_tokenizers.Sequence([split("isolated"), pre_tokenizers.Punctuation("removed")])
    ),
    "unknown characters": falling_back(lacks="<0x41>"),
    "no bytes at all": Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token=UNKNOWN, fuse_unk=True)),
    "words": Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token=UNKNOWN)),
    "pieces of words": Tokenizer(models.WordPiece({"a": 0, "<unk>": 1}, unk_token=UNKNOWN)),
    "Unigram with unknown characters": unigram(byte_fallback=False),
    "too few bytes": byte_level(without="".join(token_reach._byte_characters()[byte] for byte in (0x80, 0xE2))),
    "a byte of ASCII too few behind a normaliser": byte_level(normalizers.NFC(), without="\u0100"),
}
TEXTS = [
    LONG * 50,
    f"{LONG} " * 50,
    "e\u0301" * 100,
    "\u03b1\u0313\u0300\u0345" * 100,
    "\u1100\u1161\u11a8" * 100,
    "abcde" * 50,
    "a\u0308" * 40,
    "仓库🏳️\u200d🌈 ﬁ\u00a0" * 20,
    "\x00\x01\x04\x1d" * 50,
    "Tür und Tor. \r\n\t" * 20,
    "İstanbul " * 20,
]


@pytest.mark.parametrize("name", PROVED)
def test_a_proved_reach_is_never_exceeded(name: str) -> None:
    tokenizer, any_text, ascii_text = PROVED[name]
    found = reach(tokenizer)
    assert found == TokenReach(any_text, ascii_text)
    for text in TEXTS:
        assert found.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@given(
    st.sampled_from(sorted(PROVED)), st.text(st.sampled_from([*f"{LONG}abcde \x00é門🚢\u0301\u0313\u0345\u1100\u1161"]))
)
def test_a_proved_reach_is_never_exceeded_by_any_text(name: str, text: str) -> None:
    tokenizer, *_ = PROVED[name]
    found = reach(tokenizer)
    assert found is not None
    assert found.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_reach_is_reached() -> None:
    for tokenizer in (byte_level(), falling_back(), unigram(byte_fallback=True)):
        found = reach(tokenizer)
        assert found is not None
        assert found.least_tokens(LONG * 7) == len(tokenizer.encode(LONG * 7).ids) == 7
        assert [found.least_tokens(text) for text in ("", "x", "x" * 9, "x" * 10)] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", UNPROVED)
def test_where_a_text_may_get_lost_nothing_is_proved(name: str) -> None:
    assert reach(UNPROVED[name]) is None


def test_what_a_vocabulary_lacks_is_not_counted() -> None:
    lacking = [token_reach._byte_characters()[byte] for byte in (0x00, 0x41, 0xC0, 0xF1)]
    tokenizer = byte_level(without="".join(lacking))
    found = reach(tokenizer)
    assert found == TokenReach(9, 9, "\x00A")
    text = "\x00A" * 1000 + LONG
    assert found.least_tokens(text) == len(tokenizer.encode(text).ids) == 1
    # The first of four bytes is dropped, and the three others are not.
    assert found.least_tokens("\U00050000" * 9) == 1
    assert len(tokenizer.encode("\U00050000" * 9).ids) == 27


def test_the_characters_of_bytes_are_those_of_the_library() -> None:
    assert sorted(token_reach._byte_characters()) == sorted(ALPHABET)
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in (0x00, 0x20, 0x41, 0x7F, 0xE9, 0x9580, 0x1F6A2):
        (piece, _), *_ = shown.pre_tokenize_str(chr(code))
        assert piece == "".join(token_reach._byte_characters()[byte] for byte in chr(code).encode())


def test_entries_that_no_text_becomes_do_not_count() -> None:
    tokenizer = byte_level()
    last = tokenizer.token_to_id(LONG)
    assert reach(tokenizer, last) == TokenReach(8, 8)


def test_a_prompt_knows_what_is_too_long_before_it_encodes(
    tiny_model: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", context=512)
    state = json.loads(model.tokenizer.backend_tokenizer.to_str())
    added = {token["id"] for token in state["added_tokens"]}
    longest = max(len(entry) for entry, token in state["model"]["vocab"].items() if token not in added)
    model.check_length("x" * 511 * longest)
    model.check_length("x" * 500 * longest, "x" * 11 * longest)
    monkeypatch.setattr(type(model.prompt), "prefix", lambda *_: pytest.fail("it was encoded"))
    for contents in (("x" * (511 * longest + 1),), ("x" * 500 * longest, "x" * (11 * longest + 1))):
        characters = sum(map(len, contents))
        with pytest.raises(
            ContextOverflowError,
            match=f"^context: {characters} characters are 512 tokens at least, the model takes 512$",
        ) as caught:
            model.check_length(*contents)
        assert caught.value.fields == {"value": 512, "limit": 512}
