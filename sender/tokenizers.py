"""What receivers count tokens with: their tokenizers, asked for before a budget is spent and kept by digest."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import grpc

from kvferry.core import limits, request_ids, rpc, zstd_frames
from kvferry.core.addresses import Address
from kvferry.core.digests import DIGEST_BYTES, digest
from kvferry.core.errors import ContainerError, DeadlineError, ModelError, PeerError, StoreError, TooLargeError
from kvferry.core.store import ArtifactStore
from kvferry.core.tls import PeerSecurity
from kvferry.engine.content import ContentEncoder
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as pb_grpc
from kvferry.sender import link
from kvferry.sender.carrier import Counting

MAX_LOADED = 4
"""Most tokenizers in memory, the sender's own apart: one of 150,000 entries takes about 100 MB."""
SLOWEST_BYTES_PER_SECOND = 64 * limits.KIB
"""A description that comes more slowly than this is not waited for."""
_FOLDER, _SUFFIX = "tokenizers", ".json"


@dataclass(frozen=True)
class Counter:
    """What a receiver counts with, and what asking for it took: bytes of messages both ways, and milliseconds."""

    encoder: ContentEncoder
    bytes: int = 0
    ms: float = 0.0


@dataclass
class _Answer:
    """A receiver's: which tokenizer it has, and that as a frame unless it is known here."""

    digest: bytes = b""
    length: int = 0
    frame: bytearray = field(default_factory=bytearray)
    _messages: int = 0

    def take(self, receiver: Address, response: pb.TokenizerResponse) -> None:
        """Add a message.

        Raises:
            PeerError: when it is none that can follow, or makes the answer too long.
        """
        peer = str(receiver)
        # Without data nothing would ever end what is read.
        if self._messages and not response.data:
            raise PeerError(f"{receiver}: tokenizer: a message without data", peer=peer, field="tokenizer")
        if not self._messages:
            self.digest, self.length = response.digest, response.length
        self._messages += 1
        _check_size(receiver, "", self.length, limits.MAX_TOKENIZER_BYTES)
        _check_size(receiver, "a frame of ", len(self.frame) + len(response.data), zstd_frames.longest(self.length))
        self.frame += response.data


@dataclass
class _Flight:
    """An answer that one or more sends wait for. ``is_counted`` once its bytes are in the account of one of them."""

    task: asyncio.Task[Counter]
    waiting: int = 0
    is_counted: bool = False


class Tokenizers:
    """The tokenizers of receivers. They share the store's budget and its time to live. For one event loop."""

    def __init__(self, own: ContentEncoder, store: ArtifactStore, seconds: float, metrics: Counting) -> None:
        """Open what was kept.

        Args:
            own: of the sender's model.
            store: where the others lie, beside the artifacts.
            seconds: how long a receiver may be silent.
            metrics: of the sender.

        Raises:
            StoreError: when the disk refuses.
        """
        self._own = own
        self._files = store.files(_FOLDER, _SUFFIX)
        self._seconds = seconds
        self._metrics = metrics
        self._loaded: tuple[ContentEncoder, ...] = ()
        self._flights: dict[tuple[Address, PeerSecurity], _Flight] = {}
        # A large one takes a GB while it is built. Of threads, which go on when whoever waits for them gives up.
        self._building = threading.Lock()

    async def of(self, receiver: Address, security: PeerSecurity) -> Counter:
        """Ask a receiver which tokenizer its model has, and for the tokenizer where it is not known here.

        Sends that ask at the same time share one answer, and its bytes count for one of them.

        Args:
            receiver: its gRPC address.
            security: how it is reached.

        Raises:
            PeerError: when what comes is no tokenizer, or none that the library here can use.
            KvferryError: when the receiver cannot be reached, after several attempts.
        """
        start, key = time.perf_counter(), (receiver, security)
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._asked(receiver, security)))
        flight.waiting += 1
        try:
            # Whoever gives up must not take it from the others.
            counter = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                flight.task.cancel()
            if self._flights.get(key) is flight and (flight.task.done() or not flight.waiting):
                del self._flights[key]
        crossed = 0 if flight.is_counted else counter.bytes
        flight.is_counted = True
        return Counter(counter.encoder, crossed, (time.perf_counter() - start) * 1000)

    async def _asked(self, receiver: Address, security: PeerSecurity) -> Counter:
        crossed = link.Tally()
        # What is kept on disk may turn out to be damaged, and is then asked for.
        for known in (await asyncio.to_thread(self._known), [self._own.vocab]):
            answer = await link.asked(receiver, security, partial(self._ask, receiver, known, crossed))
            encoder = self._at_hand(answer.digest) or await asyncio.to_thread(self._built, receiver, answer)
            if encoder is not None:
                self._keep(encoder)
                return Counter(encoder, crossed.bytes)
        raise PeerError(
            f"{receiver}: its tokenizer {answer.digest.hex()} did not come, and is not known here", peer=str(receiver)
        )

    def _known(self) -> list[bytes]:
        stored: list[bytes] = []
        # The files only save asking again.
        with contextlib.suppress(StoreError):
            stored = self._files.last_used(limits.MAX_TOKENIZERS_KNOWN)
        known = [self._own.vocab, *(encoder.vocab for encoder in reversed(self._loaded)), *stored]
        return list(dict.fromkeys(known))[: limits.MAX_TOKENIZERS_KNOWN]

    def _at_hand(self, vocab: bytes) -> ContentEncoder | None:
        return next((encoder for encoder in (self._own, *self._loaded) if encoder.vocab == vocab), None)

    def _keep(self, encoder: ContentEncoder) -> None:
        """Note that a tokenizer is used."""
        if encoder is not self._own:
            self._loaded = (*(other for other in self._loaded if other is not encoder), encoder)[-MAX_LOADED:]

    def _built(self, receiver: Address, answer: _Answer) -> ContentEncoder | None:
        with self._building:
            encoder = self._at_hand(answer.digest) or self._read(receiver, answer)
            if encoder is not None:
                self._keep(encoder)
            return encoder

    def _read(self, receiver: Address, answer: _Answer) -> ContentEncoder | None:
        """Build a tokenizer from what came, or else from what was kept; None where that is not there or damaged."""
        if not answer.frame:
            return self._read_file(receiver, answer.digest)
        try:
            description = zstd_frames.decompress(
                bytes(answer.frame), answer.length, f"{receiver}: tokenizer", "tokenizer"
            )
        except ContainerError as error:
            raise PeerError(error.message, peer=str(receiver), field="tokenizer") from error
        if digest(description) != answer.digest:
            raise PeerError(
                f"{receiver}: tokenizer: digest {digest(description).hex()[:16]}…, "
                f"announced {answer.digest.hex()[:16]}…",
                peer=str(receiver),
                field="tokenizer",
            )
        encoder = _build(receiver, description)
        with contextlib.suppress(StoreError, TooLargeError):
            self._files.write(answer.digest, description)
        return encoder

    def _read_file(self, receiver: Address, vocab: bytes) -> ContentEncoder | None:
        try:
            with self._files.in_use(vocab) as path:
                description = path.read_bytes()
        except OSError:
            # Which may be for want of a file descriptor: no reason to throw the file away.
            return None
        if digest(description) == vocab:
            return _build(receiver, description)
        with contextlib.suppress(StoreError):
            self._files.remove(vocab)
        return None

    async def _ask(
        self, receiver: Address, known: list[bytes], crossed: link.Tally, stub: pb_grpc.ReceiverServiceAsyncStub
    ) -> _Answer:
        request = pb.TokenizerRequest(known=known)
        call = stub.Tokenizer(request, metadata=request_ids.outgoing())
        self._metrics.sent("tokenizer", request.ByteSize())
        crossed.bytes += request.ByteSize()
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as limit:
                answer = _Answer()
                while (response := await self._next(call, receiver)) is not None:
                    self._metrics.received("tokenizer", response.ByteSize())
                    crossed.bytes += response.ByteSize()
                    answer.take(receiver, response)
                    if limit.when() is None:
                        limit.reschedule(start + self._longest(answer))
        except TimeoutError as error:
            # And it is not asked again: whoever is that slow would be the next time.
            raise PeerError(
                f"{receiver}: a tokenizer of {answer.length} bytes did not come within {self._longest(answer):.3g} s",
                peer=str(receiver),
            ) from error
        finally:
            call.cancel()
        if len(answer.digest) != DIGEST_BYTES:
            raise PeerError(
                f"{receiver}: tokenizer: a digest of {len(answer.digest)} bytes, expected {DIGEST_BYTES}",
                peer=str(receiver),
                field="tokenizer",
            )
        return answer

    def _longest(self, answer: _Answer) -> float:
        return self._seconds + answer.length / SLOWEST_BYTES_PER_SECOND

    async def _next(
        self, call: grpc.aio.UnaryStreamCall[pb.TokenizerRequest, pb.TokenizerResponse], receiver: Address
    ) -> pb.TokenizerResponse | None:
        peer = str(receiver)
        try:
            with rpc.translating(peer, "Tokenizer"), rpc.cancellable(peer, "Tokenizer"):
                async with asyncio.timeout(self._seconds):
                    message = await call.read()
        except TimeoutError as error:
            raise DeadlineError(f"{receiver}: nothing of Tokenizer came for {self._seconds:g} s", peer=peer) from error
        if message is grpc.aio.EOF:
            return None
        return rpc.parsed(cast(pb.TokenizerResponse | None, message), peer, "Tokenizer")


def _check_size(receiver: Address, what: str, size: int, limit: int) -> None:
    if size > limit:
        raise PeerError(
            f"{receiver}: tokenizer: {what}{size} bytes, the limit is {limit}",
            peer=str(receiver),
            field="tokenizer",
            value=size,
            limit=limit,
        )


def _build(receiver: Address, description: bytes) -> ContentEncoder:
    try:
        return ContentEncoder(description)
    except ModelError as error:
        raise PeerError(f"{receiver}: {error.message}", peer=str(receiver), field="tokenizer") from error
