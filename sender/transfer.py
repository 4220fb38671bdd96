"""Carrying an artifact to a receiver: Offer, the missing chunks with acknowledgements, Commit; again where it broke."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc
import msgspec

from kvferry.core import channel, request_ids, rpc, wire
from kvferry.core.addresses import Address
from kvferry.core.compat import refusal
from kvferry.core.errors import (
    AuthenticationError,
    IntegrityError,
    KvferryError,
    NotFoundError,
    PeerError,
    StoreError,
    TransferError,
)
from kvferry.core.ledger import SenderAccount, Traffic, to_json
from kvferry.core.payloads import Carriable
from kvferry.core.progress import Progress
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender.put_call import acknowledgements

ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
_PLAINTEXT = PeerSecurity()


@dataclass
class Delivery:
    """What a transfer came to. ``traffic`` is None when the receiver had the artifact already."""

    moved_bytes: int = 0
    transfer_ms: float = 0.0
    traffic: Traffic | None = None


class Counting(Protocol):
    """Counts what crosses, by kind."""

    def sent(self, kind: str, count: int) -> None:
        """Count bytes that went out."""

    def received(self, kind: str, count: int) -> None:
        """Count bytes that came in."""


class Transfer:
    """One artifact on its way to one receiver."""

    def __init__(
        self,
        artifact: Carriable,
        account: SenderAccount,
        receiver: Address,
        rpc_seconds: float,
        metrics: Counting,
        *,
        security: PeerSecurity = _PLAINTEXT,
    ) -> None:
        self._artifact = artifact
        self._account = account
        self._receiver = receiver
        self._seconds = rpc_seconds
        self._metrics = metrics
        self._security = security
        self._tried: set[int] = set()
        self._unreadable: StoreError | None = None
        self.delivery = Delivery()

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Deliver, yielding progress in bytes.

        Raises:
            RefusedError: when the receiver's verdict is against the artifact; no payload byte has moved then.
            KvferryError: when the transfer still fails after several attempts.
        """
        async with channel.open_async(self._receiver, self._security) as peer:
            stub = pb_grpc.ReceiverServiceStub(peer)
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    async with contextlib.aclosing(self._attempt(stub)) as steps:
                        async for progress in steps:
                            yield progress
                except AuthenticationError as error:
                    # Whoever asked for the send showed a token too, and must not look for the fault there.
                    text = f"receiver {self._receiver}: {error.message}; this is about the sender's own token_file"
                    raise AuthenticationError(text, **error.fields) from error
                except KvferryError as error:
                    if not (error.retryable or _overtaken(error)) or attempt == ATTEMPTS:
                        raise
                    await asyncio.sleep(max(_FIRST_PAUSE_SECONDS * 2**attempt, _asked_pause(error)))
                else:
                    return

    async def _attempt(self, stub: pb_grpc.ReceiverServiceAsyncStub) -> AsyncGenerator[Progress, None]:
        start = time.perf_counter()
        yield Progress("offer", 0, len(self._artifact.encoded))
        missing = await self._offer(stub)
        if missing is None:
            return
        async with contextlib.aclosing(self._put(missing)) as steps:
            async for progress in steps:
                yield progress
        self.delivery.transfer_ms += (time.perf_counter() - start) * 1000
        yield Progress("commit", 0, 1)
        await self._commit(stub)
        yield Progress("commit", 1, 1)

    async def _offer(self, stub: pb_grpc.ReceiverServiceAsyncStub) -> list[tuple[int, int]] | None:
        """Return the missing chunk ranges, or None when the artifact is already there."""
        request = pb.OfferRequest(manifest=self._artifact.encoded)
        self._metrics.sent("manifest", len(request.manifest))
        self._metrics.sent("control", request.ByteSize() - len(request.manifest))
        with rpc.translating(str(self._receiver), "Offer"):
            response = await stub.Offer(request, timeout=self._seconds, metadata=request_ids.outgoing())
        self._metrics.received("control", response.ByteSize())
        if response.artifact_id != self._artifact.artifact_id:
            raise IntegrityError("manifest: the receiver read other bytes than were sent", field="manifest")
        verdict = wire.verdict_from_message(response.verdict)
        if not response.verdict.accepted:
            raise refusal(verdict)
        return None if response.committed else self._check_ranges(wire.ranges_from_message(response.missing))

    def _check_ranges(self, missing: list[tuple[int, int]]) -> list[tuple[int, int]]:
        count, last = self._artifact.plan.count, 0
        for start, end in missing:
            if not last <= start < end <= count:
                raise PeerError(
                    f"{self._receiver}: asks for chunks {start}..{end} after {last}, the payload has {count}",
                    peer=str(self._receiver),
                )
            last = end
        return missing

    async def _put(self, missing: list[tuple[int, int]]) -> AsyncGenerator[Progress, None]:
        wanted = [index for start, end in missing for index in range(start, end)]
        if not wanted:
            return
        payload = self._artifact.manifest.payload
        sizes = {index: self._artifact.plan.range(index) for index in wanted}
        total = payload.length
        done = total - sum(end - start for start, end in sizes.values())
        yield Progress("transfer", done, total)
        pending = set(wanted)
        responses = acknowledgements(self._receiver, self._security, self._chunks(wanted), self._seconds)
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._metrics.received("control", response.ByteSize())
                if response.index not in pending:
                    raise TransferError(f"chunk {response.index}: acknowledged without being sent")
                pending.discard(response.index)
                start, end = sizes[response.index]
                done += end - start
                self.delivery.moved_bytes += end - start
                yield Progress("transfer", done, total)
        if self._unreadable is not None:
            raise self._unreadable
        if pending:
            raise TransferError(
                f"chunk {min(pending)}: not acknowledged, {len(pending)} in all",
                chunk=min(pending),
                missing=len(pending),
            )

    def _chunks(self, wanted: Iterable[int]) -> Iterator[pb.PutRequest]:
        for index in wanted:
            try:
                data = self._artifact.read_chunk(index)
            except StoreError as error:
                # Raised here, it would reach nobody but gRPC's log.
                self._unreadable = error
                return
            request = pb.PutRequest(artifact_id=self._artifact.artifact_id, index=index, data=data)
            self._metrics.sent("resent" if index in self._tried else "payload", len(data))
            self._metrics.sent("control", request.ByteSize() - len(data))
            self._tried.add(index)
            yield request

    async def _commit(self, stub: pb_grpc.ReceiverServiceAsyncStub) -> None:
        account = msgspec.structs.replace(self._account, transfer_ms=self.delivery.transfer_ms)
        # Verification reads the whole payload again, so the deadline grows with it.
        deadline = self._seconds + self._artifact.manifest.payload.length / 50e6
        request = pb.CommitRequest(artifact_id=self._artifact.artifact_id, account_json=to_json(account))
        self._metrics.sent("control", request.ByteSize())
        with rpc.translating(str(self._receiver), "Commit"):
            response = await stub.Commit(request, timeout=deadline, metadata=request_ids.outgoing())
        self._metrics.received("control", response.ByteSize())
        receipt = response.receipt
        if receipt.payload_digest != self._artifact.manifest.payload.digest:
            raise IntegrityError("payload: the receipt names another digest", field="payload_digest")
        self.delivery.traffic = Traffic(
            len(self._artifact.encoded),
            self._artifact.manifest.payload.length,
            receipt.received_bytes,
            receipt.control_bytes,
        )


def _asked_pause(error: KvferryError) -> float:
    """Return the seconds that a busy receiver asks for, within reason."""
    asked = error.fields.get("retry_after_ms")
    return min(max(asked / 1000, 0.0), _LONGEST_PAUSE_SECONDS) if isinstance(asked, int | float) else 0.0


def _overtaken(error: KvferryError) -> bool:
    """Whether another transfer may have committed the artifact at the receiver meanwhile; a new offer tells."""
    return isinstance(error, NotFoundError | StoreError) and isinstance(error.__cause__, grpc.RpcError)
