"""Fetching passages from the sender that read the document."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from kvferry.core import addresses, channel, request_ids, rpc, security
from kvferry.core.addresses import SENDER_PORT, Address
from kvferry.core.config import ReceiverConfig
from kvferry.core.errors import DeadlineError, PeerError, UnavailableError
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.proto.v1.sender_service_pb2_grpc import SenderServiceStub
from kvferry.receiver.lookups import Place

if TYPE_CHECKING:
    from kvferry.proto.v1.sender_service_pb2_grpc import SenderServiceAsyncStub

MAX_CHANNELS = 8
_WIDEST_CHARACTER = 4
_Key = tuple[Address, PeerSecurity]


@dataclass
class Spent:
    """What a look-up cost so far: calls, their messages' bytes out and in, and its time once it has ended."""

    calls: int = 0
    sent: int = 0
    received: int = 0
    ms: float = 0.0


@dataclass(frozen=True)
class _Kept:
    """A channel, and the calls over it."""

    channel: grpc.aio.Channel
    stub: SenderServiceAsyncStub


class SpanClient:
    """Asks senders for passages, over channels that stay open. Use from one event loop, and close it there."""

    def __init__(self, config: ReceiverConfig) -> None:
        """Prepare; the first look-up connects.

        Raises:
            ConfigError: when the configured sender is no address.
        """
        self.configured = addresses.parse(config.sender, "sender", default_port=SENDER_PORT)
        self._config = config
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every channel; calls in flight end."""
        opened = [*self._closing.values(), *(kept.channel for kept in self._kept.values())]
        closing = list(self._closing)
        self._kept.clear()
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for item in opened:
            await item.close()

    async def fetch(
        self, sender: Address, document: bytes, places: Sequence[Place], max_bytes: int, spent: Spent
    ) -> list[str]:
        """Fetch passages in one call; a connection that broke is made anew once.

        Args:
            sender: where to ask.
            document: digest of the document.
            places: what is wanted.
            max_bytes: most UTF-8 that may come.
            spent: counts along, also when this fails.

        Returns:
            The texts of the first places, as many as fit ``max_bytes``.

        Raises:
            PeerError: when the sender cannot be reached, is silent for too long, or answers nonsense.
            KvferryError: whatever the sender reports.
        """
        request = pb.FetchSpansRequest(
            document_digest=document,
            spans=[pb.Span(start=place.start, end=place.end) for place in places],
            max_bytes=max_bytes,
        )
        start = time.perf_counter()
        try:
            texts = await self._try_twice(sender, request, start + self._config.lookup_seconds, spent)
        finally:
            spent.ms = (time.perf_counter() - start) * 1000
        _check(str(sender), places, texts, max_bytes)
        return texts

    async def _try_twice(self, sender: Address, request: pb.FetchSpansRequest, until: float, spent: Spent) -> list[str]:
        try:
            return await self._call(sender, request, until - time.perf_counter(), spent)
        except UnavailableError:
            # Mostly a sender that was started again since the channel was opened.
            left = until - time.perf_counter()
            if left <= 0:
                raise
            return await self._call(sender, request, left, spent)

    async def _call(self, sender: Address, request: pb.FetchSpansRequest, seconds: float, spent: Spent) -> list[str]:
        # Read anew for every look-up, so that a token can be replaced while the daemon runs.
        key = (sender, security.for_peer(self._config, sender, self.configured))
        stub = self._stub(key)
        spent.calls += 1
        spent.sent += request.ByteSize()
        try:
            call = stub.FetchSpans(request, timeout=seconds, metadata=request_ids.outgoing())
            response = await rpc.answer(call, str(sender), "FetchSpans")
        except (UnavailableError, DeadlineError):
            self._retire(key, stub)
            raise
        spent.received += response.ByteSize()
        return list(response.texts)

    def _stub(self, key: _Key) -> SenderServiceAsyncStub:
        if key not in self._kept:
            opened = channel.open_async(*key)
            self._kept[key] = _Kept(opened, SenderServiceStub(opened))
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_CHANNELS:
            oldest = next(iter(self._kept))
            self._retire(oldest, self._kept[oldest].stub)
        return self._kept[key].stub

    def _retire(self, key: _Key, stub: SenderServiceAsyncStub) -> None:
        """Close a channel once the calls of others over it have ended, unless another has taken its place."""
        kept = self._kept.get(key)
        if kept is None or kept.stub is not stub:
            return
        del self._kept[key]
        task = asyncio.ensure_future(kept.channel.close(self._config.lookup_seconds))
        self._closing[task] = kept.channel
        task.add_done_callback(self._closing.pop)


def _check(peer: str, places: Sequence[Place], texts: Sequence[str], max_bytes: int) -> None:
    if len(texts) > len(places):
        raise PeerError(
            f"{peer}: {len(texts)} passages came, {len(places)} were asked for",
            peer=peer,
            value=len(texts),
            limit=len(places),
        )
    used = 0
    for number, (place, text) in enumerate(zip(places, texts, strict=False)):
        if len(text) != place.end - place.start:
            raise PeerError(
                f"{peer}: passage {number} has {len(text)} characters, {place.start}..{place.end} was asked for",
                peer=peer,
                value=len(text),
                expected=place.end - place.start,
            )
        used += len(text.encode("utf-8"))
    if used > max_bytes:
        raise PeerError(
            f"{peer}: {used} bytes of passages came, at most {max_bytes} were asked for",
            peer=peer,
            value=used,
            limit=max_bytes,
        )
    if len(texts) < len(places):
        start, end = places[len(texts)]
        if used + _WIDEST_CHARACTER * (end - start) <= max_bytes:
            raise PeerError(
                f"{peer}: {len(texts)} of {len(places)} passages came, though the next one would have fitted",
                peer=peer,
                value=len(texts),
                expected=len(places),
            )
