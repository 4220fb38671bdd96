"""Having an artifact's cache at hand. What cannot be trusted is put aside and, if the request allows it, read again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from dataclasses import replace
from weakref import WeakValueDictionary

from kvferry.core import stored as stored_files
from kvferry.core.errors import (
    ContainerError,
    IntegrityError,
    KvferryError,
    ParityError,
    QuarantinedError,
    StoreError,
    TransferError,
)
from kvferry.core.logs import logger
from kvferry.core.metrics import ReceiverMetrics
from kvferry.core.store import ArtifactStore
from kvferry.core.stored import Stored
from kvferry.core.threads import off_loop
from kvferry.engine.worker import Worker
from kvferry.receiver.answering import WITHOUT_PASSAGES, Answerer, Preparation
from kvferry.receiver.looking_up import Finder, Question
from kvferry.receiver.span_client import SpanClient

_READ_EVERY_TIME = ("prefill", "look_up")


class Preparer:
    """Prepares artifacts for questions, each one once however many questions wait for it."""

    def __init__(
        self, store: ArtifactStore, answerer: Answerer, worker: Worker, metrics: ReceiverMetrics, spans: SpanClient
    ) -> None:
        self._finder = Finder(answerer, spans, metrics)
        self._store = store
        self._answerer = answerer
        self._worker = worker
        self._metrics = metrics
        self._log = logger("receiver")
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, artifact_id: bytes, question: Question) -> tuple[Stored, Preparation]:
        """Return an artifact and its cache.

        Args:
            artifact_id: of a published artifact, or of one that was put aside.
            question: that the cache is for. Where it allows a fallback, the prefix is read again from its ids when the
                cache cannot be trusted.

        Raises:
            NotFoundError: when the artifact is not here.
            QuarantinedError: when it was put aside earlier.
            ContainerError: when stored bytes are no longer those of the manifest.
            ParityError: when the rebuilt cache does not give what the sender's gave.
            RefusedError: when the artifact does not fit the model that runs now.
            LookUpError: when passages that the question needs cannot be had.
        """
        await asyncio.to_thread(self._store.sweep)
        async with off_loop(self._store.pinned(artifact_id)):
            try:
                return await self._prepare_kept(artifact_id, question)
            except (ContainerError, ParityError) as error:
                await self._put_aside(artifact_id, error)
                cause: KvferryError = error
            except QuarantinedError as error:
                cause = error
            if not question.allow_fallback:
                raise cause
            return await self._read_again(artifact_id, cause)

    async def _prepare_kept(self, artifact_id: bytes, question: Question) -> tuple[Stored, Preparation]:
        stored = await asyncio.to_thread(self._store.get, artifact_id)
        # What is read anew for every question has nothing to wait for.
        reads = stored.manifest.method.consume in _READ_EVERY_TIME
        async with contextlib.nullcontext() if reads else self._turn(artifact_id):
            try:
                return stored, await self._prepare_stored(stored, question)
            except StoreError as error:
                # Another question may have found damage and put the files aside under our hands: then say that.
                await asyncio.to_thread(self._store.get, artifact_id)
                problem = await asyncio.to_thread(stored_files.problem, stored.path, artifact_id)
                if problem:
                    raise IntegrityError(problem) from error
                raise

    async def _prepare_stored(self, stored: Stored, question: Question) -> Preparation:
        if stored.manifest.method.consume != "look_up":
            return await self._run(self._answerer.prepare(stored))
        found = await self._finder.find(stored, question)
        preparation = await self._run(self._answerer.prepare(stored, found.message))
        return replace(
            preparation,
            reconstruct_ms=preparation.reconstruct_ms + found.choose_ms,
            lookups=found.lookups,
            fallback_reason=found.problem,
            fallback=WITHOUT_PASSAGES,
        )

    async def _put_aside(self, artifact_id: bytes, error: KvferryError) -> None:
        self._metrics.damaged("stored")
        try:
            await asyncio.to_thread(self._store.quarantine, artifact_id, error.message)
        except StoreError as failure:
            self._log.error("not quarantined", artifact=artifact_id.hex(), reason=error.message, why=failure.message)
            raise error from failure
        self._log.error("quarantined", artifact=artifact_id.hex(), reason=error.message)

    async def _read_again(self, artifact_id: bytes, cause: KvferryError) -> tuple[Stored, Preparation]:
        stored = await asyncio.to_thread(self._store.get_quarantined, artifact_id)
        if stored.manifest.prefix is None:
            # A text is its own fallback.
            raise cause
        async with self._turn(artifact_id):
            reason = str(cause.fields.get("reason", cause.message))
            return stored, await self._run(self._answerer.reread(stored, reason))

    def _turn(self, artifact_id: bytes) -> asyncio.Lock:
        return self._turns.setdefault(artifact_id, asyncio.Lock())

    async def _run(self, steps: Generator[int, None, Preparation]) -> Preparation:
        stream = self._worker.stream(steps)
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()
        if stream.result is None:
            raise TransferError("answer: stopped before the cache was ready")
        return stream.result
