"""Counting calls: in flight, how long, and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kvferry.core.interception import around
from kvferry.core.metrics import OTHER, NodeMetrics


class MetricsInterceptor(grpc.aio.ServerInterceptor):
    """Counts every call under its full name. Names that no handler has share one label."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, if there is one."""
        handler = await continuation(handler_call_details)
        if handler is None:
            self._metrics.served(OTHER, grpc.StatusCode.UNIMPLEMENTED.name)
            return None
        rpc = handler_call_details.method.lstrip("/")

        @contextlib.asynccontextmanager
        async def counting(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
            code = grpc.StatusCode.UNKNOWN
            with self._metrics.serving(rpc):
                try:
                    yield
                    code = _status(context, grpc.StatusCode.OK)
                except grpc.aio.AbortError:
                    code = _status(context, code)
                    raise
                except (asyncio.CancelledError, GeneratorExit):
                    code = _ended_early(context)
                    raise
                finally:
                    self._metrics.served(rpc, code.name)

        return around(handler, counting)


def _status(context: grpc.aio.ServicerContext[Any, Any], default: grpc.StatusCode) -> grpc.StatusCode:
    """Return the status that the handler set, else ``default``."""
    # Declared as a StatusCode, it is the status's number: 0 until somebody sets it.
    given: Any = context.code()
    return next((code for code in grpc.StatusCode if given and given in (code, code.value[0])), default)


def _ended_early(context: grpc.aio.ServicerContext[Any, Any]) -> grpc.StatusCode:
    remaining = context.time_remaining()
    late = remaining is not None and remaining <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
