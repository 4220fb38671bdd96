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
from kvferry.core.errors import InvalidRequestError, ModelError, QuotaError, RefusedError, TooLargeError
from kvferry.core.logs import logger
from kvferry.core.manifest import Scalar
from kvferry.core.progress import Progress
from kvferry.core.stored import Stored
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.sender import link, registry
from kvferry.sender.artifacts import Artifact
from kvferry.sender.auto import candidates
from kvferry.sender.auto.candidates import Candidate
from kvferry.sender.auto.decision import Decision
from kvferry.sender.auto.estimates import QUESTION_TOKENS, Conditions, Text, estimate
from kvferry.sender.link import Survey
from kvferry.sender.parity import PROBE_QUESTION
from kvferry.sender.parts import SenderParts
from kvferry.sender.reading import Reading
from kvferry.sender.sending import Send, Sending, progress_response
from kvferry.sender.text.zstd_text import ZstdParameters

NAME = "auto"
# What another form may still get round. A receiver that is gone, or a broken disk, is none of it.
_GIVES_WAY = (RefusedError, ModelError, TooLargeError, QuotaError)


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
            KvferryError: whatever fails for another reason than the form.
        """
        yield progress_response(Progress("tokenise", 0, len(send.reading.text)))
        decision = await self._decide(send, quality)
        while True:
            chosen, start = decision.best(), time.perf_counter()
            send.auto = decision.choice(chosen)
            send.replaces, send.fallback_reason = decision.fallback(chosen)
            try:
                async with contextlib.aclosing(self._carry(send, chosen)) as steps:
                    async for response in steps:
                        yield response
            except _GIVES_WAY as error:
                self._passed_over(chosen, error.message)
                if not decision.give_way(chosen, error.message, (time.perf_counter() - start) * 1000):
                    raise
                send.start_over()
            else:
                break
        self._parts.metrics.chosen(quality, chosen.id)
        self._log.info("chosen", method=chosen.id, quality=quality, why=explain(send.auto))

    async def _carry(self, send: Send, chosen: Candidate) -> AsyncGenerator[pb.SendResponse, None]:
        made = self._sending.make(send, chosen.method, chosen.parameters)
        async with contextlib.aclosing(made) as steps:
            async for response in steps:
                yield response
        empty = _without_facts(send.made.stored)
        if empty:
            raise ModelError(empty)
        async with contextlib.aclosing(self._sending.deliver(send)) as steps:
            async for response in steps:
                yield response

    async def _decide(self, send: Send, quality: Quality) -> Decision:
        start, parts, reading = time.perf_counter(), self._parts, send.reading
        model = parts.model
        found = await link.survey(send.receiver, send.security, parts.config.rpc_seconds, parts.links, parts.metrics)
        decision = Decision(quality, found, model.speed.prefill_tokens_per_second)
        zstd_bytes, zstd_ms = await asyncio.to_thread(_compressed, reading.text)
        text = await parts.worker.run(partial(_measured, reading, zstd_bytes, zstd_ms))
        fitting: list[Candidate] = []
        for candidate in candidates.allowed(quality):
            why = candidates.misfit(candidate, model.profile, found.node, text.prefix_tokens)
            if why:
                self._pass_over(decision, candidate, why)
            else:
                fitting.append(candidate)
        now, made = await parts.worker.run(partial(self._at_hand, reading, found, decision, fitting))
        for candidate in fitting:
            why = _without_facts(made[candidate].stored) if candidate in made else ""
            if why:
                self._pass_over(decision, candidate, why)
            else:
                decision.add(candidate, estimate(candidate, text, now))
        decision.deciding_ms = (time.perf_counter() - start) * 1000
        return decision

    def _at_hand(
        self, reading: Reading, found: Survey, decision: Decision, fitting: list[Candidate]
    ) -> tuple[Conditions, dict[Candidate, Artifact]]:
        made: dict[Candidate, Artifact] = {}
        for candidate in fitting:
            # What stands in for another method is an artifact of its own.
            replaces, _ = decision.fallback(candidate)
            artifact = self._parts.maker.find(candidate.method, reading, candidate.parameters, replaces)
            if artifact is not None:
                made[candidate] = artifact
        model = self._parts.model
        now = Conditions(
            link=found.link,
            sender_tokens_per_second=model.speed.prefill_tokens_per_second,
            receiver_tokens_per_second=found.node.prefill_tokens_per_second,
            sender_decode_tokens_per_second=model.speed.decode_tokens_per_second,
            profile=model.profile,
            cached=self._parts.residency.holds(reading.prefix.ids),
            made={candidate: artifact.stored.manifest.payload.length for candidate, artifact in made.items()},
        )
        return now, made

    def _pass_over(self, decision: Decision, candidate: Candidate, reason: str) -> None:
        self._passed_over(candidate, reason)
        decision.pass_over(candidate, reason)

    def _passed_over(self, candidate: Candidate, reason: str) -> None:
        self._parts.metrics.passed_over(candidate.id)
        self._log.warning("passed over", method=candidate.id, parameters=candidate.written, reason=reason)


def _measured(reading: Reading, zstd_bytes: int, zstd_ms: float) -> Text:
    prompt = reading.model.prompt
    return Text(
        prefix_tokens=reading.prefix.tokens,
        tokens=prompt.count(reading.text),
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


def _without_facts(stored: Stored) -> str:
    """Return why an artifact of evidence is of no use; "" for one with a confirmed fact, and for any other form."""
    outcome = stored.manifest.method.params
    if stored.manifest.form != "evidence" or outcome.get("outcome.confirmed"):
        return ""
    return f"the document confirms none of the {outcome.get('outcome.facts', 0)} facts that the sender's model wrote"
