"""Answers: which tokens are chosen, when it ends, and how text follows from tokens."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import tokenizer_utils

from kvferry.core.errors import ContextOverflowError, InvalidRequestError, ModelError
from kvferry.core.progress import finish
from kvferry.engine.cache import PrefixCache
from kvferry.engine.generate import Answer, Sampling, Token, forward, generate
from kvferry.engine.model import LoadedModel

VOCABULARY = 380
ENDS = (376, 378)


@dataclass
class Scripted:
    """A model that says the given tokens, whatever it reads."""

    script: Sequence[int]
    layers: Sequence[Any] = ()
    read: list[list[int]] = field(default_factory=list)

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        del cache
        logits = np.zeros((1, ids.shape[1], VOCABULARY), dtype=np.float32)
        logits[0, -1, self.script[len(self.read)]] = 50.0
        self.read.append(ids[0].tolist())
        return mx.array(logits)


@dataclass
class Fixed:
    """A model that gives the same logits after every token."""

    logits: np.ndarray[Any, Any]
    layers: Sequence[Any] = ()

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        del cache
        return mx.broadcast_to(mx.array(self.logits, dtype=mx.float32), (1, ids.shape[1], VOCABULARY))


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> Any:
    return tokenizer_utils.load(tiny_tokenizer_dir, eos_token_ids=list(ENDS))


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("qwen3", seed=6, context=512)


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel) -> PrefixCache:
    return run(loaded.prefill(loaded.prompt.prefix("The keys are with Ada Lindqvist.")))[1]


def run(generator: Generator[Any, None, Any]) -> tuple[list[Any], Any]:
    """Return what a generator yields, and what it returns."""
    seen: list[Any] = []
    made = finish(generator, seen.append)
    return seen, made


def ask(loaded: LoadedModel, prefix: PrefixCache, **sampling: Any) -> Answer:
    ids = loaded.prompt.fresh("Who keeps the keys?")
    answer: Answer = run(loaded.answer(ids, prefix, prefix.offset, Sampling(**sampling)))[1]
    return answer


# --- Which token ------------------------------------------------------------------------------------------------------


def test_the_likeliest_token_of_the_whole_text_so_far(loaded: LoadedModel, prefix: PrefixCache) -> None:
    document, question = (
        loaded.prompt.prefix("The keys are with Ada Lindqvist."),
        loaded.prompt.fresh("Who keeps the keys?"),
    )
    answer = ask(loaded, prefix, max_tokens=24)
    text = document + question
    for token in answer.token_ids:
        # No cache at all: the model reads everything again.
        assert int(mx.argmax(loaded.model(mx.array([text]))[0, -1]).item()) == token
        text.append(token)
    assert len(set(answer.token_ids)) > 3


def test_a_seed_gives_an_answer_of_its_own_again(loaded: LoadedModel, prefix: PrefixCache) -> None:
    answers = [ask(loaded, prefix, max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 2, 3, 2**64 - 1)]
    mx.random.seed(99)
    again = ask(loaded, prefix, max_tokens=12, temperature=1.0, seed=1)
    assert again == answers[0]
    assert len({answer.token_ids for answer in answers}) == 4


def test_sampling_leaves_the_global_stream_alone(loaded: LoadedModel, prefix: PrefixCache) -> None:
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    ask(loaded, prefix, max_tokens=4, temperature=1.0, top_p=0.9)
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_at_temperature_zero_nothing_is_random(loaded: LoadedModel, prefix: PrefixCache) -> None:
    answers = {ask(loaded, prefix, max_tokens=12, seed=seed, top_p=top_p) for seed in (0, 7) for top_p in (0.2, 1.0)}
    assert len(answers) == 1
    cold = ask(loaded, prefix, max_tokens=12, temperature=1e-4, seed=3)
    assert {cold.token_ids} == {answer.token_ids for answer in answers}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (0.5, 0.85)])
def test_tokens_come_as_often_as_they_should(tokenizer: Any, temperature: float, top_p: float) -> None:
    # Ids 10..13 with these probabilities; everything else is impossible.
    likely = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.full(VOCABULARY, -np.inf)
    logits[10:14] = np.log(likely) + 3.0
    count = 1000
    kept = likely.copy()
    if top_p < 1.0:
        nucleus = int(np.searchsorted(np.cumsum(likely), top_p)) + 1
        kept[nucleus:] = 0.0
    expected = kept ** (1 / temperature) / (kept ** (1 / temperature)).sum()
    sampling = Sampling(max_tokens=count, temperature=temperature, top_p=top_p, seed=4)
    answer = run(generate(Fixed(logits), tokenizer, [1], [], sampling))[1]
    found = np.bincount(answer.token_ids, minlength=VOCABULARY)[10:14]
    assert found.sum() == count
    assert not found[expected == 0].any()
    # Four standard deviations of a binomial count.
    assert np.all(np.abs(found - count * expected) <= 4 * np.sqrt(count * expected * (1 - expected)) + 1e-9)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-42])
def test_next_to_no_temperature_is_greedy(tokenizer: Any, temperature: float) -> None:
    logits = np.zeros(VOCABULARY)
    logits[100], logits[200] = 4.6, 5.0
    answer = run(generate(Fixed(logits), tokenizer, [1], [], Sampling(max_tokens=20, temperature=temperature)))[1]
    assert set(answer.token_ids) == {200}


# --- When it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_an_end_token_stops_and_is_no_part_of_the_answer(tokenizer: Any, end: int) -> None:
    model = Scripted([75, 76, end, 77])
    seen, answer = run(generate(model, tokenizer, [1, 2, 3], [], Sampling(max_tokens=10)))
    assert answer == Answer(tokenizer.decode([75, 76]), (75, 76), "stop")
    assert [token.token_id for token in seen] == [75, 76]
    assert model.read == [[1, 2, 3], [75], [76]]


def test_an_answer_may_be_empty(tokenizer: Any) -> None:
    assert run(generate(Scripted([ENDS[0]]), tokenizer, [1], [], Sampling())) == ([], Answer("", (), "stop"))


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_than_max_tokens(tokenizer: Any, most: int) -> None:
    model = Scripted([75, 76, 77, 78, 79, ENDS[0]])
    answer = run(generate(model, tokenizer, [1], [], Sampling(max_tokens=most)))[1]
    assert answer.token_ids == (75, 76, 77, 78, 79)[:most]
    assert answer.finish_reason == "length"
    assert len(model.read) == most, "no token is computed that nobody gets"


def test_closing_stops_the_work(tokenizer: Any) -> None:
    model = Scripted([75] * 100, layers=["one"])
    caches = [type("Cache", (), {})()]
    watched = weakref.ref(caches[0])
    generator = generate(model, tokenizer, [1], caches, Sampling(max_tokens=100))
    del caches
    assert [next(generator).token_id, next(generator).token_id] == [75, 75]
    assert watched() is not None
    generator.close()
    del generator
    gc.collect()
    assert watched() is None
    assert len(model.read) == 2


# --- Text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "The code is 4417.",
        "é漢字👩\u200d🚀 ok",
        "  two spaces",
        "ends with a space ",
        "a\r\n\nb\n",
        "<think>no</think>",
    ],
)
def test_pieces_make_up_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    seen, answer = run(generate(Scripted([*ids, ENDS[0]]), tokenizer, [1], [], Sampling()))
    assert answer.token_ids == tuple(ids)
    assert "".join(token.text for token in seen) == answer.text
    # mlx-lm's streaming detokenizer drops one space at the very beginning.
    assert answer.text == text.removeprefix(" ")


def test_nothing_is_shown_of_half_a_character(tokenizer: Any) -> None:
    ids = tokenizer.encode("漢", add_special_tokens=False)
    assert len(ids) == 3
    seen, _ = run(generate(Scripted([*ids, ENDS[0]]), tokenizer, [1], [], Sampling()))
    assert seen == [Token(ids[0], ""), Token(ids[1], ""), Token(ids[2], "漢")]


def test_half_a_character_at_the_end_is_told_last(tokenizer: Any) -> None:
    ids = tokenizer.encode("a漢", add_special_tokens=False)
    seen, answer = run(generate(Scripted(ids), tokenizer, [1], [], Sampling(max_tokens=3)))
    assert [token.token_id for token in seen] == [*ids[:3], None]
    assert "".join(token.text for token in seen) == answer.text == "a\ufffd"
    assert answer.token_ids == tuple(ids[:3])


def test_answers_at_the_same_time_do_not_mix_their_text(tokenizer: Any) -> None:
    texts = ("漢字 one", "é two 👩")
    scripts = [[*tokenizer.encode(text, add_special_tokens=False), ENDS[0]] for text in texts]
    live = [generate(Scripted(script), tokenizer, [1], [], Sampling()) for script in scripts]
    done: dict[int, str] = {}
    while len(done) < len(live):
        for number, generator in enumerate(live):
            try:
                next(generator)
            except StopIteration as end:
                done.setdefault(number, end.value.text if end.value else "")
    assert (done[0], done[1]) == texts


# --- Long questions ---------------------------------------------------------------------------------------------------

CHUNK = 8
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


@dataclass
class Recording:
    """A model whose forward passes are written down: how many tokens, and the last one's logits."""

    model: Any
    passes: list[int] = field(default_factory=list)
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @property
    def layers(self) -> Any:
        return self.model.layers

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        self.passes.append(ids.shape[1])
        self.logits.append(np.array(logits[0, -1]))
        return logits


def kept(prefix: PrefixCache, form: str) -> PrefixCache:
    """Return the cache itself, half of its rows, or heads that keep different numbers of rows."""
    half = np.arange(0, prefix.offset, 2, dtype=np.int32)
    heads = prefix.layers[0].kv_heads
    if form == "half":
        return prefix.select([[mx.array(half)] * heads] * len(prefix.layers))
    if form == "ragged":
        return prefix.select([[mx.array(half[number:]) for number in range(heads)]] * len(prefix.layers))
    return prefix


@pytest.mark.parametrize("form", ["dense", "half", "ragged"])
@pytest.mark.parametrize("count", LENGTHS)
def test_a_question_in_pieces_is_the_question_in_one(
    loaded: LoadedModel, prefix: PrefixCache, count: int, form: str
) -> None:
    ids = [int(token) for token in np.random.default_rng(count).integers(0, 300, count)]
    cache, sampling = kept(prefix, form), Sampling(max_tokens=6)
    whole, pieces = Recording(loaded.model), Recording(loaded.model)
    seen, expected = run(generate(whole, loaded.tokenizer, ids, cache.branch(count + 6), sampling, chunk=count))
    told, found = run(generate(pieces, loaded.tokenizer, ids, cache.branch(count + 6), sampling, chunk=CHUNK))
    assert found == expected
    before, rest = divmod(count - 1, CHUNK)
    assert pieces.passes == [CHUNK] * before + [rest + 1] + [1] * (len(whole.passes) - 1)
    assert told == [Token(None, "")] * before + seen
    assert [token.is_news for token in told] == [False] * before + [True] * len(seen)
    apart = [np.abs(one - other).max() for one, other in zip(whole.logits, pieces.logits[before:], strict=True)]
    # One that is no longer than a piece is read as ever, bit for bit.
    assert max(apart) <= (1e-5 if before else 0.0)


def test_nobody_asks_for_the_logits_of_what_stands_before_the_last_piece(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows:
        def __init__(self) -> None:
            self.state = mx.zeros((1, 1, 1, 4))

    evaluated: list[Any] = []
    monkeypatch.setattr("kvferry.engine.generate.mx.eval", evaluated.append)
    caches = [Rows(), Rows()]
    steps = generate(Scripted([75] * 9, layers=caches), tokenizer, list(range(20)), caches, Sampling(), chunk=CHUNK)
    assert [next(steps).is_news for _ in range(3)] == [False, False, True]
    assert [[id(array) for array in arrays] for arrays in evaluated] == [[id(one.state) for one in caches]] * 2


def test_closing_stops_between_the_pieces(tokenizer: Any) -> None:
    model = Scripted([75] * 9)
    steps = generate(model, tokenizer, list(range(50)), [], Sampling(), chunk=CHUNK)
    assert not next(steps).is_news
    assert not next(steps).is_news
    steps.close()
    assert model.read == [list(range(8)), list(range(8, 16))]


def test_a_loaded_model_reads_questions_in_its_own_chunks(loaded: LoadedModel, prefix: PrefixCache) -> None:
    ids = loaded.prompt.fresh("Who keeps the keys? " * 4)
    small = dataclasses.replace(loaded, prefill_chunk=10)
    told = run(small.answer(ids, prefix, prefix.offset, Sampling(max_tokens=3)))[0]
    assert sum(not token.is_news for token in told) == (len(ids) - 1) // 10 > 1
    assert all(token.is_news for token in run(loaded.answer(ids, prefix, prefix.offset, Sampling(max_tokens=3)))[0])


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_context_is_refused_at_once(loaded: LoadedModel, prefix: PrefixCache) -> None:
    ids = loaded.prompt.fresh("Who?")
    room = 512 - prefix.offset - len(ids)
    with pytest.raises(ContextOverflowError) as caught:
        loaded.answer(ids, prefix, prefix.offset, Sampling(max_tokens=room + 1))
    assert caught.value.message == (
        f"context: {prefix.offset} prefix + {len(ids)} question + {room + 1} answer tokens = 513, the model takes 512"
    )
    assert caught.value.fields == {"value": 513, "limit": 512}
    next(loaded.answer(ids, prefix, prefix.offset, Sampling(max_tokens=room)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0, must be at least 1"),
        ({"temperature": -0.1}, "temperature: -0.1, must be from 0 to 100"),
        ({"temperature": 100.5}, "temperature: 100.5, must be from 0 to 100"),
        ({"temperature": float("nan")}, "temperature: nan, must be from 0 to 100"),
        ({"top_p": 0.0}, "top_p: 0.0, must be above 0, at most 1"),
        ({"top_p": 1.1}, "top_p: 1.1, must be above 0, at most 1"),
        ({"top_p": float("nan")}, "top_p: nan, must be above 0, at most 1"),
        ({"seed": -1}, "seed: -1, must be from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed: 18446744073709551616, must be from 0 to 18446744073709551615"),
    ],
)
def test_impossible_sampling_names_the_field_and_what_is_allowed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(**wrong)
    assert caught.value.message == message
    assert caught.value.fields["field"] == next(iter(wrong))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_must_be_one_cache_a_layer(loaded: LoadedModel, prefix: PrefixCache, count: int) -> None:
    other = PrefixCache((prefix.layers * 2)[:count], prefix.offset)
    answer = loaded.answer([1], other, prefix.offset, Sampling())
    with pytest.raises(ModelError, match=f"cache: {count} caches for 2 layers"):
        next(answer)


def test_logits_come_for_every_fresh_token(loaded: LoadedModel, prefix: PrefixCache) -> None:
    together = forward(loaded.model, [5, 6, 7], prefix.branch(3))
    assert together.shape == (3, VOCABULARY)
    branch = prefix.branch(3)
    single = mx.concatenate([forward(loaded.model, [token], branch) for token in (5, 6, 7)])
    assert np.abs(np.array(together) - np.array(single)).max() < 1e-4
