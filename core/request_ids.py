"""Request ids: one name for a call in the logs of both daemons, in the answer's metadata and in the ledger."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import structlog

from kvferry.core.interception import around

HEADER = "x-request-id"
_VALID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CURRENT: ContextVar[str] = ContextVar("request_id", default="")


def choose(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the caller's id, or a new one when there is none, more than one, or one that no log should hold."""
    given = [value for key, value in metadata or () if key == HEADER]
    if len(given) == 1 and isinstance(given[0], str) and _VALID.fullmatch(given[0]):
        return given[0]
    return secrets.token_hex(8)


def current() -> str:
    """Return the id of the call that is being served, "" outside of one."""
    return _CURRENT.get()


def adopt(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Choose the id of the call that this task or thread serves, bind it for the rest of its life, and return it."""
    request_id = choose(metadata)
    _CURRENT.set(request_id)
    structlog.contextvars.bind_contextvars(request_id=request_id)
    return request_id


def outgoing() -> tuple[tuple[str, str], ...]:
    """Return metadata that passes the current id on to another daemon."""
    return ((HEADER, current()),) if current() else ()


class RequestIdInterceptor(grpc.aio.ServerInterceptor):
    """Names every call. Comes first, so that whatever the others log carries the id."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Bind the id for the rest of the call, and send it back as soon as the handler starts."""
        # Each call is a task with a context of its own, so nothing has to be undone at its end.
        request_id = adopt(handler_call_details.invocation_metadata)

        @asynccontextmanager
        async def returning(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
            await context.send_initial_metadata(((HEADER, request_id),))
            yield

        return around(await continuation(handler_call_details), returning)
