"""Builds tokenizer.json and tokenizer_config.json from the vocabulary, merges and template of a GGUF file.

GGUF names the pre-tokenizer only by a word, so its rules are listed here: ``smollm`` splits digits one by one
and then follows the byte-level rule of GPT-2; ``qwen2`` is NFC plus one regular expression, then bytes.
Another word is refused: a wrong split gives other ids for the same text, and nothing later would notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.core.errors import ModelError

if TYPE_CHECKING:
    from kvferry.engine.gguf_file import GgufFile

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of GGUF that a byte-level vocabulary may hold."""

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PREFIX = "tokenizer.ggml"


def _smollm_rules(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _qwen2_rules(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = {"smollm": _smollm_rules, "qwen2": _qwen2_rules}


def _vocabulary(gguf: GgufFile) -> tuple[list[str], list[int]]:
    tokens, kinds = gguf.texts(f"{PREFIX}.tokens"), gguf.integers(f"{PREFIX}.token_type")
    if len(tokens) != len(kinds):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens and {len(kinds)} token types")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"the GGUF vocabulary holds {len(tokens) - len(set(tokens))} token(s) twice")
    for index, kind in enumerate(kinds):
        if kind not in (NORMAL, CONTROL, USER_DEFINED, UNUSED):
            raise ModelError(f"token {index} ({tokens[index]!r}) has the unsupported type {kind}", token=index)
    return tokens, kinds


def _merges(gguf: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(gguf.texts(f"{PREFIX}.merges")):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise ModelError(f"merge {index} ({line!r}) speaks of a token that is not in the vocabulary", merge=index)
        merges.append((left, right))
    return merges


def _refuse_unsupported(gguf: GgufFile) -> None:
    model = gguf.text(f"{PREFIX}.model")
    if model != "gpt2":
        raise ModelError(f"tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE)", tokenizer=model)
    rules = gguf.text(f"{PREFIX}.pre")
    if rules not in PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {rules!r} is not supported, only {', '.join(sorted(PRE_TOKENIZERS))}",
            pre_tokenizer=rules,
        )
    for key in (f"{PREFIX}.add_bos_token", f"{PREFIX}.add_eos_token", f"{PREFIX}.add_space_prefix"):
        if gguf.has(key) and gguf.flag(key):
            raise ModelError(f"the GGUF file sets {key}, which this conversion does not support", key=key)


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """Return the tokenizer; token ids are the file's own.

    Every token is in the BPE vocabulary, unused ones too, so that any id a model may emit can be shown. Those
    stay unreachable from text because no merge makes them. Control tokens and user-defined ones are matched
    before the pre-tokenizer; only control tokens are skipped when decoding without special tokens.

    Raises:
        ModelError: when the file's tokenizer is of another kind or inconsistent.
    """
    _refuse_unsupported(gguf)
    tokens, kinds = _vocabulary(gguf)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(gguf, vocabulary)))
    PRE_TOKENIZERS[gguf.text(f"{PREFIX}.pre")](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    return tokenizer


def build_tokenizer_config(gguf: GgufFile, context_length: int) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, chat template included.

    Raises:
        ModelError: when there is no chat template, or a special id is outside the vocabulary.
    """
    tokens, kinds = _vocabulary(gguf)
    config: dict[str, Any] = {
        # Keeps tokenizer.json as it is; for qwen2, transformers insists on its own class, of equal rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": gguf.text("tokenizer.chat_template"),
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": kind == CONTROL,
            }
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        },
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        key = f"{PREFIX}.{theirs}_token_id"
        if not gguf.has(key):
            continue
        config[f"{ours}_token"] = tokens[gguf.token_id(key, len(tokens))]
    return config
