"""One Put call: chunks go out, acknowledgements come in, and what the receiver says at its end is heard.

The call runs on gRPC's blocking stack, in a thread. The asyncio one (1.85) often reports "Internal error from Core" in
place of the receiver's status when that comes while a chunk is being written, and takes a status CANCELLED for a
cancellation of its caller.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

import grpc

from kvferry.core import channel, request_ids, rpc
from kvferry.core.addresses import Address
from kvferry.core.errors import DeadlineError
from kvferry.core.tls import PeerSecurity
from kvferry.proto.v1 import receiver_service_pb2 as pb

_METHOD = f"/{pb.DESCRIPTOR.services_by_name['ReceiverService'].full_name}/Put"
_Arrived = pb.PutResponse | grpc.RpcError | None


async def acknowledgements(
    receiver: Address, security: PeerSecurity, chunks: Iterator[bytes], seconds: float
) -> AsyncGenerator[pb.PutResponse, None]:
    """Send chunks and yield what comes back. Closing the generator ends the call.

    Args:
        receiver: where to.
        security: how.
        chunks: messages that are bytes already; consumed by another thread; must not raise.
        seconds: how long each acknowledgement may take.

    Raises:
        DeadlineError: when one takes longer.
        KvferryError: when the receiver ends the call with an error.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[_Arrived] = asyncio.Queue()

    def post(item: _Arrived) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, item)

    with channel.open_blocking(receiver, security) as peer:
        # Without a serialiser of protobuf's a chunk is copied twice less.
        method: Any = peer.stream_stream(_METHOD, None, pb.PutResponse.FromString)
        call = method(chunks, metadata=request_ids.outgoing())
        reader = threading.Thread(target=_read, args=(call, post), name="kvferry-put", daemon=True)
        reader.start()
        try:
            with rpc.translating(str(receiver), "Put"):
                while (response := await _next(arrived, receiver, seconds)) is not None:
                    yield response
        finally:
            call.cancel()
            await asyncio.to_thread(reader.join)


def _read(call: Iterable[pb.PutResponse], post: Callable[[_Arrived], None]) -> None:
    try:
        for response in call:
            post(response)
    except grpc.RpcError as error:
        post(error)
    else:
        post(None)


async def _next(arrived: asyncio.Queue[_Arrived], receiver: Address, seconds: float) -> pb.PutResponse | None:
    try:
        async with asyncio.timeout(seconds):
            item = await arrived.get()
    except TimeoutError as error:
        raise DeadlineError(f"{receiver}: no acknowledgement for {seconds:g} s") from error
    if isinstance(item, grpc.RpcError):
        raise item
    return item
