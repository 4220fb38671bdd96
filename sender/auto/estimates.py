"""How long each candidate would take until the first token of the first answer. docs/methods.md states the rules.

Milliseconds everywhere. What both ends do for every candidate alike (framing, digests of a small text, the network's
own start) is left out; so is what nobody can know beforehand, such as other work on the same machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvferry.core import container
from kvferry.core.choice import Estimate, LinkSpeed
from kvferry.core.compat import Profile
from kvferry.core.errors import UnknownMethodError
from kvferry.core.layout import Expected
from kvferry.sender.auto.candidates import Candidate
from kvferry.sender.kv import sizes
from kvferry.sender.kv.packing import PackingMethod
from kvferry.sender.kv.probes import INSTRUCTION_TOKENS
from kvferry.sender.kv.selecting import SelectingMethod
from kvferry.sender.text.counted import budget_tokens
from kvferry.sender.text.evidence_grammars import MAX_NAME, MAX_STATED, MAX_VALUE

ROUND_TRIPS = 3
"""Of a send: Offer, Put and Commit."""
WRITE_BYTES_PER_SECOND = 250e6
"""Packing, hashing and writing a cache at the sender."""
REBUILD_BYTES_PER_SECOND = 500e6
"""Reading, verifying and rebuilding a cache at the receiver."""
RANK_CHARACTERS_PER_SECOND = 100e3
"""A3 at work."""
QUESTION_TOKENS = 32
"""Of a question that is not known yet, with the header of its answer."""
FORCED_PER_READ = 4
"""Tokens of form and quotes that A5's model reads for each that it writes, and that the receiver's reads."""
EVIDENCE_CHARACTERS = MAX_STATED * (2 * MAX_NAME + MAX_VALUE)
"""Most that A5 writes, however large its budget."""


@dataclass(frozen=True)
class Text:
    """The document of a request, measured.

    Attributes:
        prefix_tokens: of template, system prompt and document.
        tokens: of the document alone.
        around_tokens: of template and system prompt around what is sent in the document's place, at most.
        question_tokens: of the question and the header of its answer.
        probe_tokens: of the parity probe.
        bytes, characters: of the document.
        system_bytes: of the system prompt.
        zstd_bytes: of the document as one frame, and ``zstd_ms`` what making it took.
    """

    prefix_tokens: int
    tokens: int
    around_tokens: int
    question_tokens: int
    probe_tokens: int
    bytes: int
    characters: int
    system_bytes: int
    zstd_bytes: int
    zstd_ms: float


@dataclass(frozen=True)
class Conditions:
    """What a choice depends on, the document apart.

    Attributes:
        link: to the receiver.
        sender_tokens_per_second, receiver_tokens_per_second: how fast either model reads a prompt.
        sender_decode_tokens_per_second: how fast the sender's writes.
        profile: of the sender's model.
        cached: the dense cache of the prefix is at hand.
        made: payload bytes of artifacts that were made before, by candidate.
    """

    link: LinkSpeed
    sender_tokens_per_second: float
    receiver_tokens_per_second: float
    sender_decode_tokens_per_second: float
    profile: Profile
    cached: bool = False
    made: Mapping[Candidate, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """What one candidate takes: payload bytes, milliseconds at the sender, and tokens and bytes at the receiver."""

    bytes: int
    sender_ms: float
    receiver_tokens: float
    rebuilt_bytes: int = 0


@dataclass(frozen=True)
class _Rule:
    """What a choice must know of a method.

    Attributes:
        work: what it takes.
        most: tokens of the material that it makes at most; None where a prompt holds the whole document, or its cache.
    """

    work: Callable[[Candidate, Text, Conditions], _Work]
    most: Callable[[Candidate, Text], int] | None = None


def prompt_tokens(candidate: Candidate, text: Text) -> int:
    """Return how many tokens of the receiver's context a candidate takes at most, before any question.

    Raises:
        UnknownMethodError: when nothing is known of the method.
    """
    most = _rule(candidate).most
    return text.prefix_tokens if most is None else text.around_tokens + most(candidate, text)


def holds_everything(candidate: Candidate) -> bool:
    """Whether a receiver's prompt holds the whole document, or its cache.

    Raises:
        UnknownMethodError: when nothing is known of the method.
    """
    return _rule(candidate).most is None


def estimate(candidate: Candidate, text: Text, now: Conditions) -> Estimate:
    """Return what a candidate is expected to take.

    Raises:
        UnknownMethodError: when nothing is known of the method.
    """
    work = _rule(candidate).work(candidate, text, now)
    made = now.made.get(candidate)
    size = work.bytes if made is None else made
    sender_ms = work.sender_ms if made is None else 0.0
    transfer_ms = ROUND_TRIPS * now.link.rtt_ms + _ms(size, now.link.bytes_per_second)
    receiver_ms = _ms(work.receiver_tokens, now.receiver_tokens_per_second)
    receiver_ms += _ms(work.rebuilt_bytes, REBUILD_BYTES_PER_SECOND)
    return Estimate(
        method=candidate.id,
        form=candidate.form,
        parameters=candidate.written,
        bytes=size,
        sender_ms=sender_ms,
        transfer_ms=transfer_ms,
        receiver_ms=receiver_ms,
        first_token_ms=sender_ms + transfer_ms + receiver_ms,
    )


def quickest(estimates: Iterable[tuple[Candidate, Estimate]]) -> tuple[Candidate, Estimate]:
    """Return the one with the earliest first token; among equals the first."""
    return min(estimates, key=lambda item: item[1].first_token_ms)


def _cache_work(candidate: Candidate, text: Text, now: Conditions) -> _Work:
    method, given = candidate.method, candidate.parameters
    packing = method.plan(now.profile, given) if isinstance(method, PackingMethod | SelectingMethod) else None
    rows, method_tokens = text.prefix_tokens, 0
    if isinstance(method, SelectingMethod):
        rows = budget_tokens(_budget(given), text.prefix_tokens)
        method_tokens = INSTRUCTION_TOKENS if method.observes(given) else 0
    size = sizes.planned_bytes(now.profile, text.prefix_tokens, min(rows, text.prefix_tokens), packing)
    tokens = (0 if now.cached else text.prefix_tokens) + method_tokens + text.probe_tokens
    sender_ms = _ms(tokens, now.sender_tokens_per_second) + _ms(size, WRITE_BYTES_PER_SECOND)
    # The receiver repeats the probe on the first cache that it rebuilds, then it runs the question.
    return _Work(size, sender_ms, text.probe_tokens + text.question_tokens, size)


def _text_work(_: Candidate, text: Text, __: Conditions) -> _Work:
    return _Work(_message_bytes(text, text.bytes), 0.0, text.prefix_tokens + text.question_tokens)


def _compressed_work(_: Candidate, text: Text, __: Conditions) -> _Work:
    return _Work(_message_bytes(text, text.zstd_bytes), text.zstd_ms, text.prefix_tokens + text.question_tokens)


def _ranked_work(candidate: Candidate, text: Text, _: Conditions) -> _Work:
    return _shortened(text, _spent(candidate, text), _ms(text.characters, RANK_CHARACTERS_PER_SECOND))


def _evidence_work(candidate: Candidate, text: Text, now: Conditions) -> _Work:
    written = min(_stated(candidate, text), now.profile.context_length)
    reading_ms = _ms(text.prefix_tokens + FORCED_PER_READ * written, now.sender_tokens_per_second)
    return _shortened(text, written, reading_ms + _ms(written, now.sender_decode_tokens_per_second))


def _shortened(text: Text, tokens: int, sender_ms: float) -> _Work:
    size = _message_bytes(text, round(text.bytes * _share(tokens, text)))
    return _Work(size, sender_ms, text.prefix_tokens - text.tokens + tokens + text.question_tokens)


def _spent(candidate: Candidate, text: Text) -> int:
    return min(budget_tokens(_budget(candidate.parameters), text.tokens), text.tokens)


def _stated(candidate: Candidate, text: Text) -> int:
    # Facts are worded like the document, so they take as many tokens a character.
    longest = math.ceil(EVIDENCE_CHARACTERS * text.tokens / text.characters) if text.characters else 0
    return min(budget_tokens(_budget(candidate.parameters), text.tokens), longest)


_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "B1": _Rule(_cache_work),
        "B2": _Rule(_cache_work),
        "B5": _Rule(_cache_work),
        "B9": _Rule(_cache_work),
        "A1": _Rule(_text_work),
        "A7": _Rule(_compressed_work),
        "A3": _Rule(_ranked_work, _spent),
        "A5": _Rule(_evidence_work, _stated),
    }
)
"""By id. Whatever a bound allows must be here: there is no rule that would do for any method."""


def _rule(candidate: Candidate) -> _Rule:
    found = _RULES.get(candidate.id)
    if found is None:
        raise UnknownMethodError(
            f"method: auto cannot tell what {candidate.id} takes", field="method", value=candidate.id
        )
    return found


def _budget(parameters: Any) -> float:
    budget: float = parameters.budget
    return budget


def _share(tokens: int, text: Text) -> float:
    return tokens / text.tokens if text.tokens else 0.0


def _message_bytes(text: Text, material: int) -> int:
    return sizes.total(
        [Expected(container.SYSTEM, "U8", (text.system_bytes,)), Expected(container.TEXT, "U8", (material,))]
    )


def _ms(amount: float, per_second: float) -> float:
    return amount * 1000 / per_second
