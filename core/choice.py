"""What a sender weighed when it was left to choose the method ("auto"). It travels with the account of the artifact.

docs/ledger.md explains each field, docs/methods.md how a time is estimated.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

Quality = Literal["exact", "near", "reduced"]
QUALITIES: tuple[Quality, ...] = get_args(Quality)
MAX_REASON_CHARACTERS = 1024

# It comes from another machine, and its numbers go into sums.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Duration = Annotated[float, Meta(ge=0, le=1e12)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]
Name = Annotated[str, Meta(max_length=256)]


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a method is expected to cost until the first token of the first answer.

    Attributes:
        method, form: such as "B2", "kv".
        parameters: those that are given to it, as "bits=8"; "" where all have their defaults.
        bytes: of the payload.
        sender_ms: reading, the method's own work and writing the artifact; 0 if it was made before.
        transfer_ms: the round trips of a send, and the payload at the link's speed.
        receiver_ms: reading the text, or rebuilding the cache, then the question.
        first_token_ms: the sum of the three.
    """

    method: Name
    form: Name
    parameters: Name
    bytes: Count
    sender_ms: Duration
    transfer_ms: Duration
    receiver_ms: Duration
    first_token_ms: Duration


class LinkSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way from a sender to a receiver: an empty call there and back, and bytes a second beyond that."""

    rtt_ms: Duration
    bytes_per_second: Rate


class PassedOver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method that the quality bound allows and that could not be used.

    Attributes:
        method, form, parameters: as in ``Estimate``.
        reason: why; where two values differ, both.
        spent_ms: lost on the attempt; 0 when it was known beforehand.
    """

    method: Name
    form: Name
    parameters: Name
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]
    spent_ms: Duration = 0.0


class AutoChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice and what it rests on.

    Attributes:
        quality: the bound that was asked for.
        chosen: what was delivered; one of ``estimates``.
        estimates: of everything that could be used, as far as was known beforehand.
        passed_over: the rest of what the bound allows, and whatever failed on the way.
        link: to the receiver, as measured.
        sender_tokens_per_second, receiver_tokens_per_second: how fast either model reads a prompt.
        probe_bytes: messages of Describe and Measure, both ways; 0 of Measure where the link was measured before.
        deciding_ms: what the choice itself took. No estimate has it.
        reused: the artifact was made by an earlier send, so nothing was spent on making it.
    """

    quality: Quality
    chosen: Estimate
    estimates: Annotated[tuple[Estimate, ...], Meta(max_length=32)]
    passed_over: Annotated[tuple[PassedOver, ...], Meta(max_length=32)]
    link: LinkSpeed
    sender_tokens_per_second: Rate
    receiver_tokens_per_second: Rate
    probe_bytes: Count
    deciding_ms: Duration
    reused: bool = False


def explain(choice: AutoChoice) -> str:
    """Return in one line why a method was chosen."""
    chosen = choice.chosen
    failed = {(item.method, item.parameters) for item in choice.passed_over}
    others = [item for item in choice.estimates if item != chosen and (item.method, item.parameters) not in failed]
    line = (
        f"{_named(chosen)}: first token expected in {chosen.first_token_ms:,.0f} ms "
        f"(sender {chosen.sender_ms:,.0f}, transfer {chosen.transfer_ms:,.0f}, receiver {chosen.receiver_ms:,.0f})"
    )
    if others:
        following = min(others, key=lambda item: item.first_token_ms)
        line += f"; {_named(following)} in {following.first_token_ms:,.0f} ms"
    return line


def _named(estimate: Estimate) -> str:
    return f"{estimate.method} {estimate.parameters}".strip()
