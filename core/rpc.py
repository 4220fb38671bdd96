"""The one place where our errors become gRPC statuses and back.

A status carries a human line as its details; our class and the fields travel as MessagePack in trailing metadata, so
the other end rebuilds the same exception. An unknown code, or none, becomes the nearest PeerError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc
import msgpack

from kvferry.core import errors, handshakes, reachability
from kvferry.core.errors import FieldValue, KvferryError

Message = TypeVar("Message")

_METADATA_KEY = "kvferry-error-bin"
# gRPC peers refuse headers above 8 KiB by default; long values are for the log, not for the wire.
_MAX_MESSAGE_BYTES = 3000
_MAX_FIELD = 600
_MAX_FIELDS_BYTES = 4096
# gRPC's own words for a connection that could not be made; without them, it was there and the call broke.
_CONNECTING = "failed to connect"
_BROKEN = ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY")
# And when a server that was told to stop ends the calls that still run.
_STOPPING = "Cancelling all calls"
# And when a server runs as many calls as it may.
_TOO_MANY_CALLS = "Concurrent RPC limit"
# And what both of its stacks say of a channel that was closed before the call, each in words of its own.
_CLOSED = ("channel", "closed")
_NEAREST: dict[grpc.StatusCode, tuple[type[KvferryError], str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineError, "{peer}: no answer to {method} in time"),
    grpc.StatusCode.CANCELLED: (errors.CancelledError, "{peer}: {method} was cancelled"),
    grpc.StatusCode.UNAUTHENTICATED: (errors.AuthenticationError, "{peer}: {method}: {details}"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (errors.TooLargeError, "{peer}: {method}: {details}"),
}


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvferryError) -> NoReturn:
    """End a call with ``error``."""
    await context.abort(
        grpc.StatusCode[error.status],
        _fit_details(error.message),
        trailing_metadata=((_METADATA_KEY, _pack(error)),),
    )
    raise error


@contextlib.asynccontextmanager
async def reporting(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn every KvferryError of the block into the call's status."""
    try:
        yield
    except KvferryError as error:
        await abort(context, error)


@contextlib.contextmanager
def translating(peer: str, method: str) -> Iterator[None]:
    """Turn every RpcError of the block into one of our errors, and the use of a channel that was closed meanwhile.

    Args:
        peer: host:port, for the message.
        method: the call's name, for the message.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error, peer, method) from error
    except (ValueError, grpc.aio.UsageError) as error:
        if not all(word in str(error).casefold() for word in _CLOSED):
            raise
        raise errors.CancelledError(f"{peer}: {method} was cancelled", peer=peer, method=method) from error


@contextlib.contextmanager
def cancellable(peer: str, method: str) -> Iterator[None]:
    """Turn the cancellation of a call that the block awaits into one of our errors, unless the task was cancelled.

    grpc.aio has one exception for both: asyncio's, by which a task ends without a word.

    Args:
        peer: host:port, for the message.
        method: the call's name, for the message.

    Raises:
        CancelledError: when the call ended because its channel was closed meanwhile.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise errors.CancelledError(f"{peer}: {method} was cancelled", peer=peer, method=method) from error


async def answer(call: Awaitable[Message | None], peer: str, method: str) -> Message:
    """Return what a call of grpc.aio without a stream brings.

    Args:
        call: as the stub returns it.
        peer: host:port, for the message.
        method: the call's name, for the message.

    Raises:
        PeerError: when what came is no message of ours.
        CancelledError: when its channel is closed meanwhile.
        KvferryError: when the call fails.
    """
    with translating(peer, method), cancellable(peer, method):
        message = await call
    return parsed(message, peer, method)


def parsed(message: Message | None, peer: str, method: str) -> Message:
    """Return a message of grpc.aio, which gives None for bytes that are no such message, where grpc raises.

    Raises:
        PeerError: when it is None.
    """
    if message is None:
        raise errors.PeerError(f"{peer}: {method} was answered with something else", peer=peer, method=method)
    return message


def from_rpc(error: grpc.RpcError, peer: str, method: str) -> KvferryError:
    """Rebuild the exception behind a failed call."""
    code, details = error.code(), error.details() or ""
    # grpc and grpc.aio give different sequence types, and the type stubs know neither well.
    metadata: Iterable[tuple[str, str | bytes]] = tuple(error.trailing_metadata() or ())  # type: ignore[arg-type]
    packed = next((value for key, value in metadata if key == _METADATA_KEY), None)
    rebuilt = _unpack(packed, details) if isinstance(packed, bytes) else None
    if rebuilt is not None:
        return rebuilt
    where = {"peer": peer, "method": method}
    if code == grpc.StatusCode.UNAVAILABLE:
        return errors.UnavailableError(_unavailable(details, peer, method), **where)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_MANY_CALLS in details:
        return errors.BusyError(f"{peer}: {method}: {details}", **where)
    if code in _NEAREST:
        cls, text = _NEAREST[code]
        return cls(text.format(peer=peer, method=method, details=details), **where)
    return errors.PeerError(f"{peer}: {method} failed with {code.name} ({details})", status=code.name, **where)


def _unavailable(details: str, peer: str, method: str) -> str:
    if _STOPPING in details:
        return f"{peer}: is stopping, and ended {method}"
    if _CONNECTING not in details and any(words in details for words in _BROKEN):
        return f"{peer}: the connection broke during {method} ({details}); did the daemon end?"
    advice = handshakes.explain(details) or reachability.explain(details, peer)
    return f"{peer}: cannot be reached for {method} ({details})" + (f"; {advice}" if advice else "")


def _pack(error: KvferryError) -> bytes:
    fields: dict[str, FieldValue] = {}
    for name, value in error.fields.items():
        kept = _shorten(value, _MAX_FIELD) if isinstance(value, str) and name != "verdict_json" else value
        candidate = {**fields, name: kept}
        if len(msgpack.packb(candidate)) <= _MAX_FIELDS_BYTES:
            fields = candidate
    packed: bytes = msgpack.packb({"code": error.code, "fields": fields})
    return packed


def _unpack(packed: bytes, details: str) -> KvferryError | None:
    try:
        plain = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException):
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("fields"), dict):
        return None
    cls = errors.error_classes().get(str(plain.get("code")))
    if cls is None:
        return None
    fields = {
        str(name): value for name, value in plain["fields"].items() if isinstance(value, str | int | float | None)
    }
    for name in ("self", "message"):
        fields.pop(name, None)
    return cls(details, **fields)


def _fit_details(text: str) -> str:
    """Cut a status line to its limit, counted as it travels: every byte that is not plain ASCII takes three."""
    used = 0
    for index, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        used += 1 if plain else 3 * len(character.encode("utf-8", "replace"))
        if used > _MAX_MESSAGE_BYTES:
            return text[:index] + "…"
    return text


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
