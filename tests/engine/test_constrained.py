"""Answers that follow a grammar: which tokens are left at each step, and what answers come of it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import regex
from grammar_steps import ENDS, VOCABULARY, allowed, follow, schema_grammar, walk
from mlx_lm import tokenizer_utils
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvferry.core.errors import ModelError
from kvferry.core.progress import finish
from kvferry.engine.constrained import Chain, Constraint, Grammar, GrammarCompiler
from kvferry.engine.content import ContentEncoder
from kvferry.engine.generate import Answer, Sampling, generate
from kvferry.engine.model import LoadedModel

# --- Which tokens are left --------------------------------------------------------------------------------------------

LITTLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 3},
        "b": {"type": "array", "items": {"enum": ["the", "code", 17]}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
_CHAR = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
_ITEM = '(?:"the"|"code"|17)'
LITTLE_PATTERN = regex.compile(rf'\{{"a":"{_CHAR}{{1,3}}","b":\[(?:{_ITEM}(?:,{_ITEM})?)?\]\}}')


def can_go_on(pattern: regex.Pattern[str], data: bytes) -> bool:
    """Say whether some text of the pattern begins with these bytes; half a character may become any."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(data)
    except UnicodeDecodeError:
        return False
    return pattern.fullmatch(text + ("é" if decoder.getstate()[0] else ""), partial=True) is not None


@pytest.mark.parametrize("seed", range(12))
def test_a_token_is_left_exactly_where_the_text_can_go_on(
    compiler: GrammarCompiler, spelling: list[bytes], seed: int
) -> None:
    constraint = compiler.compile(schema_grammar(LITTLE))
    rng = np.random.default_rng(seed)
    text = b""
    while not constraint.finished:
        left = allowed(constraint)
        assert left == [i for i, more in enumerate(spelling) if more and can_go_on(LITTLE_PATTERN, text + more)]
        token = int(rng.choice(left))
        constraint.accept(token)
        text += spelling[token]
    assert LITTLE_PATTERN.fullmatch(text.decode())
    assert allowed(constraint) == list(ENDS)


def test_ends_are_left_exactly_where_the_answer_may_end(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    constraint = compiler.compile(schema_grammar({"type": "integer", "minimum": 5, "maximum": 12345}))
    digits = {single[digit] for digit in b"0123456789"}
    assert not set(ENDS) & set(allowed(constraint))
    constraint.accept(single[ord("1")])
    assert not set(ENDS) & set(allowed(constraint)), "1 is below the minimum"
    constraint.accept(single[ord("2")])
    assert {*ENDS, *digits} <= set(allowed(constraint))
    assert not constraint.finished
    constraint.accept(ENDS[1])
    assert constraint.finished


def test_an_end_token_that_is_text_ends_nothing_within_a_string(
    tiny_tokenizer_dir: Path, single: dict[int, int]
) -> None:
    ends = [single[ord("e")], ENDS[0]]
    tokenizer = tokenizer_utils.load(tiny_tokenizer_dir, eos_token_ids=ends)
    constraint = GrammarCompiler(tokenizer, ContentEncoder.of(tokenizer)).compile(schema_grammar(LITTLE))
    assert follow(constraint, single, '{"a":"th') == '{"a":"th'
    assert not tokenizer.eos_token_ids & set(allowed(constraint))
    assert follow(constraint, single, '","b":[]}') == '","b":[]}'
    assert set(allowed(constraint)) == tokenizer.eos_token_ids >= set(ends)


def test_ends_that_the_tokenizer_lacks_do_not_matter(tiny_tokenizer_dir: Path, single: dict[int, int]) -> None:
    tokenizer = tokenizer_utils.load(tiny_tokenizer_dir, eos_token_ids=[ENDS[0], 500, 10**6])
    constraint = GrammarCompiler(tokenizer, ContentEncoder.of(tokenizer)).compile(schema_grammar({"const": 1}))
    assert follow(constraint, single, "1") == "1"
    assert set(allowed(constraint, 512)) == {*ENDS} & tokenizer.eos_token_ids


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("size", [VOCABULARY, 512])
def test_logits_stay_what_they_are_or_become_impossible(compiler: GrammarCompiler, dtype: mx.Dtype, size: int) -> None:
    constraint = compiler.compile(schema_grammar(LITTLE))
    logits = mx.array(np.random.default_rng(0).standard_normal(size), dtype=dtype)
    logits = mx.where(mx.arange(size) < VOCABULARY, logits, 1e4).astype(dtype)
    masked = constraint.mask(logits)
    assert masked.dtype == dtype
    assert masked.shape == (size,)
    left = np.isfinite(np.array(masked.astype(mx.float32)))
    assert np.flatnonzero(left).tolist() == allowed(compiler.compile(schema_grammar(LITTLE)))
    assert np.array_equal(np.array(masked.astype(mx.float32))[left], np.array(logits.astype(mx.float32))[left])


def test_a_smaller_head_than_the_vocabulary_loses_its_last_ids(
    compiler: GrammarCompiler, single: dict[int, int]
) -> None:
    constraint = compiler.compile(schema_grammar({"const": 1}))
    whole = allowed(constraint)
    assert allowed(constraint, whole[0] + 1) == whole[:1]
    with pytest.raises(ModelError, match="no token of this model continues the answer"):
        constraint.mask(mx.zeros(whole[0]))


# --- Whole answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_logits_the_answer_follows_the_schema(
    compiler: GrammarCompiler, spelling: list[bytes], seed: int
) -> None:
    message = json.loads(
        b"".join(spelling[token] for token in walk(compiler.compile(schema_grammar(LITTLE)), seed, spelling))
    )
    assert list(message) == ["a", "b"]
    assert 1 <= len(message["a"]) <= 3
    assert len(message["b"]) <= 2
    assert all(item in ("the", "code", 17) for item in message["b"])


@pytest.mark.parametrize("text", ['"\\ud800"', '"a\nb"', ' "a"', '"abcd"'])
def test_what_the_schema_does_not_say_cannot_be_written(
    compiler: GrammarCompiler, single: dict[int, int], text: str
) -> None:
    constraint = compiler.compile(schema_grammar({"type": "string", "maxLength": 3}))
    assert follow(constraint, single, text) != text


# --- Other tokenizers -------------------------------------------------------------------------------------------------


def pieces(words: Sequence[str]) -> dict[str, int]:
    found = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    found += [*(chr(code) for code in range(33, 127)), "▁", "é", *words]
    return {piece: number for number, piece in enumerate(dict.fromkeys(found))}


def saved(backend: Tokenizer, folder: Path) -> Any:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return tokenizer_utils.load(folder)


def sentencepiece_bpe() -> Tokenizer:
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ('"', ","), ("▁", '"')]
    backend = Tokenizer(models.BPE(pieces([a + b for a, b in merges]), merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def sentencepiece_unigram() -> Tokenizer:
    vocabulary = [(piece, -float(number)) for piece, number in pieces(["▁the", '",', "▁a"]).items()]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


@pytest.mark.parametrize("make", [sentencepiece_bpe, sentencepiece_unigram])
def test_tokens_of_other_kinds_spell_the_same_grammar(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    backend = make()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False, special=False)])
    tokenizer = saved(backend, tmp_path)
    compiler = GrammarCompiler(tokenizer, ContentEncoder.of(tokenizer))
    size = len(tokenizer)
    start = [
        tokenizer.backend_tokenizer.id_to_token(i).encode()
        for i in allowed(compiler.compile(Grammar("start: /.*/")), size)
    ]
    assert b"<tool>" not in start
    assert "▁the".encode() in start
    spelling = [tokenizer.backend_tokenizer.id_to_token(token).encode() for token in range(size)]
    texts = ['the é "漢字" 👩\u200d🚀', "<tool> the end", "the\tend\\"]
    choices = " | ".join(f'"{number}:" PART{number}' for number in range(len(texts)))
    parts = (f'PART{number}: %regex {{"substring_chars": {json.dumps(text)}}}' for number, text in enumerate(texts))
    rules = Grammar("\n".join([f"start: {choices}", *parts]))
    seen = set()
    for seed in range(24):
        ids = walk(compiler.compile(rules), seed, spelling)
        number, _, part = tokenizer.decode(ids, skip_special_tokens=True).partition(":")
        assert part in texts[int(number)]
        seen.add((number, part))
    assert {number for number, _ in seen} == {"0", "1", "2"}
    assert len(seen) > 8


def test_a_character_that_no_token_spells_is_an_error(tmp_path: Path) -> None:
    letters = [*(chr(code) for code in range(33, 127)), "</s>", "<unk>"]
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", "<unk>"])
    tokenizer = saved(backend, tmp_path)
    constraint = GrammarCompiler(tokenizer, ContentEncoder.of(tokenizer)).compile(Grammar('start: "aЖb" | "c"'))
    assert allowed(constraint, len(letters)) == [letters.index("a"), letters.index("c")]
    constraint.accept(letters.index("a"))
    with pytest.raises(ModelError, match="no token of this model continues the answer"):
        constraint.mask(mx.zeros(len(letters)))


def test_a_tokenizer_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE({"a": 0, "</s>": 1, "<unk>": 2}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>", "<unk>"])
    tokenizer = saved(backend, tmp_path)
    with pytest.raises(ModelError, match="^tokenizer: no grammar can be applied to it: "):
        GrammarCompiler(tokenizer, ContentEncoder.of(tokenizer))


# --- Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"type": "strong"}, {"type": "string", "pattern": "(?=a)b"}, {"$ref": "#/nowhere"}])
def test_a_wrong_schema_is_refused(compiler: GrammarCompiler, wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="^grammar: "):
        compiler.compile(schema_grammar(wrong))


def test_a_wrong_grammar_is_refused_without_telling_the_document(compiler: GrammarCompiler) -> None:
    with pytest.raises(ModelError, match="^grammar: ") as caught:
        compiler.compile(Grammar('start: NOWHERE "the secret is 4417"'))
    assert "4417" not in caught.value.message


@pytest.mark.parametrize("token", [0, 5, ENDS[0], 377, 379, VOCABULARY, 10**6])
def test_a_token_that_the_grammar_does_not_allow_is_refused(compiler: GrammarCompiler, token: int) -> None:
    constraint = compiler.compile(schema_grammar(LITTLE))
    assert token not in allowed(constraint)
    with pytest.raises(ModelError, match=f"grammar: token {token} leaves it"):
        constraint.accept(token)
    assert not constraint.finished


def test_nothing_follows_an_end(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    constraint = compiler.compile(schema_grammar({"type": "integer"}))
    constraint.accept(single[ord("1")])
    constraint.accept(ENDS[0])
    with pytest.raises(ModelError, match="leaves it"):
        constraint.accept(single[ord("1")])


# --- One grammar after the other --------------------------------------------------------------------------------------


def test_each_grammar_is_made_of_what_was_written_before(
    compiler: GrammarCompiler, spelling: list[bytes], single: dict[int, int]
) -> None:
    sent: list[str] = []

    def grammars() -> Generator[Grammar, str, None]:
        sent.append((yield Grammar('start: /[ab]/ "é;"')))
        sent.append((yield Grammar(f'start: "{sent[0].upper()}" /[xy]/ "."')))
        sent.append((yield Grammar('start: "end"')))

    chain = Chain(compiler, grammars())
    assert follow(chain, single, "aé;") == "aé;"
    assert sent == ["aé;"]
    forced = b"".join(spelling[token] for token in chain.accept_forced(100))
    assert "AÉ;".encode().startswith(forced)
    assert follow(chain, single, "AÉ;y.".encode().removeprefix(forced).decode()).endswith("y.")
    assert sent[1] == "aé;AÉ;y."
    assert not set(allowed(chain)) & set(ENDS)
    assert not chain.finished
    follow(chain, single, "end")
    assert chain.finished
    assert sent[2] == "aé;AÉ;y.end"
    assert chain.accept_forced(100) == []


def test_a_chain_refuses_what_its_grammar_refuses(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    chain = Chain(compiler, (Grammar(f'start: "{text}"') for text in ("a", "b")))  # type: ignore[arg-type]
    chain.accept(single[ord("a")])
    with pytest.raises(ModelError, match="leaves it"):
        chain.accept(single[ord("a")])


def test_a_model_writes_one_grammar_after_the_other(loaded: LoadedModel) -> None:
    def grammars() -> Generator[Grammar, str, None]:
        text = yield Grammar("start: /[a-m]{3}/")
        yield Grammar(f'start: "; once more: {text}"')

    made = answer(loaded, Chain(loaded.grammars, grammars()), max_tokens=60)
    first, second = made.text.split("; once more: ")
    assert (len(first), second, made.finish_reason) == (3, first, "stop")


# --- Generation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("qwen3", seed=6, context=2048)


def answer(loaded: LoadedModel, constraint: Constraint | None, **sampling: Any) -> Answer:
    prefix = finish(loaded.prefill(loaded.prompt.prefix("The keys are with Ada Lindqvist.")), lambda _: None)
    steps = loaded.answer(loaded.prompt.fresh("Who?"), prefix, prefix.offset, Sampling(**sampling), constraint)
    made: Answer = finish(steps, lambda _: None)
    return made


# --- What must follow -------------------------------------------------------------------------------------------------


def test_what_must_follow_is_taken_but_for_its_last_token(
    compiler: GrammarCompiler, grammar_tokenizer: Any, spelling: list[bytes], single: dict[int, int]
) -> None:
    rules = Grammar('start: "the ferry " ("sails" | "sinks") " today"')
    constraint = compiler.compile(rules)
    spelt: list[int] = grammar_tokenizer.encode("the ferry s", add_special_tokens=False)
    assert compiler.compile(rules).accept_forced(100) == spelt[:-1]
    assert constraint.accept_forced(0) == []
    ids = constraint.accept_forced(1) + constraint.accept_forced(100)
    taken = b"".join(spelling[token] for token in ids)
    # "s" may be a token of its own or the end of " s"; either is left to the model.
    assert taken in {b"the ferry", b"the ferry "}
    assert constraint.accept_forced(100) == []
    follow(constraint, single, "the ferry sa".removeprefix(taken.decode()))
    assert b"".join(spelling[token] for token in constraint.accept_forced(100)) == b"ils toda"
    assert not constraint.finished


def test_nothing_must_follow_where_the_answer_may_go_on_or_end(
    compiler: GrammarCompiler, single: dict[int, int]
) -> None:
    constraint = compiler.compile(Grammar('start: "1" ("2" | "3") "4"?'))
    follow(constraint, single, "12")
    assert constraint.accept_forced(100) == []
    constraint.accept(ENDS[0])
    assert constraint.accept_forced(100) == []


def test_within_a_character_nothing_is_taken(compiler: GrammarCompiler, single: dict[int, int]) -> None:
    constraint = compiler.compile(Grammar('start: ("é" | "x") "über alles"'))
    constraint.accept(single["é".encode()[0]])
    assert constraint.accept_forced(100) == []


def test_a_control_tokens_string_is_taken_as_text(compiler: GrammarCompiler, spelling: list[bytes]) -> None:
    constraint = compiler.compile(Grammar('start: "<|im_end|> is a string <|im_end|>"'))
    ids = constraint.accept_forced(100)
    assert not set(ids) & set(ENDS)
    assert b"".join(spelling[token] for token in ids) == b"<|im_end|> is a string <|im_end|"


def test_what_the_encoder_refuses_is_left_to_the_model(
    compiler: GrammarCompiler, single: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[int]:
        raise ModelError("tokenizer: only a control token spells this")

    constraint = compiler.compile(Grammar('start: "the ferry sails"'))
    monkeypatch.setattr(ContentEncoder, "encode", refuse)
    assert constraint.accept_forced(100) == []
    assert follow(constraint, single, "the ferry sails") == "the ferry sails"


def test_half_a_character_at_the_end_is_left_to_the_model(compiler: GrammarCompiler, spelling: list[bytes]) -> None:
    constraint = compiler.compile(Grammar('start: "the ferry of " ("é" | "è") "tienne"'))
    taken = b"".join(spelling[token] for token in constraint.accept_forced(100))
    assert b"the ferry of ".startswith(taken)
    assert len(taken) >= len(b"the ferry")


@pytest.mark.parametrize("make", [sentencepiece_bpe, sentencepiece_unigram])
@pytest.mark.parametrize("text", ["the the end", " the the end"])
def test_what_must_follow_is_taken_as_it_would_be_spelt_or_not_at_all(
    make: Callable[[], Tokenizer], text: str, tmp_path: Path
) -> None:
    backend = make()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = saved(backend, tmp_path)
    ids = (
        GrammarCompiler(tokenizer, ContentEncoder.of(tokenizer)).compile(Grammar(f'start: "{text}"')).accept_forced(100)
    )
    spelt = "".join(map(tokenizer.backend_tokenizer.id_to_token, ids)).replace("▁", " ")
    assert text.startswith(spelt)
    assert spelt != " "


@pytest.mark.parametrize("seed", range(8))
def test_taking_what_must_follow_leaves_what_stepping_leaves(compiler: GrammarCompiler, seed: int) -> None:
    rules = Grammar('start: "the ferry " ("sails" | "sinks" | "sä" | "sö") /[ab]{0,2}/ " at dawn é"')
    taking, stepping = compiler.compile(rules), compiler.compile(rules)
    rng = np.random.default_rng(seed)
    while not taking.finished:
        for token in taking.accept_forced(100):
            assert token in allowed(stepping)
            stepping.accept(token)
        left = allowed(taking)
        assert left == allowed(stepping)
        token = int(rng.choice(left))
        taking.accept(token)
        stepping.accept(token)
    assert stepping.finished


def test_the_model_reads_what_must_follow_and_is_not_asked(loaded: LoadedModel, single: dict[int, int]) -> None:
    passes: list[list[int]] = []

    class Counting:
        layers: Sequence[Any] = ()

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            passes.append(ids[0].tolist())
            logits = np.zeros(VOCABULARY, dtype=np.float32)
            logits[single[ord("b")]] = 1.0
            return mx.broadcast_to(mx.array(logits), (1, ids.shape[1], VOCABULARY))

    rules = loaded.grammars.compile(Grammar('start: /[ab]/ " is the only way on" /[ab]/'))
    steps = generate(Counting(), loaded.tokenizer, [7, 8], [], Sampling(max_tokens=60), constraint=rules)
    news: list[Any] = []
    made: Answer = finish(steps, news.append)
    assert (made.text, made.finish_reason) == ("b is the only way onb", "stop")
    assert [7, 8, *made.token_ids[:-1]] == [token for ids in passes for token in ids]
    assert len(passes) < len(made.token_ids) / 2
    assert [token.token_id for token in news if token.token_id is not None] == list(made.token_ids)
    passes.clear()
    again = loaded.grammars.compile(Grammar('start: /[ab]/ " is the only way on" /[ab]/'))
    sampling = Sampling(max_tokens=60)
    finish(generate(Counting(), loaded.tokenizer, [7, 8], [], sampling, constraint=again, chunk=4), lambda _: None)
    assert max(map(len, passes)) <= 4
    limited = loaded.grammars.compile(Grammar('start: /[ab]/ " is the only way on" /[ab]/'))
    short: Answer = finish(
        generate(Counting(), loaded.tokenizer, [7, 8], [], Sampling(max_tokens=4), constraint=limited), lambda _: None
    )
    assert (short.token_ids, short.finish_reason) == (made.token_ids[:4], "length")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 2.0, "top_p": 0.5}])
def test_a_model_writes_what_the_schema_says_and_stops(loaded: LoadedModel, sampling: dict[str, Any]) -> None:
    made = answer(loaded, loaded.grammars.compile(schema_grammar(LITTLE)), max_tokens=200, **sampling)
    assert LITTLE_PATTERN.fullmatch(made.text)
    assert made.finish_reason == "stop"
    assert not set(made.token_ids) & set(loaded.tokenizer.eos_token_ids)


def test_an_answer_is_stopped_by_its_end_or_by_its_length(loaded: LoadedModel) -> None:
    whole = answer(loaded, loaded.grammars.compile(schema_grammar(LITTLE)), max_tokens=200)
    exact = answer(loaded, loaded.grammars.compile(schema_grammar(LITTLE)), max_tokens=len(whole.token_ids))
    assert exact == whole
    short = answer(loaded, loaded.grammars.compile(schema_grammar(LITTLE)), max_tokens=len(whole.token_ids) - 1)
    assert short.finish_reason == "length"
    assert short.token_ids == whole.token_ids[:-1]


def test_of_the_tokens_left_the_likeliest_is_chosen(loaded: LoadedModel) -> None:
    prefix, question = loaded.prompt.prefix("The keys are with Ada Lindqvist."), loaded.prompt.fresh("Who?")
    made = answer(loaded, loaded.grammars.compile(schema_grammar(LITTLE)), max_tokens=200)
    rules = loaded.grammars.compile(schema_grammar(LITTLE))
    text = prefix + question
    for token in made.token_ids:
        logits = np.array(loaded.model(mx.array([text]))[0, -1])
        left = allowed(rules, logits.size)
        assert token == left[int(np.argmax(logits[left]))]
        rules.accept(token)
        text.append(token)
    assert rules.finished


def test_where_the_answer_may_end_the_model_decides(loaded: LoadedModel, single: dict[int, int]) -> None:
    class Fixed:
        layers: Sequence[Any] = ()

        def __init__(self, favourites: Sequence[int]) -> None:
            self.logits = np.zeros(VOCABULARY, dtype=np.float32)
            self.logits[list(favourites)] = range(10, 10 + len(favourites))

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            return mx.broadcast_to(mx.array(self.logits), (1, ids.shape[1], VOCABULARY))

    def run(favourites: Sequence[int]) -> Answer:
        rules = loaded.grammars.compile(schema_grammar({"type": "integer", "minimum": 1, "maximum": 10**6}))
        steps = generate(Fixed(favourites), loaded.tokenizer, [1], [], Sampling(max_tokens=5), constraint=rules)
        made: Answer = finish(steps, lambda _: None)
        return made

    end = next(iter(loaded.tokenizer.eos_token_ids))
    one = single[ord("1")]
    assert run([one, end]) == Answer("1", (one,), "stop")
    assert run([end, one]) == Answer("11111", (one,) * 5, "length")


def test_a_models_compiler_is_built_once(loaded: LoadedModel) -> None:
    assert loaded.grammars is loaded.grammars
