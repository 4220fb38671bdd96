"""A daemon that answers with bytes that are no message of ours: an error of the peer, from both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvferry.client import PeerError

ID = "ab" * 32
CALLS: dict[str, Callable[[Any], Any]] = {
    "List": lambda kv: kv.artifacts(),
    "Drop": lambda kv: kv.drop(ID),
    "Describe": lambda kv: kv.describe_receiver(),
    "FetchSpans": lambda kv: kv.fetch_spans(ID, [(0, 1)]),
    "Ask": lambda kv: kv.ask(ID, "Why?"),
    "Send": lambda kv: kv.send(text="A text."),
}


class Garbage(grpc.GenericRpcHandler):  # type: ignore[misc]  (grpc has no types)
    """Answers every call with bytes that are no message."""

    def service(self, handler_call_details: Any) -> Any:
        del handler_call_details
        return grpc.stream_stream_rpc_method_handler(lambda _requests, _context: iter([b"\xff\xff\xff"]))


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Garbage(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_message_is_a_peer_error(open_client: Any, address: str, call: str) -> None:
    kv = open_client(sender=address, receiver=address)
    with pytest.raises(PeerError, match=f"^{address}: {call} ") as caught:
        CALLS[call](kv)
    assert type(caught.value) is PeerError


def test_the_senders_description_as_well(open_client: Any, address: str) -> None:
    kv = open_client(sender=address, receiver=address)
    for describe in (kv.describe_sender, kv.methods):
        with pytest.raises(PeerError, match=f"^{address}: Describe "):
            describe()
