"""Tokenizers of the kinds that models have, with vocabularies that are written down: a trainer's differ by process."""

from __future__ import annotations

import json
import string

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from kvferry.engine.content import ContentEncoder

TEXT = """
the of and to in is a for be not or by with that on at from it The harbour station pump shall per day hours
return if self def None cost depth value number order key room deposit Kestrel Trust EUR 2024 17 44 00
"""
WORDS = TEXT.split()
# Also what a normaliser makes of others: letters without their marks, parts of a ligature, of Hangul and of Devanagari.
LETTERS = [
    *string.ascii_letters,
    *string.digits,
    *".,:;-/()'\"!?#*_=<>[]{}|%&+",
    *"éèüößñ\u0301\u0308\u200d\ufe0f",
    *"的一是在不了有人这中大为上个国冷藏库の。、，は日本をにキー",
    *"ابتثجحدرسشصعغفقكلمنهويىةأ٠١٢٣٤٥٦٧٨٩",
    *"한국어हिन्दीमें👩🚀❤",
]
SPACE = "\u2581"


def encoder(tokenizer: Tokenizer) -> ContentEncoder:
    """Return what encodes as a receiver with this tokenizer would."""
    state = json.loads(tokenizer.to_str())
    del state["padding"], state["truncation"]
    return ContentEncoder(json.dumps([state, [0]], sort_keys=True, separators=(",", ":")).encode())


def byte_level() -> ContentEncoder:
    """Byte-level BPE: a character is up to four tokens, a word may be one (GPT-2, Llama 3, Qwen)."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = _merged(names, [*(f"\u0120{word}" for word in WORDS), *WORDS])
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return encoder(tokenizer)


def byte_fallback() -> ContentEncoder:
    """BPE over characters, unknown ones as their bytes, with a space before every text (Llama 2)."""
    names = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), SPACE, *LETTERS]
    vocab, merges = _merged(names, [SPACE + word for word in WORDS])
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return encoder(tokenizer)


def unigram() -> ContentEncoder:
    """Unigram behind NFKC: one character may become many, many one, and a run of unknown ones is one token (T5)."""
    words = [(SPACE + word, -4.0 - 0.01 * at) for at, word in enumerate(WORDS)]
    letters = [(letter, -8.0) for letter in [SPACE, *LETTERS]]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *words, *letters], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return encoder(tokenizer)


def word_piece() -> ContentEncoder:
    """WordPiece behind lower case and without accents: white space is no token, and an unknown word is one (BERT)."""
    words, letters = [word.lower() for word in WORDS], [letter.lower() for letter in LETTERS]
    pieces = ["[UNK]", *words, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece(_numbered(pieces), unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return encoder(tokenizer)


KINDS = {
    "byte-level BPE": byte_level,
    "BPE with bytes": byte_fallback,
    "Unigram": unigram,
    "WordPiece": word_piece,
}


def _merged(names: list[str], words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary with these words, and the merges that put them together letter by letter."""
    merges = dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word)))
    return _numbered([*names, *("".join(merge) for merge in merges)]), list(merges)


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
