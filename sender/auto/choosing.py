"""Sending by whatever method is the quickest within a quality bound, and by the next form when that fails.

A choice gives way in one direction: a cache, then evidence, then text. Each step is told with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial

import msgspec

from kvferry.core import container
from kvferry.core.addresses import Address
from kvferry.core.choice import Quality, explain
from kvferry.core.compat import ReasonCode, refused_for
from kvferry.core.errors import (
    AuthenticationError,
    CancelledError,
    InvalidRequestError,
    KvferryError,
    ModelError,
    QuotaError,
    RefusedError,
    TooLargeError,
)
from kvferry.core.logs import logger
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress
from kvferry.engine.prompt import LABELS
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.sender import link, registry
from kvferry.sender.auto import candidates
from kvferry.sender.auto.candidates import Candidate
from kvferry.sender.auto.decision import Decision
from kvferry.sender.auto.estimates import QUESTION_TOKENS, Conditions, Text, estimate, holds_everything
from kvferry.sender.auto.fitting import Ends
from kvferry.sender.link import Survey
from kvferry.sender.parity import PROBE_QUESTION
from kvferry.sender.parts import SenderParts
from kvferry.sender.reading import Reading
from kvferry.sender.sending import Send, Sending, progress_response
from kvferry.sender.text.counted import BudgetParameters
from kvferry.sender.text.zstd_text import ZstdParameters

NAME = "auto"
# What another form may still get round. A receiver that is gone, or a broken disk, is none of it.
_GIVES_WAY = (RefusedError, ModelError, TooLargeError, QuotaError)
_BUDGET = "budget"
_PAYLOAD = "payload."


class AutoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``quality`` bounds what may be chosen: see ``kvferry.sender.auto.candidates.ALLOWED``."""

    quality: Quality = "exact"


def is_meant(method: str) -> bool:
    """Whether a request leaves the method to the sender."""
    return method.casefold() == NAME


def check(given: Mapping[str, Scalar], receiver: Address) -> Quality:
    """Return the quality bound of a request.

    Raises:
        InvalidRequestError: when a parameter is another one or out of range, or the receiver cannot be asked.
    """
    quality = registry.parameters_of(AutoParameters, NAME, given).quality
    if receiver.tcp:
        raise InvalidRequestError(
            f"receiver: {receiver}: method auto asks the receiver what it runs, and a TCP worker only takes artifacts "
            "in; give the host:port of its gRPC service, or name a method",
            field="receiver",
            value=str(receiver),
        )
    return quality


class Choosing:
    """Chooses for one sender."""

    def __init__(self, parts: SenderParts, sending: Sending) -> None:
        self._parts = parts
        self._sending = sending
        self._log = logger("sender")

    async def run(self, send: Send, quality: Quality) -> AsyncGenerator[pb.SendResponse, None]:
        """Choose, send, and give way where that fails.

        Raises:
            RefusedError: when nothing that the bound allows can be used.
            ContextOverflowError: when that is certain of the document's length alone.
            KvferryError: whatever fails for another reason than the form.
        """
        yield progress_response(Progress("tokenise", 0, len(send.reading.text)))
        decision, ends = await self._decide(send, quality)
        while True:
            chosen, start = decision.best(), time.perf_counter()
            send.auto = decision.choice(chosen)
            send.replaces, send.fallback_reason = decision.fallback(chosen)
            try:
                async with contextlib.aclosing(self._carry(send, chosen, ends)) as steps:
                    async for response in steps:
                        yield response
            except (*_GIVES_WAY, InvalidRequestError) as error:
                if not self._goes_on(decision, chosen, error, (time.perf_counter() - start) * 1000):
                    raise
                send.start_over()
            else:
                break
        self._parts.metrics.chosen(quality, chosen.id)
        self._log.info("chosen", method=chosen.id, quality=quality, why=explain(send.auto))

    def _goes_on(self, decision: Decision, failed: Candidate, error: KvferryError, spent_ms: float) -> bool:
        """Leave what failed. Returns whether something else may do."""
        if not isinstance(error, InvalidRequestError):
            with_it = decision.give_way(failed, error.message, spent_ms, to_smaller=_is_size(error))
            self._tell(failed, error.message)
            for candidate in with_it:
                self._tell(candidate, f"gave way with {failed.id}")
            return bool(decision.open)
        # Nobody asked for this budget, and what is not enough for one method of this document may be for another.
        if error.fields.get("field") != _BUDGET:
            return False
        self._pass_over(decision, failed, error.message, spent_ms)
        return True

    async def _carry(self, send: Send, chosen: Candidate, ends: Ends) -> AsyncGenerator[pb.SendResponse, None]:
        made = self._sending.make(send, chosen.method, chosen.parameters)
        async with contextlib.aclosing(made) as steps:
            async for response in steps:
                yield response
        why = ends.useless(send.made.stored)
        if why:
            raise ModelError(why)
        async with contextlib.aclosing(self._sending.deliver(send)) as steps:
            async for response in steps:
                yield response

    async def _decide(self, send: Send, quality: Quality) -> tuple[Decision, Ends]:
        start, parts, reading = time.perf_counter(), self._parts, send.reading
        model = parts.model
        found = await link.survey(send.receiver, send.security, parts.config.rpc_seconds, parts.links, parts.metrics)
        uncounted = await self._count_for(send, quality)
        decision = Decision(quality, found, model.speed.prefill_tokens_per_second)
        if all(map(holds_everything, candidates.allowed(quality))):
            _check_length(reading, found)
        zstd_bytes, zstd_ms = await asyncio.to_thread(_compressed, reading.text)
        text = await parts.worker.run(partial(_measured, reading, zstd_bytes, zstd_ms))
        ends = Ends(model.profile, found.node, text)
        for candidate in candidates.allowed(quality):
            decision.consider(candidate)
            why = (_has_budget(candidate) and uncounted) or ends.misfit(candidate)
            if why:
                self._pass_over(decision, candidate, why)
        now = await parts.worker.run(partial(self._at_hand, reading, found, decision, ends))
        for candidate in decision.open:
            decision.price(candidate, estimate(candidate, text, now))
        decision.deciding_ms = (time.perf_counter() - start) * 1000
        return decision, ends

    async def _count_for(self, send: Send, quality: Quality) -> str:
        """Have budgets count with the receiver's tokenizer. Returns why they cannot; "" when they can."""
        if any(map(_has_budget, candidates.allowed(quality))):
            try:
                await self._sending.count_for(send)
            except (AuthenticationError, CancelledError):
                raise
            except KvferryError as error:
                # A receiver of before that call takes caches and whole texts all the same.
                return error.message
        return ""

    def _at_hand(self, reading: Reading, found: Survey, decision: Decision, ends: Ends) -> Conditions:
        made: dict[Candidate, int] = {}
        # What stands in for another method is an artifact of its own, and evidence may turn out to be of no use.
        for candidate in sorted(decision.open, key=lambda item: item.order):
            replaces, _ = decision.fallback(candidate)
            artifact = self._parts.maker.find(candidate.method, reading, candidate.parameters, replaces)
            if artifact is None:
                continue
            why = ends.useless(artifact.stored)
            if why:
                self._pass_over(decision, candidate, why)
            else:
                made[candidate] = artifact.stored.manifest.payload.length
        model = self._parts.model
        return Conditions(
            link=found.link,
            sender_tokens_per_second=model.speed.prefill_tokens_per_second,
            receiver_tokens_per_second=found.node.prefill_tokens_per_second,
            sender_decode_tokens_per_second=model.speed.decode_tokens_per_second,
            profile=model.profile,
            cached=self._parts.residency.holds(reading.prefix.ids),
            made=made,
        )

    def _pass_over(self, decision: Decision, candidate: Candidate, reason: str, spent_ms: float = 0.0) -> None:
        self._tell(candidate, reason)
        decision.pass_over(candidate, reason, spent_ms)

    def _tell(self, candidate: Candidate, reason: str) -> None:
        self._parts.metrics.passed_over(candidate.id)
        self._log.warning("passed over", method=candidate.id, parameters=candidate.written, reason=reason)


def _has_budget(candidate: Candidate) -> bool:
    return isinstance(candidate.parameters, BudgetParameters)


def _is_size(error: KvferryError) -> bool:
    """Whether something smaller may get round an error."""
    if not isinstance(error, RefusedError):
        return isinstance(error, TooLargeError | QuotaError)
    reasons = refused_for(error)
    return bool(reasons) and all(
        reason.code == ReasonCode.TOO_LARGE and reason.field.startswith(_PAYLOAD) for reason in reasons
    )


def _check_length(reading: Reading, found: Survey) -> None:
    """Refuse, before it is encoded, a document that certainly does not fit the receiver's context.

    Raises:
        ContextOverflowError: naming its characters and the limit.
    """
    # Another tokenizer may make fewer tokens of the same text.
    if reading.model.profile.tokenizer.vocab.hex() == found.node.tokenizer:
        reading.model.prompt.check_length(found.node.context_length, reading.text)


def _measured(reading: Reading, zstd_bytes: int, zstd_ms: float) -> Text:
    prompt = reading.model.prompt
    return Text(
        prefix_tokens=reading.prefix.tokens,
        tokens=reading.tokens,
        around_tokens=max(len(prompt.prefix("", reading.system, kind)) for kind in LABELS),
        question_tokens=len(prompt.fresh(reading.question)) if reading.question else QUESTION_TOKENS,
        probe_tokens=len(prompt.fresh(PROBE_QUESTION)),
        bytes=reading.document.bytes,
        characters=reading.document.characters,
        system_bytes=len(reading.system.encode("utf-8")),
        zstd_bytes=zstd_bytes,
        zstd_ms=zstd_ms,
    )


def _compressed(text: str) -> tuple[int, float]:
    start = time.perf_counter()
    frame = container.zstd_section(container.TEXT, text.encode("utf-8"), ZstdParameters().level)
    return frame.length, (time.perf_counter() - start) * 1000
