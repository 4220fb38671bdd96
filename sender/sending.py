"""One request on its way: make an artifact, deliver it, and say what came of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.core import limits, verification
from kvferry.core.addresses import Address
from kvferry.core.choice import AutoChoice
from kvferry.core.errors import ContainerError, RefusedError, TooLargeError, TransferError
from kvferry.core.ledger import SenderAccount, to_json
from kvferry.core.logs import logger
from kvferry.core.progress import Progress
from kvferry.core.stored import Stored
from kvferry.core.threads import off_loop
from kvferry.core.tls import PeerSecurity
from kvferry.engine.content import ContentEncoder
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.sender.artifacts import Artifact
from kvferry.sender.method import Method, NoParameters
from kvferry.sender.parts import SenderParts
from kvferry.sender.reading import Reading
from kvferry.sender.registry import FALLBACK_METHOD
from kvferry.sender.text.counted import BudgetParameters
from kvferry.sender.tokenizers import Counter
from kvferry.sender.transfer import Transfer


@dataclass
class Send:
    """A request: whose document, and where it goes.

    Attributes:
        read: makes a reading of the document.
        receiver: where to.
        security: how it is reached.
        replaces: id of the method in whose place another one is used, and ``fallback_reason`` why; "" for none.
        auto: what was weighed, where the sender chooses.
        reading: the one of the artifact that is being made.
        artifact: what was made.
        counter: what the receiver counts with, where it was asked.
    """

    read: Callable[[], Reading]
    receiver: Address
    security: PeerSecurity
    replaces: str = ""
    fallback_reason: str = ""
    auto: AutoChoice | None = None
    reading: Reading = field(init=False)
    artifact: Artifact | None = field(default=None, init=False)
    counter: Counter | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Begin anew for another method. What a refused artifact cost is not the next one's."""
        self.reading = self.read()
        self.artifact = None
        if self.counter is not None:
            self.reading.counter = self.counter.encoder

    @property
    def made(self) -> Artifact:
        """What was made.

        Raises:
            TransferError: when nothing was, because the work was stopped.
        """
        if self.artifact is None:
            raise TransferError("send: stopped before the artifact was made")
        return self.artifact


class Sending:
    """Makes and delivers. Every step is a response for the caller; the last one is the end of the send."""

    def __init__(self, parts: SenderParts) -> None:
        self._parts = parts
        self._log = logger("sender")

    async def asked_for(
        self, send: Send, method: Method[Any], parameters: msgspec.Struct, *, allow_fallback: bool
    ) -> AsyncGenerator[pb.SendResponse, None]:
        """Send by the method that was asked for, or the text if it is refused and that is allowed.

        Raises:
            KvferryError: whatever the method, the store or the receiver refuses.
        """
        try:
            async with contextlib.aclosing(self.carry(send, method, parameters)) as steps:
                async for response in steps:
                    yield response
        except RefusedError as error:
            if not allow_fallback or method.info.form == FALLBACK_METHOD.info.form:
                raise
            self._log.warning("fallback", method=method.info.id, receiver=str(send.receiver), reason=error.message)
            send.replaces, send.fallback_reason = method.info.id, error.message
            send.start_over()
            async with contextlib.aclosing(self.carry(send, FALLBACK_METHOD, NoParameters())) as steps:
                async for response in steps:
                    yield response

    async def carry(
        self, send: Send, method: Method[Any], parameters: msgspec.Struct
    ) -> AsyncGenerator[pb.SendResponse, None]:
        """Make an artifact and deliver it."""
        for part in (self.make(send, method, parameters), self.deliver(send)):
            async with contextlib.aclosing(part) as steps:
                async for response in steps:
                    yield response

    async def make(
        self, send: Send, method: Method[Any], parameters: msgspec.Struct
    ) -> AsyncGenerator[pb.SendResponse, None]:
        """Make an artifact, or find the one that the same request made before."""
        parts = self._parts
        if isinstance(parameters, BudgetParameters):
            yield progress_response(Progress("tokenise", 0, len(send.reading.text)))
            await self.count_for(send)
        stream = parts.worker.stream(parts.maker.make(method, send.reading, parameters, send.replaces))
        try:
            async for progress in stream:
                yield progress_response(progress)
        finally:
            await stream.aclose()
        send.artifact = stream.result
        if not send.made.reused:
            parts.metrics.made(send.made.account)

    async def count_for(self, send: Send) -> None:
        """Have budgets count with the receiver's tokenizer; over TCP, where nobody can be asked, with the sender's.

        Raises:
            TooLargeError: when its tokenizer may make too much of the document.
            KvferryError: when the receiver cannot be asked, or has no tokenizer that can be used here.
        """
        if send.counter is None and not send.receiver.tcp:
            send.counter = await self._parts.tokenizers.of(send.receiver, send.security)
            if send.counter.encoder is not send.reading.counter:
                _check_grown(send, send.counter.encoder)
            send.reading.counter = send.counter.encoder

    async def deliver(self, send: Send) -> AsyncGenerator[pb.SendResponse, None]:
        """Deliver what was made."""
        parts, artifact = self._parts, send.made
        account = _account(send, artifact)
        transfer = Transfer(
            artifact.stored, account, send.receiver, parts.config.rpc_seconds, parts.metrics, security=send.security
        )
        async with off_loop(parts.store.pinned(artifact.stored.artifact_id)):
            try:
                async with contextlib.aclosing(transfer.run()) as steps:
                    async for progress in steps:
                        yield progress_response(progress)
            except ContainerError:
                await asyncio.to_thread(self._put_aside_if_damaged, artifact.stored)
                raise
        delivery, method = transfer.delivery, artifact.stored.manifest.method.id
        parts.metrics.delivered(method, delivery.transfer_ms if delivery.traffic else None)
        parts.links.moved(send.receiver, delivery.moved_bytes, delivery.transfer_ms)
        self._log.info(
            "sent",
            artifact=artifact.stored.artifact_id.hex(),
            method=method,
            receiver=str(send.receiver),
            payload_bytes=artifact.stored.manifest.payload.length,
            moved_bytes=delivery.moved_bytes,
            reused=artifact.reused,
        )
        yield pb.SendResponse(end=_end(artifact, account, transfer, send))

    def _put_aside_if_damaged(self, stored: Stored) -> None:
        """Look whether it is our own copy that went bad; then the next send makes the artifact anew."""
        found = next(verification.damage(stored.manifest, stored.plan, stored), None)
        if found is not None:
            self._log.error("quarantined", artifact=stored.artifact_id.hex(), reason=found.message)
            self._parts.store.quarantine(stored.artifact_id, found.message)


def _check_grown(send: Send, encoder: ContentEncoder) -> None:
    """Refuse a document of which a receiver's tokenizer may make more than there is memory for.

    Raises:
        TooLargeError: naming both.
    """
    grown = encoder.grown(send.reading.text)
    if grown > limits.MAX_GROWN_CHARACTERS:
        raise TooLargeError(
            f"document: the tokenizer of {send.receiver} may make {grown} characters of its {len(send.reading.text)} "
            f"before it counts them, the limit is {limits.MAX_GROWN_CHARACTERS}; send it by a method without a budget",
            field="document",
            value=grown,
            limit=limits.MAX_GROWN_CHARACTERS,
        )


def progress_response(progress: Progress) -> pb.SendResponse:
    """Return a step for the caller."""
    return pb.SendResponse(progress=pb.SendProgress(stage=progress.stage, done=progress.done, total=progress.total))


def _account(send: Send, artifact: Artifact) -> SenderAccount:
    auto = msgspec.structs.replace(send.auto, reused=artifact.reused) if send.auto else None
    counter = send.counter
    return msgspec.structs.replace(
        artifact.account,
        fallback_reason=send.fallback_reason or None,
        auto=auto,
        tokenizer_bytes=counter.bytes if counter else 0,
        tokenizer_ms=counter.ms if counter else 0.0,
    )


def _end(artifact: Artifact, account: SenderAccount, transfer: Transfer, send: Send) -> pb.SendEnd:
    stored, delivery = artifact.stored, transfer.delivery
    spent = msgspec.structs.replace(account, transfer_ms=delivery.transfer_ms)
    return pb.SendEnd(
        artifact_id=stored.artifact_id,
        method=stored.manifest.method.id,
        form=stored.manifest.form,
        receiver=str(send.receiver),
        account_json=to_json(spent),
        manifest_bytes=len(stored.encoded),
        payload_bytes=stored.manifest.payload.length,
        moved_bytes=delivery.moved_bytes,
        wire_bytes=delivery.traffic.wire_bytes if delivery.traffic else 0,
        reused=artifact.reused,
        fallback_reason=send.fallback_reason,
    )
