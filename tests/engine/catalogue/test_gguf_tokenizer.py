"""Token ids against a byte-pair encoder written from its definition, and text that survives the round trip."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from kvferry.core.errors import ModelError
from kvferry.engine.gguf_file import GgufFile
from kvferry.engine.gguf_models import convert_gguf
from kvferry.engine.gguf_tokenizer import build_tokenizer

WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
SAMPLES = [
    "hello the hell  of 1234512 things",
    "  two spaces,\n\n\tthen é and 12",
    "emoji 🙂👩\u200d👩\u200d👧 and 日本語",
    "it's we'll\r\n",
]


def tokenizer_of(tiny: Any, tmp_path: Path, pre: str) -> tuple[Tokenizer, dict[str, int], list[str]]:
    file = GgufFile(tiny("llama", pre).write(tmp_path / f"{pre}.gguf"))
    vocabulary = {token: index for index, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
    return build_tokenizer(file), vocabulary, file.texts("tokenizer.ggml.merges")


def byte_letters() -> dict[int, str]:
    """Return GPT-2's letter for each byte, from its definition: printable ones stay, others follow from 256 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def merge_word(letters: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        pairs = [(ranks[pair], n) for n, pair in enumerate(itertools.pairwise(letters)) if pair in ranks]
        if not pairs:
            return letters
        _, at = min(pairs)
        letters = [*letters[:at], letters[at] + letters[at + 1], *letters[at + 2 :]]


def smollm_ids(text: str, vocabulary: dict[str, int], merges: list[str]) -> list[int]:
    """Encode ASCII text: every digit alone, then GPT-2's words, then merges by rank."""
    table = byte_letters()
    ranks = {(left, right): n for n, (left, right) in enumerate(merge.split(" ") for merge in merges)}
    ids = []
    for part in re.findall(r"[0-9]|[^0-9]+", text):
        words = [part] if part.isdigit() else WORDS.findall(part)
        for word in words:
            ids += [vocabulary[token] for token in merge_word([table[byte] for byte in word.encode()], ranks)]
    return ids


def test_digits_stand_alone_under_smollm(tmp_path: Path, tiny: Any) -> None:
    tokenizer, vocabulary, _ = tokenizer_of(tiny, tmp_path, "smollm")
    assert "12" in vocabulary
    assert tokenizer.encode("a 12").tokens == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_samples_survive_and_ids_match_the_definition(tmp_path: Path, tiny: Any, pre: str) -> None:
    tokenizer, vocabulary, merges = tokenizer_of(tiny, tmp_path, pre)
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        if pre == "smollm" and text.isascii():
            assert tokenizer.encode(text).ids == smollm_ids(text, vocabulary, merges)


def test_random_text_matches_the_definition(tmp_path: Path, tiny: Any) -> None:
    tokenizer, vocabulary, merges = tokenizer_of(tiny, tmp_path, "smollm")

    @given(st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=40))
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_special_tokens=False).ids == smollm_ids(text, vocabulary, merges)

    check()


def test_only_qwen2_composes_accents(tmp_path: Path, tiny: Any) -> None:
    qwen2, _, _ = tokenizer_of(tiny, tmp_path, "qwen2")
    smollm, _, _ = tokenizer_of(tiny, tmp_path, "smollm")
    assert qwen2.encode("e\u0301").ids == qwen2.encode("é").ids
    assert smollm.encode("e\u0301").ids != smollm.encode("é").ids


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_any_text_survives(tmp_path: Path, tiny: Any, pre: str) -> None:
    tokenizer, _, _ = tokenizer_of(tiny, tmp_path, pre)

    @given(st.text(max_size=60))
    def check(text: str) -> None:
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected

    check()


def test_special_tokens_are_one_id_each_and_only_control_ones_are_hidden(tmp_path: Path, tiny: Any) -> None:
    tokenizer, vocabulary, _ = tokenizer_of(tiny, tmp_path, "smollm")
    ids = tokenizer.encode("<|im_start|>user\n<tool>hello<|im_end|>").ids
    assert ids[0] == vocabulary["<|im_start|>"] == 1
    assert ids[-1] == vocabulary["<|im_end|>"] == 2
    assert vocabulary["<tool>"] in ids
    assert tokenizer.decode(ids) == "user\n<tool>hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n<tool>hello<|im_end|>"


def test_every_id_of_the_model_can_be_shown_but_unused_ones_are_not_reached(tmp_path: Path, tiny: Any) -> None:
    tokenizer, vocabulary, _ = tokenizer_of(tiny, tmp_path, "smollm")
    assert tokenizer.get_vocab() == vocabulary
    assert tokenizer.decode([vocabulary["[PAD9]"]]) == "[PAD9]"
    assert vocabulary["[PAD9]"] not in tokenizer.encode("[PAD9]").ids


@pytest.mark.parametrize(("architecture", "pre"), [("llama", "smollm"), ("qwen2", "qwen2")])
def test_mlx_lm_loads_it_with_template_and_end_tokens(tmp_path: Path, tiny: Any, architecture: str, pre: str) -> None:
    source = tiny(architecture, pre).write(tmp_path / "tiny.gguf")
    convert_gguf(source, tmp_path / "model", {})
    ours = build_tokenizer(GgufFile(source))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    loaded = load_tokenizer(tmp_path / "model", eos_token_ids=config["eos_token_id"])
    for text in [*SAMPLES, "<|im_start|>user\n<tool>hello<|im_end|>"]:
        assert loaded.encode(text) == ours.encode(text).ids
    messages = [{"role": "user", "content": "hello 12"}]
    shown = "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.apply_chat_template(messages, add_generation_prompt=True) == ours.encode(shown).ids
    assert loaded.eos_token_ids == {0, 2}
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe' is not supported, only qwen2, smollm"),
        ({"extra": [("add_add_space_prefix", (True,))]}, "add_space_prefix"),
        ({"template": None}, "no tokenizer.chat_template"),
    ],
)
def test_an_unknown_tokenizer_is_refused(tmp_path: Path, tiny: Any, change: dict[str, Any], message: str) -> None:
    source = tiny(**change).write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=message):
        convert_gguf(source, tmp_path / "model", {})
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
