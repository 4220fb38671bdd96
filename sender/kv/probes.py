"""Who looks at the prefix, for methods that score its rows by attention: an instruction, the question, its own end.

A probe runs in a pass of its own on a branch of the cache, which it does not change; what it costs is part of the
method's time. An instruction or a question is no part of the prefix, so no row of it is kept.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import cycle, islice

from kvferry.engine.cache import PrefixCache
from kvferry.engine.dense import DenseLayer
from kvferry.engine.model import LoadedModel
from kvferry.engine.observe import Window, window
from kvferry.engine.prompt import LOOKING_INSTRUCTION
from kvferry.sender.kv.selecting import Subject
from kvferry.sender.reading import asked

INSTRUCTION_TOKENS = 32
"""Of the instruction, the first ones count."""


def instruction_ids(model: LoadedModel) -> list[int]:
    """Return the first 32 tokens of the instruction, which starts over for a tokenizer with fewer."""
    ids = model.tokenizer.encode(LOOKING_INSTRUCTION, add_special_tokens=False)
    return list(islice(cycle(ids), INSTRUCTION_TOKENS))


def question_ids(subject: Subject, method: str) -> list[int]:
    """Return what the receiver will run behind the prefix: the question and the header of the answer.

    Raises:
        InvalidRequestError: when the request has no question.
    """
    return subject.model.prompt.fresh(asked(subject.question, method))


def behind(subject: Subject, ids: list[int]) -> Generator[int, None, list[Window]]:
    """Return what tokens ask, in every layer, when they run behind the prefix; yields as ``window`` does.

    Raises:
        ContextOverflowError: when prefix and tokens exceed the model's context.
    """
    subject.model.check_context(subject.rows, len(ids), 0)
    return (yield from _run(subject, subject.cache, ids))


def at_end(subject: Subject, count: int) -> Generator[int, None, list[Window]]:
    """Return what the last ``count`` tokens of the prefix ask, in every layer; at least one stands before them."""
    return (yield from _run(subject, _cut(subject, subject.rows - count), subject.ids[-count:]))


def _run(subject: Subject, cache: PrefixCache, ids: list[int]) -> Generator[int, None, list[Window]]:
    return window(subject.model.model, cache, ids, subject.model.prefill_chunk)


def _cut(subject: Subject, rows: int) -> PrefixCache:
    layers = (DenseLayer(layer.keys[:, :, :rows], layer.values[:, :, :rows]) for layer in subject.layers)
    return PrefixCache(tuple(layers), rows)
