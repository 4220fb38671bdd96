"""What receivers count tokens with: their tokenizers, asked for before a budget is spent and kept by digest."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass
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
_FOLDER, _SUFFIX = "tokenizers", ".json"


@dataclass(frozen=True)
class Counter:
    """What a receiver counts with, and what asking for it took: bytes of messages both ways, and milliseconds."""

    encoder: ContentEncoder
    bytes: int = 0
    ms: float = 0.0


@dataclass
class _Answer:
    """A receiver's: which tokenizer it has, and that unless it is known here."""

    digest: bytes = b""
    length: int = 0
    frame: bytes = b""


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
        self._loaded: OrderedDict[bytes, ContentEncoder] = OrderedDict()

    async def of(self, receiver: Address, security: PeerSecurity) -> Counter:
        """Ask a receiver which tokenizer its model has, and for the tokenizer where it is not known here.

        Args:
            receiver: its gRPC address.
            security: how it is reached.

        Raises:
            PeerError: when what comes is no tokenizer, or none that the library here can use.
            StoreError: when the disk refuses.
            KvferryError: when the receiver cannot be reached, after several attempts.
        """
        start, crossed = time.perf_counter(), link.Tally()
        # What is kept on disk may turn out to be damaged, and is then asked for.
        for known in (await asyncio.to_thread(self._known), [self._own.vocab]):
            answer = await link.asked(receiver, security, partial(self._ask, receiver, known, crossed))
            encoder = self._at_hand(answer.digest) or await asyncio.to_thread(self._read, receiver, answer)
            if encoder is not None:
                self._keep(encoder)
                return Counter(encoder, crossed.bytes, (time.perf_counter() - start) * 1000)
        raise PeerError(
            f"{receiver}: its tokenizer {answer.digest.hex()} did not come, and is not known here", peer=str(receiver)
        )

    def _known(self) -> list[bytes]:
        known = [self._own.vocab, *self._loaded, *self._files.digests()]
        return list(dict.fromkeys(known))[: limits.MAX_TOKENIZERS_KNOWN]

    def _at_hand(self, vocab: bytes) -> ContentEncoder | None:
        return self._own if vocab == self._own.vocab else self._loaded.get(vocab)

    def _keep(self, encoder: ContentEncoder) -> None:
        if encoder is self._own:
            return
        self._loaded[encoder.vocab] = encoder
        self._loaded.move_to_end(encoder.vocab)
        if len(self._loaded) > MAX_LOADED:
            self._loaded.popitem(last=False)

    def _read(self, receiver: Address, answer: _Answer) -> ContentEncoder | None:
        """Build a tokenizer from what came, or else from what was kept; None where that is not there or damaged."""
        if not answer.frame:
            return self._read_file(receiver, answer.digest)
        try:
            description = zstd_frames.decompress(answer.frame, answer.length, f"{receiver}: tokenizer", "tokenizer")
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
        # The file only saves asking again.
        with contextlib.suppress(StoreError, TooLargeError):
            self._files.write(answer.digest, description)
        return encoder

    def _read_file(self, receiver: Address, vocab: bytes) -> ContentEncoder | None:
        with self._files.in_use(vocab) as path, contextlib.suppress(OSError):
            description = path.read_bytes()
            if digest(description) == vocab:
                return _build(receiver, description)
        self._files.remove(vocab)
        return None

    async def _ask(
        self, receiver: Address, known: list[bytes], crossed: link.Tally, stub: pb_grpc.ReceiverServiceAsyncStub
    ) -> _Answer:
        peer, request = str(receiver), pb.TokenizerRequest(known=known)
        call = stub.Tokenizer(request, metadata=request_ids.outgoing())
        self._metrics.sent("tokenizer", request.ByteSize())
        crossed.bytes += request.ByteSize()
        answer, size = _Answer(), 0
        pieces: list[bytes] = []
        try:
            while (response := await self._next(call, receiver)) is not None:
                self._metrics.received("tokenizer", response.ByteSize())
                crossed.bytes += response.ByteSize()
                # Without data nothing would ever end what is read here.
                if pieces and not response.data:
                    raise PeerError(f"{receiver}: tokenizer: a message without data", peer=peer, field="tokenizer")
                answer.digest = answer.digest or response.digest
                answer.length = answer.length or response.length
                pieces.append(response.data)
                size += len(response.data)
                _check_size(receiver, max(answer.length, size))
        finally:
            call.cancel()
        if len(answer.digest) != DIGEST_BYTES:
            raise PeerError(
                f"{receiver}: tokenizer: a digest of {len(answer.digest)} bytes, expected {DIGEST_BYTES}",
                peer=str(receiver),
                field="tokenizer",
            )
        answer.frame = b"".join(pieces)
        return answer

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


def _check_size(receiver: Address, size: int) -> None:
    if size > limits.MAX_TOKENIZER_BYTES:
        raise PeerError(
            f"{receiver}: tokenizer: {size} bytes, the limit is {limits.MAX_TOKENIZER_BYTES}",
            peer=str(receiver),
            field="tokenizer",
            value=size,
            limit=limits.MAX_TOKENIZER_BYTES,
        )


def _build(receiver: Address, description: bytes) -> ContentEncoder:
    try:
        return ContentEncoder(description)
    except ModelError as error:
        raise PeerError(f"{receiver}: {error.message}", peer=str(receiver), field="tokenizer") from error
