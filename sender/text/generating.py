"""Letting the sender's own model write about the document, within a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvferry.core.errors import ContextOverflowError
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress, relay
from kvferry.engine import prompt
from kvferry.engine.constrained import Constraint
from kvferry.engine.content import ContentEncoder
from kvferry.engine.generate import Answer, Sampling, Token
from kvferry.sender.reading import Reading
from kvferry.sender.text.counted import within

_HALF_A_CHARACTER = "\ufffd"
# Bytes in UTF-8, each of which may be a token.
_TOKENS_OF_A_CHARACTER = 4
_OWN_TOKENS = 32
"""Most tokens of one tokenizer in place of one of another: some texts take none, and would be written for ever."""
_PART = 64
"""A text that grew by less than this part of it is not counted anew: else counting would take its square."""


@dataclass(frozen=True)
class Generated:
    """What the model wrote.

    Attributes:
        text: at most as many of the receiver's tokens as the budget.
        generated: tokens that the model took.
        cap_hit: whether it had more to say.
    """

    text: str
    generated: int
    cap_hit: bool


def generate(reading: Reading, system: str, instruction: str, budget: int) -> Generator[Progress, None, Generated]:
    """Have the model write what a reader is given, within the budget; see ``write``.

    What is returned is counted anew, because a model may spell in more tokens, or in fewer, than its tokenizer.

    Raises:
        ContextOverflowError: when document, instruction and budget do not fit the context. Nothing is cut silently.
    """
    check_room(reading, system, instruction, budget)
    answer = yield from write(reading, system, instruction, budget)
    return _finish(reading, answer, budget)


def check_room(reading: Reading, system: str, instruction: str, most: int, *, given: bool = True) -> None:
    """Refuse, before the document is read, what ``write`` would not have room for.

    Args:
        reading: the document.
        system: the system prompt.
        instruction: what is to be done.
        most: tokens to be written. Of a budget in those of another tokenizer nobody knows how many of the model's own
            they are, and room for one must do.
        given: whether ``most`` is the request's budget; else they are the model's own, and nothing but a shorter
            document makes room.

    Raises:
        ContextOverflowError: when document, instruction and ``most`` do not fit the context; the field is what the
            request can change.
    """
    prompt, limit = reading.model.prompt, reading.model.profile.context_length
    instructed = len(prompt.prefix("", system)) + len(prompt.task(instruction))
    room = limit - reading.tokens - instructed
    if given and not reading.counts_own:
        most, given = 1, False
    if most <= room:
        return
    if given:
        raise ContextOverflowError(
            f"budget: {most} tokens to write, but of the model's context of {limit} the document takes "
            f"{reading.tokens} and the instruction {instructed}, which leaves {max(0, room)}",
            field="budget",
            value=most,
            limit=max(0, room),
        )
    raise ContextOverflowError(
        f"document: it takes {reading.tokens} tokens, and of the model's context of {limit} the instruction takes "
        f"{instructed} and what is to be written {most}, which leaves {max(0, limit - instructed - most)}",
        field="document",
        value=reading.tokens,
        limit=max(0, limit - instructed - most),
    )


def write(
    reading: Reading,
    system: str,
    instruction: str,
    most: int,
    constraint: Constraint | None = None,
    *,
    filled: Callable[[], int] | None = None,
) -> Generator[Progress, None, Answer]:
    """Read the document under a prompt of one's own and carry an instruction out, greedily.

    ``check_room`` says beforehand whether there is room for it.

    Args:
        reading: the document.
        system: the system prompt.
        instruction: what is to be done.
        most: tokens that may be written, of the reader's. Where those are not the model's own, it writes until the text
            is that long, or its context full, or until it has written ``_OWN_TOKENS`` of its own for each.
        constraint: what the answer must keep to, made by the same model; it is used up.
        filled: says how many of ``most`` are used, where the constraint counts them in its own way and ends the answer
            by itself. What is generated may then fill the context.

    Raises:
        ContextOverflowError: when document, instruction and ``most`` do not fit the context. Nothing is cut silently.
    """
    model = reading.model
    prefix, fresh = model.prompt.prefix(reading.text, system), model.prompt.task(instruction)
    room, meter = model.profile.context_length - len(prefix) - len(fresh), None
    if filled is None and reading.counts_own:
        room = most
    elif filled is None:
        room, meter = min(room, most * _OWN_TOKENS), _Meter(reading.counter, most)
    caches = yield from reading.read(prefix)
    steps = model.answer(fresh, caches, len(prefix), Sampling(max_tokens=room), constraint)
    if meter is not None:
        steps, filled = _until(steps, meter.is_full), meter.used
    done = 0

    def so_far(token: Token) -> Progress:
        nonlocal done
        done += token.token_id is not None
        return Progress("method", min(done if filled is None else filled(), most), most)

    yield Progress("method", 0, most)
    answer = yield from relay(steps, so_far)
    yield Progress("method", most, most)
    return answer


class _Meter:
    """Counts the tokens of a text that grows, no more often than it may have become too long."""

    def __init__(self, counter: ContentEncoder, most: int) -> None:
        self._counter = counter
        self._most = most
        self._counted = 0
        self._used = 0

    def used(self) -> int:
        """Return how many it had when it was last counted."""
        return self._used

    def is_full(self, text: str) -> bool:
        """Whether it has more than it may: the last of as many may still become longer."""
        grown = len(text) - self._counted
        if grown * _TOKENS_OF_A_CHARACTER > self._most - self._used and grown * _PART > len(text):
            self._counted, self._used = len(text), self._counter.count(text)
        return self._used > self._most


def _until(steps: Generator[Token, None, Answer], is_full: Callable[[str], bool]) -> Generator[Token, None, Answer]:
    """Pass an answer on until its text is too long: it then ends as one that has no room left."""
    text, ids = "", []
    with contextlib.closing(steps):
        while True:
            try:
                token = next(steps)
            except StopIteration as end:
                whole: Answer = end.value
                return whole
            yield token
            text += token.text
            if token.token_id is not None:
                ids.append(token.token_id)
            if is_full(text):
                return Answer(text, tuple(ids), "length")


def _finish(reading: Reading, answer: Answer, budget: int) -> Generated:
    cut = answer.finish_reason == "length"
    whole = answer.text.rstrip(_HALF_A_CHARACTER) if cut else answer.text
    text = within(reading.counter, whole.strip(), budget)
    return Generated(text, len(answer.token_ids), cut or text != whole.strip())


def outcome(reading: Reading, made: Generated) -> dict[str, Scalar]:
    """Return what a manifest says of a text that was generated."""
    return writer(reading) | {
        "tokens": reading.counter.count(made.text),
        "generated": made.generated,
        "cap_hit": made.cap_hit,
    }


def writer(reading: Reading) -> dict[str, Scalar]:
    """Return what a manifest says of who wrote, and from which instructions."""
    return {"checkpoint": reading.model.profile.model.weights.hex(), "instructions": prompt.instructions().hex()}
