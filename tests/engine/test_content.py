"""The content encoder from a written description, its own or another machine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tokenizer_utils

from kvferry.core.errors import ModelError
from kvferry.engine.content import ContentEncoder
from kvferry.engine.fingerprint import describe_tokenizer, tokenizer_identity

TEXT = "The fee is 12.5 %. Größe, 門 🚢 <|im_end|> <think>\r\n" * 3


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> Any:
    return tokenizer_utils.load(tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def description(tokenizer: Any) -> bytes:
    return describe_tokenizer(tokenizer)


def changed(description: bytes, path: tuple[Any, ...], value: Any) -> bytes:
    whole = json.loads(description)
    place = whole
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(whole).encode()


def test_a_description_is_what_manifests_name(tokenizer: Any, description: bytes) -> None:
    assert tokenizer_identity(description, tokenizer.chat_template).vocab == blake3(description).digest()
    assert ContentEncoder(description).vocab == blake3(description).digest()
    state, ends = json.loads(description.decode("ascii"))
    assert ends == sorted(tokenizer.eos_token_ids)
    assert description == json.dumps([state, ends], sort_keys=True, separators=(",", ":")).encode("ascii")


def test_a_description_encodes_as_its_tokenizer_does(tokenizer: Any, description: bytes) -> None:
    ours, theirs = ContentEncoder.of(tokenizer), ContentEncoder(description)
    assert theirs.encode(TEXT) == ours.encode(TEXT)
    assert theirs.offsets(TEXT) == ours.offsets(TEXT)
    assert theirs.count(TEXT) == len(ours.encode(TEXT))
    assert theirs.forbidden == ours.forbidden


HOSTILE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no tokenizer": ((0,), {}),
    "a list in its place": ((0,), []),
    "no model": ((0, "model"), None),
    "a model of a later day": ((0, "model", "type"), "Later"),
    "added tokens that are none": ((0, "added_tokens"), [{"id": "x"}]),
    "added tokens that are no list": ((0, "added_tokens"), 7),
    "padding": ((0, "padding"), None),
    "truncation": ((0, "truncation"), None),
    "a merge of nothing": ((0, "model", "merges"), [["no such", "tokens"]]),
    "a pattern that is none": (
        (0, "pre_tokenizer"),
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
    # The library does not raise then, it panics.
    "a table that is none": ((0, "normalizer"), {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_library_makes_nothing_of_is_one_error(description: bytes, name: str) -> None:
    with pytest.raises(ModelError, match="^tokenizer: "):
        ContentEncoder(changed(description, *HOSTILE[name]))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"[1]", b"[{},[],[]]", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_description_is_one_error(data: bytes) -> None:
    with pytest.raises(ModelError, match="^tokenizer: "):
        ContentEncoder(data)


PLACES = st.sampled_from(
    [
        (0, "normalizer"),
        (0, "pre_tokenizer"),
        (0, "pre_tokenizer", "type"),
        (0, "added_tokens"),
        (0, "added_tokens", 0),
        (0, "added_tokens", 0, "id"),
        (0, "model", "vocab"),
        (0, "model", "vocab", "a"),
        (0, "model", "merges"),
        (0, "model", "byte_fallback"),
        (0, "model", "continuing_subword_prefix"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(path=PLACES, value=VALUES)
def test_a_changed_description_is_refused_or_encodes(description: bytes, path: tuple[Any, ...], value: Any) -> None:
    try:
        encoder = ContentEncoder(changed(description, path, value))
        ids = encoder.encode(TEXT)
    except ModelError:
        return
    assert encoder.count(TEXT) == len(encoder.offsets(TEXT)) == len(ids)
    assert encoder.forbidden.isdisjoint(ids)
