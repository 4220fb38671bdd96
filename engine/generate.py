"""Answering: the question on a branch, in pieces when it is long, then token by token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p

from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine import head
from kvferry.engine.constrained import Constraint
from kvferry.engine.prefill import DEFAULT_PREFILL_CHUNK
from kvferry.engine.tensors import scalar

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0, and anything below ``MIN_TEMPERATURE``, takes the most likely token.
        top_p: nucleus mass in (0, 1]; 1 keeps every token.
        seed: of this answer's own random stream, an unsigned 64-bit number.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise _out_of_range("temperature", self.temperature, f"from 0 to {MAX_TEMPERATURE:g}")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "above 0, at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise _out_of_range("seed", self.seed, f"from 0 to {MAX_SEED}")


def _out_of_range(field: str, value: float, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {value}, must be {allowed}", field=field, value=value, allowed=allowed)


@dataclass(frozen=True)
class Token:
    """A generated token and the text it completes: empty within a character; without an id, text that was held back.

    With neither, nothing is known yet: a piece of the question was read. Nobody shows or counts that.
    """

    token_id: int | None
    text: str

    @property
    def is_news(self) -> bool:
        """Whether it says anything."""
        return self.token_id is not None or bool(self.text)


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def forward(model: Any, ids: Sequence[int], caches: Sequence[Any]) -> mx.array:
    """Run fresh tokens on a branch, or on mlx-lm's own caches.

    Returns:
        Logits [N, V] in the model's dtype.

    Raises:
        ModelError: when there is not one cache a layer. mlx-lm would leave the other layers out.
    """
    if len(caches) != len(model.layers):
        raise ModelError(f"cache: {len(caches)} caches for {len(model.layers)} layers")
    logits: mx.array = model(mx.array(list(ids), dtype=mx.uint32)[None], cache=list(caches))
    return logits[0]


def last_logits(model: Any, ids: Sequence[int], caches: Sequence[Any]) -> mx.array:
    """Run fresh tokens as ``forward`` does, and return the logits [V] of the last one."""
    with head.last_row_only(model):
        return forward(model, ids, caches)[-1]


def generate(
    model: Any,
    tokenizer: Any,
    ids: Sequence[int],
    caches: Sequence[Any],
    sampling: Sampling,
    *,
    constraint: Constraint | None = None,
    chunk: int = DEFAULT_PREFILL_CHUNK,
) -> Generator[Token, None, Answer]:
    """Answer a question.

    Closing the generator stops after the forward pass in flight.

    Args:
        model: an mlx-lm model.
        tokenizer: its mlx-lm tokenizer; its end-of-turn tokens stop the answer and are not part of it.
        ids: the question's ids, everything after the prefix.
        caches: one cache a layer, a branch or mlx-lm's own; they take the question's and the answer's rows.
        sampling: how tokens are chosen.
        constraint: what the answer must keep to, fresh and used up by it; a whole one that nothing can follow ends it.
            Where only one text can follow, the model reads it and is not asked.
        chunk: most tokens of the question a forward pass. One that is no longer is read in one.

    Yields:
        Each token as soon as it is known; between them, one that is no news for every piece but the last of what is
        read at once, question or forced text, so that other work can take turns.

    Returns:
        The whole answer.
    """
    detokenizer = tokenizer.detokenizer
    ends = tokenizer.eos_token_ids
    key = mx.random.key(sampling.seed)
    chosen: list[int] = []
    finish: FinishReason = "length"
    step = list(ids)
    while len(chosen) < sampling.max_tokens:
        step = yield from _read_to_last_piece(model, step, caches, chunk)
        key, subkey = mx.random.split(key)
        logits = last_logits(model, step, caches)
        if constraint is not None:
            logits = constraint.mask(logits)
        step = [int(scalar(_choose(logits, sampling, subkey)))]
        if step[0] in ends:
            finish = "stop"
            break
        if constraint is not None:
            constraint.accept(step[0])
            step += constraint.accept_forced(sampling.max_tokens - len(chosen) - 1)
        for token in step:
            chosen.append(token)
            detokenizer.add_token(token)
            yield Token(token, detokenizer.last_segment)
        if constraint is not None and constraint.finished:
            finish = "stop"
            break
    detokenizer.finalize()
    tail = detokenizer.last_segment
    if tail:
        yield Token(None, tail)
    return Answer(detokenizer.text, tuple(chosen), finish)


def _read_to_last_piece(
    model: Any, ids: Sequence[int], caches: Sequence[Any], chunk: int
) -> Generator[Token, None, list[int]]:
    """Run what stands before the last piece of what is to be read, and return that piece."""
    last = max(len(ids) - 1, 0) // chunk * chunk
    for start in range(0, last, chunk):
        forward(model, ids[start : start + chunk], caches)
        # Not the logits: nobody asks for these.
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        yield Token(None, "")
    return list(ids[last:])


def _choose(logits: mx.array, sampling: Sampling, key: mx.array) -> mx.array:
    # A smaller one would take log-probabilities out of float32's range, and then every token is as likely.
    if sampling.temperature < MIN_TEMPERATURE:
        return mx.argmax(logits, axis=-1)
    log_probabilities = logits.astype(mx.float32)
    log_probabilities = log_probabilities - mx.logsumexp(log_probabilities, keepdims=True)
    if sampling.top_p < 1.0:
        log_probabilities = apply_top_p(log_probabilities[None], sampling.top_p)[0]
    return mx.random.categorical(log_probabilities / sampling.temperature, key=key)
