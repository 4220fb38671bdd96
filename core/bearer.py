"""Channels that present a token with every call.

gRPC's own call credentials refuse unencrypted channels, loopback included, and its interceptors put objects of their
own in the place of calls. These channels add one metadata entry and hand out gRPC's calls as they are.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc

HEADER = "authorization"
SCHEME = "Bearer"


class _Callable:
    """A call's factory with one more entry in its metadata."""

    def __init__(self, inner: Any, entry: tuple[str, str]) -> None:
        self._inner = inner
        self._entry = entry

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        return self._inner(*args, metadata=(*(metadata or ()), self._entry), **options)

    def with_call(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        return self._inner.with_call(*args, metadata=(*(metadata or ()), self._entry), **options)

    def future(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        return self._inner.future(*args, metadata=(*(metadata or ()), self._entry), **options)


class _Factories:
    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        self._entry = (HEADER, f"{SCHEME} {token}")

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Callable(self._channel.unary_unary(*args, **options), self._entry)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Callable(self._channel.unary_stream(*args, **options), self._entry)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Callable(self._channel.stream_unary(*args, **options), self._entry)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Callable(self._channel.stream_stream(*args, **options), self._entry)


class BlockingChannel(_Factories, grpc.Channel):
    """For threads."""

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:  # noqa: FBT001, FBT002  (the signature is gRPC's)
        """See grpc.Channel."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See grpc.Channel."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """See grpc.Channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncChannel(_Factories, grpc.aio.Channel):
    """For asyncio."""

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002  (the signature is gRPC's)
        """See grpc.aio.Channel."""
        state: grpc.ChannelConnectivity = self._channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
