"""Running code around gRPC handlers, whichever of the four kinds they are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

Guard = Callable[[grpc.aio.ServicerContext[Any, Any]], contextlib.AbstractAsyncContextManager[None]]
"""Makes the block that a call runs in. It may refuse the call by aborting it."""


def around(handler: Any, guard: Guard) -> Any:
    """Return a handler that runs ``handler`` inside ``guard``; None, an unknown method, stays None.

    Answers in a stream are closed with the call: a caller who goes away ends the handler's ``finally`` at once.
    """
    if handler is None:
        return None
    inner = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream

    async def single(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with guard(context):
            return await inner(request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with guard(context):
            responses = inner(request, context)
            if not isinstance(responses, AsyncGenerator):
                # gRPC's other style: a coroutine that writes its answers to the context itself.
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response

    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(stream, **codecs)
    make_single = (
        grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make_single(single, **codecs)
