"""Tiny random token classifiers in the place of A8's released compressors, and of tiktoken's encoding one of bytes.

They need kvferry[llmlingua], whose packages are imported where they are used. Their tokenizers are of the two kinds
that the released ones have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import regex

XLMR = "llmlingua-2-xlm-roberta-large-meetingbank"
BERT = "llmlingua-2-bert-base-multilingual-cased-meetingbank"
SENTENCES = (
    "The access code of the north warehouse is 4417, not 4418. ",
    "Plate B-KV 2041 left at dawn; plate HH-AB 7 did not.\n",
    "if crates != 11:\n    return keys[4]  # no ferry\n",
    "门牌号是京A12345。主管的电话是六二〇三。",
)
TEXT = "".join(SENTENCES)
LONG = "".join(f"Crate {number} holds {number * 7 % 97} sheets of paper, {TEXT}" for number in range(40))
# Written down: what a tokenizer's trainer finds among equals is not the same in every process.
WORDS = sorted({*regex.findall(r"[A-Za-z]+|\d+", TEXT), "Crate", "holds", "sheets"})


def install(home: Path) -> None:
    """Put both compressors where kvferry looks for them in its home."""
    import torch

    for name, make in ((XLMR, tiny_xlmr), (BERT, tiny_bert)):
        torch.manual_seed(3)
        make(home / "models" / "compressors" / name)


def encoding_of_bytes() -> Any:
    """Return an encoding of tiktoken that counts bytes; the package's own would be downloaded."""
    import tiktoken

    ranks = {bytes([value]): value for value in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})


def tiny_xlmr(path: Path) -> None:
    """Save a token classifier with a tokenizer of SentencePiece's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import XLMRobertaConfig, XLMRobertaForTokenClassification

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    words = ["\u2581", *(f"\u2581{word}" for word in WORDS)]
    letters = sorted({*LONG} - {" ", "\n"})
    pieces = [*((word, -4.0 - 0.01 * at) for at, word in enumerate(words)), *((letter, -8.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram([*((token, 0.0) for token in special), *pieces], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    save(path, tokenizer, "XLMRobertaTokenizer", names)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = XLMRobertaConfig(
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=514, initializer_range=0.5, num_labels=2, **sizes
    )
    XLMRobertaForTokenClassification(config).save_pretrained(path)


def tiny_bert(path: Path) -> None:
    """Save a token classifier with a tokenizer of WordPiece's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertForTokenClassification

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({*LONG} - {" ", "\n"})
    pieces = [*special, *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    names = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"}
    save(path, tokenizer, "BertTokenizer", names)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=tokenizer.get_vocab_size(), initializer_range=0.5, num_labels=2, **sizes)
    BertForTokenClassification(config).save_pretrained(path)


def save(path: Path, tokenizer: Any, kind: str, names: dict[str, str]) -> None:
    """Save a tokenizer as the released models have theirs."""
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {f"{name}_token": token for name, token in names.items()}
    settings |= {"tokenizer_class": kind, "do_lower_case": False, "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
