"""Fetching passages: from a sender that does what a test tells it, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from kvferry.core import addresses, channel
from kvferry.core.config import ReceiverConfig
from kvferry.core.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    PeerError,
    UnavailableError,
)
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.receiver import span_client
from kvferry.receiver.lookups import Place
from kvferry.receiver.span_client import SpanClient, Spent

METHOD = ("kvferry.proto.v1.SenderService", "FetchSpans")
DOCUMENT = bytes(range(32))
PLACES = (Place(3, 8), Place(20, 22))
TEXTS = ["Größe", "門🚢"]

Answer = Callable[[bytes, Any], Awaitable[bytes]]


class Sender:
    """A server for one method. Counts the bytes and the connections that it sees."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self.server = server
        self.address = addresses.Address("127.0.0.1", port)
        self.requests: list[pb.FetchSpansRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.peers: list[str] = []
        self.seen = 0
        self.cancelled = asyncio.Event()
        self.begun = asyncio.Event()
        self.answer: Answer = self.give

    async def call(self, request: bytes, context: Any) -> bytes:
        self.requests.append(pb.FetchSpansRequest.FromString(request))
        self.metadata.append(dict(context.invocation_metadata()))
        self.peers.append(context.peer())
        self.seen += len(request)
        self.begun.set()
        try:
            response = await self.answer(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.seen += len(response)
        return response

    async def give(self, request: bytes, context: Any) -> bytes:
        return message(TEXTS)

    async def wait(self, request: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return message(TEXTS)


def message(texts: list[str]) -> bytes:
    return pb.FetchSpansResponse(texts=texts).SerializeToString()


async def start(port: int = 0) -> Sender:
    server = grpc.aio.server(options=channel.server_options())
    sender = Sender(server, server.add_insecure_port(f"127.0.0.1:{port}"))
    handler: Any = grpc.unary_unary_rpc_method_handler(sender.call)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(METHOD[0], {METHOD[1]: handler})])
    await server.start()
    return sender


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[tuple[Sender, SpanClient]]:
    sender = await start()
    given = {"sender": str(sender.address), "lookup_seconds": 5.0, **options}
    async with SpanClient(ReceiverConfig(**given)) as client:
        try:
            yield sender, client
        finally:
            await sender.server.stop(0)


async def fetch(client: SpanClient, sender: Sender, spent: Spent | None = None, max_bytes: int = 2000) -> list[str]:
    return await client.fetch(sender.address, DOCUMENT, PLACES, max_bytes, spent or Spent())


async def test_passages_come_in_one_call_and_every_byte_is_counted() -> None:
    async with running() as (sender, client):
        spent = Spent()
        assert await fetch(client, sender, spent) == TEXTS
        (request,) = sender.requests
        assert request.document_digest == DOCUMENT
        assert [(span.start, span.end) for span in request.spans] == [(3, 8), (20, 22)]
        assert request.max_bytes == 2000
        assert (spent.calls, spent.sent + spent.received) == (1, sender.seen)
        assert spent.received == len(message(TEXTS))
        assert 0 < spent.ms < 5000


async def test_one_connection_serves_every_question() -> None:
    async with running() as (sender, client):
        for _ in range(3):
            await fetch(client, sender)
        assert len(sender.peers) == 3
        assert len(set(sender.peers)) == 1


async def test_fewer_passages_where_the_next_may_not_fit() -> None:
    async with running() as (sender, client):
        sender.answer = answering([TEXTS[0]])
        # "Größe" has 7 bytes, and two more characters may have up to 8.
        assert await fetch(client, sender, max_bytes=14) == [TEXTS[0]]
        with pytest.raises(PeerError, match="1 of 2 passages came, though the next one would have fitted"):
            await fetch(client, sender, max_bytes=15)


def answering(texts: list[str]) -> Answer:
    async def answer(request: bytes, context: Any) -> bytes:
        return message(texts)

    return answer


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([*TEXTS, ""], "3 passages came, 2 were asked for"),
        ([], "0 of 2 passages came"),
        (["Groß", "門🚢"], r"passage 0 has 4 characters, 3\.\.8 was asked for"),
        (["Größe", "門🚢 "], r"passage 1 has 3 characters, 20\.\.22 was asked for"),
        (["🚢" * 5, "門🚢"], "27 bytes of passages came, at most 20 were asked for"),
    ],
    ids=["too many", "none", "too short", "too long", "too heavy"],
)
async def test_nonsense_is_refused_and_counted(texts: list[str], words: str) -> None:
    async with running() as (sender, client):
        sender.answer = answering(texts)
        spent = Spent()
        with pytest.raises(PeerError, match=words) as caught:
            await fetch(client, sender, spent, max_bytes=20)
        assert type(caught.value) is PeerError
        assert str(sender.address) in caught.value.message
        assert (spent.calls, spent.sent + spent.received) == (1, sender.seen)


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"], ids=["no message", "no UTF-8"])
async def test_what_is_no_response_is_a_peer_error(garbage: bytes) -> None:
    async with running() as (sender, client):

        async def answer(request: bytes, context: Any) -> bytes:
            return garbage

        sender.answer = answer
        with pytest.raises(PeerError):
            await fetch(client, sender)
        sender.answer = sender.give
        assert await fetch(client, sender) == TEXTS


async def test_what_the_sender_reports_is_raised_again_and_not_repeated() -> None:
    async with running() as (sender, client):

        async def refuse(request: bytes, context: Any) -> bytes:
            packed = msgpack.packb({"code": "NOT_FOUND", "fields": {"document": "00"}})
            context.set_trailing_metadata((("kvferry-error-bin", packed),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "document 00: not read here")
            raise AssertionError

        sender.answer = refuse
        spent = Spent()
        with pytest.raises(NotFoundError, match="not read here"):
            await fetch(client, sender, spent)
        assert (spent.calls, len(sender.requests)) == (1, 1)


async def test_a_silent_sender_ends_at_the_deadline() -> None:
    async with running(lookup_seconds=0.3) as (sender, client):
        sender.answer = sender.wait
        spent, before = Spent(), time.monotonic()
        with pytest.raises(DeadlineError):
            await fetch(client, sender, spent)
        assert 0.25 < time.monotonic() - before < 3
        assert spent.ms > 250
        # The same sender, awake again, is found over another connection.
        sender.answer = sender.give
        assert await fetch(client, sender) == TEXTS
        assert len(set(sender.peers)) == 2


async def test_a_call_that_is_cancelled_here_is_cancelled_there() -> None:
    async with running() as (sender, client):
        sender.answer = sender.wait
        task = asyncio.ensure_future(fetch(client, sender))
        await asyncio.wait_for(sender.begun.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(sender.cancelled.wait(), 5)
        sender.answer = sender.give
        assert await fetch(client, sender) == TEXTS


async def test_nobody_there_is_tried_twice_and_named() -> None:
    async with running() as (sender, client):
        await sender.server.stop(0)
        spent = Spent()
        with pytest.raises(UnavailableError, match=f"{sender.address}: cannot be reached for FetchSpans"):
            await fetch(client, sender, spent)
        assert spent.calls == 2


async def test_a_sender_that_was_started_again_is_found_at_once() -> None:
    async with running() as (sender, client):
        assert await fetch(client, sender) == TEXTS
        await sender.server.stop(0)
        with pytest.raises(UnavailableError):
            await fetch(client, sender)
        again = await start(sender.address.port)
        assert await fetch(client, again) == TEXTS
        await again.server.stop(0)


async def test_a_connection_that_breaks_is_made_anew_once() -> None:
    async with running() as (sender, client):

        async def break_off(request: bytes, context: Any) -> bytes:
            sender.answer = sender.give
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
            raise AssertionError

        sender.answer = break_off
        spent = Spent()
        assert await fetch(client, sender, spent) == TEXTS
        assert (spent.calls, len(set(sender.peers))) == (2, 2)
        # The request went twice, and counts twice.
        assert spent.sent + spent.received == sender.seen


async def test_a_channel_is_given_up_without_those_who_still_use_it() -> None:
    async with running() as (sender, client):
        release = asyncio.Event()

        async def answer(request: bytes, context: Any) -> bytes:
            if len(sender.requests) == 1:
                await release.wait()
            elif len(sender.requests) == 2:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")
            return message(TEXTS)

        sender.answer = answer
        slow = asyncio.ensure_future(fetch(client, sender))
        await asyncio.wait_for(sender.begun.wait(), 5)
        assert await fetch(client, sender) == TEXTS
        release.set()
        assert await slow == TEXTS
        assert [peer == sender.peers[0] for peer in sender.peers] == [True, True, False]


async def test_only_so_many_channels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_client, "MAX_CHANNELS", 2)

    async with running() as (first, client):
        others = [await start() for _ in range(2)]
        for sender in (first, *others, first):
            assert await fetch(client, sender) == TEXTS
        # The first one had to go for the third, and is connected anew.
        assert len(set(first.peers)) == 2
        assert await fetch(client, others[1]) == TEXTS
        assert len(set(others[1].peers)) == 1
        for sender in others:
            await sender.server.stop(0)


async def test_the_token_goes_to_the_configured_sender_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("kvf_secret_of_the_receiver_0123456789")

    async with running(token_file=str(tmp_path / "token")) as (sender, client):
        other = await start()
        await fetch(client, sender)
        await fetch(client, other)
        assert sender.metadata[0]["authorization"] == "Bearer kvf_secret_of_the_receiver_0123456789"
        assert "authorization" not in other.metadata[0]
        # It is read anew for every question.
        (tmp_path / "token").write_text("kvf_another_secret_0123456789abcdef")
        await fetch(client, sender)
        assert sender.metadata[-1]["authorization"] == "Bearer kvf_another_secret_0123456789abcdef"
        await other.server.stop(0)


async def test_a_token_that_is_refused_is_said() -> None:
    async with running() as (sender, client):

        async def refuse(request: bytes, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token: shows none")
            raise AssertionError

        sender.answer = refuse
        with pytest.raises(AuthenticationError, match="shows none"):
            await fetch(client, sender)


async def test_a_token_never_crosses_a_network_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("kvf_secret_of_the_receiver_0123456789")

    config = ReceiverConfig(sender="studio.example:9", token_file=str(tmp_path / "token"))
    async with SpanClient(config) as client:
        with pytest.raises(ConfigError, match=r"token: would cross the network to studio\.example:9"):
            await client.fetch(client.configured, DOCUMENT, PLACES, 2000, Spent())


def test_the_configured_sender_has_a_default_port_and_must_be_an_address() -> None:
    assert str(SpanClient(ReceiverConfig()).configured) == "127.0.0.1:7411"
    assert str(SpanClient(ReceiverConfig(sender="studio.local")).configured) == "studio.local:7411"
    for wrong in ("", "tcp://studio.local:7", "studio.local:x"):
        with pytest.raises(ConfigError, match="sender"):
            SpanClient(ReceiverConfig(sender=wrong))


async def test_the_second_try_has_what_the_first_left_of_the_time() -> None:
    async with running(lookup_seconds=1.0) as (sender, client):

        async def break_off(request: bytes, context: Any) -> bytes:
            sender.answer = sender.wait
            await asyncio.sleep(0.7)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
            raise AssertionError

        sender.answer = break_off
        spent, before = Spent(), time.monotonic()
        with pytest.raises(DeadlineError):
            await fetch(client, sender, spent)
        assert spent.calls == 2
        assert time.monotonic() - before < 1.6
