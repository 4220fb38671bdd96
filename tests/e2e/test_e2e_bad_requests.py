"""Bad requests of every kind: one clear error each, and the daemon goes on serving."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core import errors, limits
from kvferry.core.digests import digest
from kvferry.proto.v1 import sender_service_pb2 as pb
from kvferry.sender import service

DOCUMENT = "The access code of the north warehouse is 4417. "
QUESTION = "What is the access code?"


@pytest.fixture
def artifact_id(both: Any) -> bytes:
    sent: bytes = both.send(f"Bad requests. {DOCUMENT}", "B1").artifact_id
    return sent


@pytest.fixture(autouse=True)
def _still_serving(both: Any) -> Iterator[None]:
    yield
    assert both.ask(both.send(f"Bad requests. {DOCUMENT}", "B1").artifact_id, QUESTION, 2).ids


NAN, INFINITY = float("nan"), float("inf")
BAD_QUESTIONS: list[tuple[dict[str, Any], type[errors.KvferryError], str]] = [
    ({"question": ""}, errors.InvalidRequestError, "^question: is empty$"),
    ({"question": " \n\t\u3000"}, errors.InvalidRequestError, "^question: is empty$"),
    ({"question": "門" * 100_000}, errors.TooLargeError, "^question: 300000 bytes, the limit is 262144"),
    ({"max_tokens": 0}, errors.InvalidRequestError, "^max_tokens: 0, must be at least 1"),
    ({"max_tokens": 4097}, errors.TooLargeError, "^max_tokens: 4097, the limit is 4096"),
    ({"max_tokens": 2**32 - 1}, errors.TooLargeError, "^max_tokens: 4294967295"),
    ({"max_tokens": 4096}, errors.ContextOverflowError, r"^context: \d+ prefix \+ \d+ question \+ 4096 answer"),
    ({"question": "x" * 200_000}, errors.ContextOverflowError, r"^context: \d+ prefix"),
    ({"top_p": 0.0}, errors.InvalidRequestError, r"^top_p: 0\.0, must be above 0, at most 1"),
    ({"top_p": 1.01}, errors.InvalidRequestError, r"^top_p: 1\.01"),
    ({"top_p": NAN}, errors.InvalidRequestError, "^top_p: nan"),
    ({"temperature": -0.1}, errors.InvalidRequestError, r"^temperature: -0\.1, must be from 0"),
    ({"temperature": INFINITY}, errors.InvalidRequestError, "^temperature: inf"),
    ({"temperature": NAN}, errors.InvalidRequestError, "^temperature: nan"),
    ({"artifact_id": b""}, errors.InvalidRequestError, "^artifact_id: 0 bytes, a digest has 32"),
    ({"artifact_id": b"\x01" * 33}, errors.InvalidRequestError, "^artifact_id: 33 bytes"),
    ({"artifact_id": b"\x01" * 32}, errors.NotFoundError, f"{'01' * 32}: not here"),
]


@pytest.mark.parametrize(("bad", "expected", "words"), BAD_QUESTIONS, ids=range(len(BAD_QUESTIONS)))
def test_a_bad_question(
    both: Any, artifact_id: bytes, bad: dict[str, Any], expected: type[errors.KvferryError], words: str
) -> None:
    asked = {"artifact_id": artifact_id, "question": QUESTION, "max_tokens": 4, **bad}
    with pytest.raises(expected, match=words) as caught:
        both.ask(**asked)
    assert type(caught.value) is expected
    assert not caught.value.retryable
    (field,) = bad
    if expected is errors.InvalidRequestError:
        assert caught.value.fields["field"] == field


BAD_SENDS: list[tuple[dict[str, Any], type[errors.KvferryError], str]] = [
    ({"method": "B17"}, errors.UnknownMethodError, r"^method: 'B17' is not one of A0 \(none\), A1 \(full\)"),
    ({"method": ""}, errors.UnknownMethodError, "^method: '' is not one of"),
    ({"method": "門" * 3000}, errors.UnknownMethodError, "^method: '門門"),
    ({"method": "A7", "parameters": {"level": 23}}, errors.InvalidRequestError, "^level: 23, must be .* to 22$"),
    ({"method": "A7", "parameters": {"level": "3"}}, errors.InvalidRequestError, "^level: '3', must be a whole"),
    ({"parameters": {"budget": 3}}, errors.InvalidRequestError, "^budget: method B1 has no such parameter"),
    ({"receiver": "nowhere"}, errors.UnavailableError, "^nowhere:7412: cannot be reached for Offer"),
    ({"receiver": "host:port"}, errors.ConfigError, "^receiver: 'host:port' is not host:port"),
    ({"receiver": "::1"}, errors.ConfigError, "^receiver: '::1': write an IPv6 address"),
    ({"text_digest": b"\x01" * 32}, errors.TransferError, "^document: digest [0-9a-f]+…, announced 0101"),
    ({"text_digest": b""}, errors.TransferError, "^document: digest"),
    ({"text_bytes": 10}, errors.TransferError, "^document: more than the 10 bytes that were announced"),
    ({"text_bytes": 10_000}, errors.TransferError, r"^document: ended after \d+ of 10000 bytes"),
    (
        {"text_bytes": 2**40},
        errors.TooLargeError,
        f"^document: {2**40} bytes, the limit is {limits.MAX_DOCUMENT_BYTES}",
    ),
    ({"question": "門" * 100_000}, errors.TooLargeError, "^question: over 262144 bytes"),
]


@pytest.mark.parametrize(("bad", "expected", "words"), BAD_SENDS, ids=range(len(BAD_SENDS)))
def test_a_bad_send(both: Any, bad: dict[str, Any], expected: type[errors.KvferryError], words: str) -> None:
    before = both.listed()
    with pytest.raises(expected, match=words) as caught:
        both.send(f"A bad send. {DOCUMENT}", **bad)
    assert type(caught.value) is expected
    assert both.listed() == before


@pytest.mark.parametrize(
    ("data", "byte", "value"),
    [(b"abc\xff", 3, "0xff"), (b"\xc3", 0, "0xc3"), ("門".encode("utf-16"), 0, "0xff"), (b"\xed\xa0\x80", 0, "0xed")],
)
def test_a_document_that_is_not_utf8(both: Any, data: bytes, byte: int, value: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=rf"^document: not UTF-8 at byte {byte} \({value}\)"):
        both.send(data, "A1")


def test_a_document_that_does_not_fit_the_context(both: Any) -> None:
    with pytest.raises(errors.ContextOverflowError, match=r"^context: \d+ prefix .* the model takes 4096"):
        both.send("門" * 5000, "B1")


def uploaded(both: Any, *requests: pb.SendRequest) -> Any:
    return both.finish_send(both.sending.Send(iter(requests)))


def start(text: bytes = b"abc", **fields: Any) -> pb.SendRequest:
    return pb.SendRequest(start=pb.SendStart(method="A1", text_bytes=len(text), text_digest=digest(text), **fields))


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "^start: the first message of Send must carry it"),
        ([pb.SendRequest()], "^start: the first message"),
        ([pb.SendRequest(text=b"abc")], "^start: the first message"),
        ([start(), start()], "^text: every message of Send after the first must carry it"),
        ([start(), pb.SendRequest()], "^text: every message"),
        ([start(parameters={"level": pb.ParameterValue()}), pb.SendRequest(text=b"abc")], "^level: no value given"),
    ],
    ids=range(6),
)
def test_an_upload_that_breaks_the_protocol(both: Any, requests: list[pb.SendRequest], words: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=words):
        uploaded(both, *requests)


def test_an_upload_in_single_bytes_is_an_upload(both: Any, pair: Any) -> None:
    text = "Tür".encode()
    pieces = [pb.SendRequest(text=bytes([byte])) for byte in text]
    sent = uploaded(both, start(text, receiver=pair.receiver), *pieces, pb.SendRequest(text=b""))
    assert both.ask(sent.artifact_id, QUESTION, 2).ids


def test_an_upload_that_falls_silent_is_given_up(
    here: Callable[..., Any],
    peers: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_UPLOAD_IDLE_SECONDS", 0.3)
    driver, over = peers(here("sender", tiny_model_dir()).address), threading.Event()

    def frozen() -> Iterator[pb.SendRequest]:
        yield start(b"abc")
        yield pb.SendRequest(text=b"a")
        over.wait(30)

    with pytest.raises(errors.TransferError, match=r"^document: nothing came for 0\.3 s"):
        driver.finish_send(driver.sending.Send(frozen()))
    over.set()


def test_a_receiver_that_is_down(both: Any) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(errors.UnavailableError, match=f"^{address}: cannot be reached for Offer") as caught:
            both.send(f"Nobody there. {DOCUMENT}", "A0", receiver=address)
    assert caught.value.retryable
    # The artifact was made all the same: the next send only has to carry it.
    assert both.send(f"Nobody there. {DOCUMENT}", "A0").end.reused


def test_something_else_listens_where_the_receiver_should(both: Any) -> None:
    with pytest.raises(errors.PeerError) as caught:
        both.send(f"A sender is no receiver. {DOCUMENT}", "A0", receiver=both.sender)
    assert caught.value.fields["status"] == "UNIMPLEMENTED"
    assert both.sender in caught.value.message


def test_a_document_over_the_senders_limit(
    here: Callable[..., Any], peers: Callable[..., Any], tiny_model_dir: Callable[..., Path], pair: Any
) -> None:
    driver = peers(here("sender", tiny_model_dir(), max_document_bytes=100_000).address, pair.receiver)
    with pytest.raises(errors.TooLargeError, match="^document: 300000 bytes, the limit is 100000"):
        driver.send("x" * 300_000, "A0")
    assert driver.send("x" * 100_000, "A0").artifact_id


@pytest.mark.parametrize(
    ("encoded", "words"),
    [(b"", "^manifest: "), (b"\xc1", "^manifest: "), (bytes(1000), "^manifest: "), (b"\x80", "^version: .* has None")],
)
def test_an_offer_that_is_no_manifest(both: Any, encoded: bytes, words: str) -> None:
    with pytest.raises(errors.ManifestError, match=words):
        both.offer(encoded)


def test_a_wrong_id_elsewhere(both: Any) -> None:
    for call in (both.drop, both.commit):
        with pytest.raises(errors.InvalidRequestError, match="^artifact_id: 3 bytes"):
            call(b"abc")
        with pytest.raises(errors.NotFoundError, match="01" * 32):
            call(b"\x01" * 32)
