"""Carrying an artifact to a receiver: Offer, the missing chunks with acknowledgements, Commit; again where it broke.

Over gRPC or over the plain TCP worker, whichever the receiver's address says; what is here holds for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import msgspec

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
from kvferry.sender import grpc_transfer, tcp_transfer
from kvferry.sender.carrier import Carrier, Chunks, Counting

ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
# At Commit a receiver may read the payload again, and waits for its disk.
_SLOWEST_BYTES_PER_SECOND = 50e6
_PLAINTEXT = PeerSecurity()
_Connected = Callable[[Address, PeerSecurity, float, Counting], AbstractAsyncContextManager[Carrier]]


@dataclass
class Delivery:
    """What a transfer came to.

    Attributes:
        moved_bytes: chunk bytes that were acknowledged.
        transfer_ms: connecting, Offer and Put of every attempt, failed ones included, without the pauses between them.
        traffic: everything that crossed; None when the receiver had the artifact already.
    """

    moved_bytes: int = 0
    transfer_ms: float = 0.0
    traffic: Traffic | None = None


class Transfer:
    """One artifact on its way to one receiver."""

    def __init__(
        self,
        stored: Carriable,
        account: SenderAccount,
        receiver: Address,
        rpc_seconds: float,
        metrics: Counting,
        *,
        security: PeerSecurity = _PLAINTEXT,
    ) -> None:
        self._stored = stored
        self._account = account
        self._receiver = receiver
        self._seconds = rpc_seconds
        self._metrics = metrics
        self._security = security
        self._chunks = Chunks(stored, metrics)
        self._has_asked = False
        self.delivery = Delivery()

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Deliver, yielding progress in bytes.

        Raises:
            RefusedError: when the receiver's verdict is against the artifact; no payload byte has moved then.
            KvferryError: when the transfer still fails after several attempts.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with contextlib.aclosing(self._attempt()) as steps:
                    async for progress in steps:
                        yield progress
            except AuthenticationError as error:
                raise own_token(self._receiver, error) from error
            except KvferryError as error:
                if not (error.retryable or self._is_overtaken(error)) or attempt == ATTEMPTS:
                    raise
                await asyncio.sleep(pause_seconds(attempt, error))
            else:
                return

    async def _attempt(self) -> AsyncGenerator[Progress, None]:
        connected: _Connected = tcp_transfer.connected if self._receiver.tcp else grpc_transfer.connected
        async with contextlib.AsyncExitStack() as connection:
            start, is_there = time.perf_counter(), False
            try:
                carrier = await connection.enter_async_context(
                    connected(self._receiver, self._security, self._seconds, self._metrics)
                )
                yield Progress("offer", 0, len(self._stored.encoded))
                missing = await self._offer(carrier)
                is_there = missing is None
                async with contextlib.aclosing(self._put(carrier, missing or [])) as steps:
                    async for progress in steps:
                        yield progress
            finally:
                # An attempt that fails has taken its time as well.
                if not is_there:
                    self.delivery.transfer_ms += (time.perf_counter() - start) * 1000
            if is_there and not self._had_a_part:
                return
            # A second Commit brings the receipt that the first one lost, or that another transfer had.
            yield Progress("commit", 0, 1)
            await self._commit(carrier)
            yield Progress("commit", 1, 1)

    async def _offer(self, carrier: Carrier) -> list[int] | None:
        """Return the missing chunks, or None when the artifact is already there."""
        offered = await carrier.offer(self._stored.encoded)
        if offered.artifact_id != self._stored.artifact_id:
            raise IntegrityError("manifest: the receiver read other bytes than were sent", field="manifest")
        if not offered.accepted:
            raise refusal(offered.verdict)
        return None if offered.committed else self._check_ranges(offered.missing)

    def _check_ranges(self, missing: list[tuple[int, int]]) -> list[int]:
        count, last = self._stored.plan.count, 0
        for start, end in missing:
            if not last <= start < end <= count:
                raise PeerError(
                    f"{self._receiver}: asks for chunks {start}..{end} after {last}, the payload has {count}",
                    peer=str(self._receiver),
                )
            last = end
        return [index for start, end in missing for index in range(start, end)]

    async def _put(self, carrier: Carrier, wanted: list[int]) -> AsyncGenerator[Progress, None]:
        if not wanted:
            return
        sizes = {index: self._stored.plan.range(index) for index in wanted}
        total = self._stored.manifest.payload.length
        done = total - sum(end - start for start, end in sizes.values())
        yield Progress("transfer", done, total)
        pending = set(wanted)
        async with contextlib.aclosing(carrier.put(self._chunks, wanted)) as acknowledged:
            async for index in acknowledged:
                if index not in pending or not self._chunks.went(index):
                    raise TransferError(f"chunk {index}: acknowledged without being sent")
                pending.discard(index)
                start, end = sizes[index]
                done += end - start
                self.delivery.moved_bytes += end - start
                yield Progress("transfer", done, total)
        if self._chunks.unreadable is not None:
            raise self._chunks.unreadable
        if pending:
            raise TransferError(
                f"chunk {min(pending)}: not acknowledged, {len(pending)} in all",
                chunk=min(pending),
                missing=len(pending),
            )

    async def _commit(self, carrier: Carrier) -> None:
        payload = self._stored.manifest.payload
        account = msgspec.structs.replace(self._account, transfer_ms=self.delivery.transfer_ms)
        seconds = self._seconds + payload.length / _SLOWEST_BYTES_PER_SECOND
        self._has_asked = True
        receipt = await carrier.commit(self._stored.artifact_id, to_json(account), seconds)
        if receipt.payload_digest != payload.digest:
            raise IntegrityError("payload: the receipt names another digest", field="payload_digest")
        self.delivery.traffic = Traffic(
            len(self._stored.encoded), payload.length, receipt.received_bytes, receipt.control_bytes
        )

    @property
    def _had_a_part(self) -> bool:
        """Whether an earlier attempt moved something or asked for publication: then it was not there already."""
        return self._has_asked or self.delivery.moved_bytes > 0

    def _is_overtaken(self, error: KvferryError) -> bool:
        """Whether another transfer may have committed the artifact at the receiver meanwhile; a new offer tells."""
        return isinstance(error, NotFoundError | StoreError) and error is not self._chunks.unreadable


def own_token(receiver: Address, error: AuthenticationError) -> AuthenticationError:
    """Return the error of a receiver that does not let the sender in.

    Whoever asked for the send showed a token too, and must not look for the fault there.
    """
    text = f"receiver {receiver}: {error.message}; this is about the sender's own token_file"
    return AuthenticationError(text, **error.fields)


def pause_seconds(attempt: int, error: KvferryError) -> float:
    """Return how long to wait after an attempt, numbered from 1: longer each time, and as a busy receiver asks."""
    asked = error.fields.get("retry_after_ms")
    wanted = min(max(asked / 1000, 0.0), _LONGEST_PAUSE_SECONDS) if isinstance(asked, int | float) else 0.0
    growing: float = _FIRST_PAUSE_SECONDS * 2**attempt
    return max(growing, wanted)
