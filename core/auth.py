"""The gate before every call: who calls, how much may run at once, and how long a request may take to arrive.

Nothing of a request is read before its caller is known and has a place. gRPC reads a unary request before it runs the
handler; so such handlers are turned into streaming ones, which on the wire are the same, and read their one message
themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvferry.core import bearer, rpc
from kvferry.core.admission import Admission, CallLimits
from kvferry.core.errors import AuthenticationError, BusyError, InvalidRequestError, KvferryError, TransferError
from kvferry.core.interception import around
from kvferry.core.tokens import Token, TokenFile

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
MAX_HEALTH_CHECKS = 64
REQUEST_SECONDS = 30.0
_MAX_METHOD_SHOWN = 120
_CALLER: ContextVar[Token | None] = ContextVar("caller", default=None)

Context = grpc.aio.ServicerContext[Any, Any]


def caller() -> Token | None:
    """Return the token of the call that is being served; None where none is asked for."""
    return _CALLER.get()


class Gate(grpc.aio.ServerInterceptor):
    """Authenticates and counts calls. Health checks need no token and have limits of their own.

    Attributes:
        admission: whom it lets in; the daemon's other doors ask the same.
    """

    def __init__(self, tokens: TokenFile | None, max_calls: int, request_seconds: float = REQUEST_SECONDS) -> None:
        """Prepare a gate.

        Args:
            tokens: who may call; None lets everybody in.
            max_calls: most calls at a time.
            request_seconds: how long a request that is one message may take to arrive.
        """
        self.admission = Admission(tokens, max_calls)
        self._health_limits = CallLimits(MAX_HEALTH_CHECKS)
        self._request_seconds = request_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that lets the call in or refuses it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method[:_MAX_METHOD_SHOWN]
        if handler is None:
            self.admission.refusals.refused("no such method", method=method, peer="")
            return None
        if method == HEALTH_CHECK:
            return self._guarded(handler, method, self._health_limits, None)
        try:
            token = self._authenticate(handler_call_details.invocation_metadata)
        except AuthenticationError as error:
            return self._refusing(method, error)
        return self._guarded(handler, method, self.admission.limits, token)

    def _authenticate(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Token | None:
        if not self.admission.asks_for_tokens:
            return None
        given = [value for key, value in metadata or () if key == bearer.HEADER]
        if not given:
            return self.admission.authenticate("")
        scheme, _, secret = str(given[0]).partition(" ")
        if len(given) > 1 or scheme.casefold() != bearer.SCHEME.casefold() or not secret.strip():
            raise AuthenticationError("token: the authorization is not one Bearer token", field="token")
        return self.admission.authenticate(secret.strip())

    def _refusing(self, method: str, error: KvferryError) -> Any:
        async def refuse(_: Any, context: Context) -> None:
            await self._refuse(method, unquote(context.peer()), error, context)

        # A handler that streams requests runs at once and never asks for one.
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _guarded(self, handler: Any, method: str, limits: CallLimits, token: Token | None) -> Any:
        @contextlib.asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            if token is not None:
                # Each call is a task with a context of its own, so nothing has to be undone at its end.
                _CALLER.set(token)
                structlog.contextvars.bind_contextvars(token=token.name)
            # A call that has broken off has no peer any more.
            peer = unquote(context.peer())
            with contextlib.ExitStack() as place:
                try:
                    place.enter_context(limits.running(token))
                    yield
                except _Refusal as refusal:
                    await self._refuse(method, peer, refusal.error, context)
                except BusyError as busy:
                    await self._refuse(method, peer, busy, context)
                except DecodeError:
                    malformed = InvalidRequestError("request: not a message of this method", field="request")
                    await self._refuse(method, peer, malformed, context)

        return around(_reading(handler, self._request_seconds), guard)

    async def _refuse(self, method: str, peer: str, error: KvferryError, context: Context) -> NoReturn:
        self.admission.refusals.refused(error.message, method=method, peer=peer)
        await rpc.abort(context, error)


class _Refusal(Exception):  # noqa: N818  (never leaves this file)
    """Carries an error of the gate itself past the handler's own error reporting."""

    def __init__(self, error: KvferryError) -> None:
        super().__init__(error.message)
        self.error = error


def _reading(handler: Any, seconds: float) -> Any:
    """Return a handler that streams requests in place of one that does not."""
    if handler.request_streaming:
        return handler
    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:

        def stream(requests: AsyncIterator[Any], context: Context) -> Any:
            return _streamed(handler.unary_stream, requests, context, seconds)

        return grpc.stream_stream_rpc_method_handler(stream, **codecs)

    async def single(requests: AsyncIterator[Any], context: Context) -> Any:
        return await handler.unary_unary(await _only(requests, seconds), context)

    return grpc.stream_unary_rpc_method_handler(single, **codecs)


async def _streamed(
    inner: Callable[[Any, Context], Any], requests: AsyncIterator[Any], context: Context, seconds: float
) -> AsyncIterator[Any]:
    responses = inner(await _only(requests, seconds), context)
    if asyncio.iscoroutine(responses):
        # gRPC's other style: a coroutine that writes its answers to the context itself.
        await responses
        return
    async with contextlib.aclosing(responses):
        async for response in responses:
            yield response


async def _only(requests: AsyncIterator[Any], seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            request = await anext(requests, None)
    except TimeoutError as error:
        raise _Refusal(TransferError(f"request: not complete after {seconds:g} s", field="request")) from error
    if request is None:
        raise _Refusal(
            InvalidRequestError("request: the call ended without one, or it was over the limit", field="request")
        )
    return request
