"""From an artifact of references and a question to what the receiver's model reads, and to what that cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core import container
from kvferry.core.addresses import Address
from kvferry.core.errors import KvferryError, LookUpError
from kvferry.core.evidence import Reference
from kvferry.core.ledger import Lookups
from kvferry.core.logs import logger
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.stored import Stored
from kvferry.receiver import lookups, reconstruct
from kvferry.receiver.answering import Answerer
from kvferry.receiver.lookups import Wanted
from kvferry.receiver.reconstruct import Message
from kvferry.receiver.span_client import SpanClient, Spent

_MAX_NAME = 80


@dataclass(frozen=True)
class Question:
    """What a look-up must know of a question.

    Attributes:
        text: as it was asked.
        sender: where to look passages up; None is the configured one.
        allow_fallback: do without what cannot be had.
    """

    text: str
    sender: Address | None = None
    allow_fallback: bool = False


@dataclass(frozen=True)
class Found:
    """What a look-up came to.

    Attributes:
        message: for the model to read.
        lookups: for the ledger.
        choose_ms: reading the references and choosing among them.
        problem: why passages are missing; None when they are not.
    """

    message: Message
    lookups: Lookups
    choose_ms: float
    problem: str | None = None


class Finder:
    """Follows the references of artifacts."""

    def __init__(self, answerer: Answerer, client: SpanClient, metrics: ReceiverMetrics) -> None:
        self._answerer = answerer
        self._client = client
        self._metrics = metrics
        self._log = logger("receiver")

    async def find(self, stored: Stored, question: Question) -> Found:
        """Return what to read for a question. Nothing here waits for the worker's thread, or stops the loop.

        Raises:
            ContainerError: when stored bytes are no longer those of the manifest.
            RefusedError: when the artifact does not fit the model that runs now.
            LookUpError: when the passages cannot be had.
        """
        start = time.perf_counter()
        system, wanted = await asyncio.to_thread(self._choose, stored, question.text)
        choose_ms = (time.perf_counter() - start) * 1000
        if not wanted.references:
            self._metrics.looked_up("no_hit")
            return Found(_message(stored, system, wanted, []), Lookups(hit=False), choose_ms)
        sender, spent = question.sender or self._client.configured, Spent()
        texts: list[str] = []
        problem: str | None = None
        try:
            texts = await self._fetch(sender, stored, wanted, spent)
        except LookUpError as error:
            if not question.allow_fallback:
                raise
            problem = error.message
            self._log.warning("look-up failed", artifact=stored.artifact_id.hex(), reason=problem)
        count = wanted.found(len(texts))
        account = Lookups(
            count=count,
            calls=spent.calls,
            bytes=spent.sent + spent.received,
            text_bytes=sum(len(text.encode("utf-8")) for text in texts),
            ms=spent.ms,
            hit=True,
            missing=tuple(map(_name, wanted.references)) if problem else (),
            left_out=0 if problem else len(wanted.references) - count,
        )
        return Found(_message(stored, system, wanted, texts), account, choose_ms, problem)

    async def _fetch(self, sender: Address, stored: Stored, wanted: Wanted, spent: Spent) -> list[str]:
        document, outcome = stored.manifest.document.digest, "cancelled"
        try:
            texts = await self._client.fetch(sender, document, wanted.places, lookups.MAX_BYTES, spent)
            outcome = "fetched"
        except KvferryError as cause:
            outcome = "failed"
            raise _failure(sender, wanted.references, cause) from cause
        finally:
            self._metrics.looked_up(outcome, spent.sent, spent.received, spent.ms / 1000)
        return texts

    def _choose(self, stored: Stored, question: str) -> tuple[str, Wanted]:
        self._answerer.check_fit(stored)
        system = reconstruct.system(stored.manifest, stored.sections)
        references = reconstruct.references(stored.manifest, stored.sections).references
        return system, lookups.choose(references, question, stored.manifest.document.characters)


def _message(stored: Stored, system: str, wanted: Wanted, texts: list[str]) -> Message:
    excerpts = lookups.put_together(wanted, texts, stored.manifest.document.characters)
    return Message(system, excerpts.text, container.EXCERPTS, excerpts.spans)


def _failure(sender: Address, references: Iterable[Reference], cause: KvferryError) -> LookUpError:
    names = "; ".join(map(_name, references))
    return LookUpError(
        f"passages cannot be had from {sender}: {cause.message}; missing: {names}",
        references=names,
        sender=str(sender),
        reason=cause.code,
    )


def _name(reference: Reference) -> str:
    """Return what a reference is about, on one line and not too long."""
    text = " ".join(f"{reference.entity} {reference.attribute}".split())
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"
