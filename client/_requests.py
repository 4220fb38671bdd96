"""Building requests, for both clients. Everything that can be checked here is checked before it travels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvferry.client import _types
from kvferry.client._documents import Document
from kvferry.core import digests, wire
from kvferry.core.errors import InvalidRequestError, TooLargeError
from kvferry.core.limits import MAX_QUESTION_BYTES, MIB
from kvferry.core.manifest import Scalar
from kvferry.proto.v1 import receiver_service_pb2, sender_service_pb2

_TEXT_BYTES = MIB
_UINT32 = 2**32
_UINT64 = 2**64


def send_start(
    document: Document,
    *,
    method: str,
    receiver: str,
    question: str | None,
    system: str | None,
    fallback: bool = False,
    parameters: Mapping[str, Scalar],
) -> sender_service_pb2.SendStart:
    """Return the first part of a send.

    Raises:
        InvalidRequestError: when a value cannot travel.
        TooLargeError: when the question is over the limit.
    """
    if question is not None:
        _check_question(question)
    _types.check_text("method", method)
    if system is not None:
        _types.check_text("system", system)
    _types.check_flag("fallback", fallback)
    for field, value in {"method": method, "system": system, **parameters}.items():
        if isinstance(value, str):
            _check_text(value, field)
    return sender_service_pb2.SendStart(
        method=method,
        parameters=wire.parameters_to_message(parameters),
        receiver=receiver,
        system=system,
        question=question,
        text_bytes=len(document.data),
        text_digest=document.digest,
        allow_fallback=fallback,
    )


def send_parts(start: sender_service_pb2.SendStart, document: Document) -> Iterator[sender_service_pb2.SendRequest]:
    """Yield the messages of a send: its start, then the text in pieces of at most 1 MiB."""
    yield sender_service_pb2.SendRequest(start=start)
    view = memoryview(document.data)
    for offset in range(0, len(view), _TEXT_BYTES):
        yield sender_service_pb2.SendRequest(text=bytes(view[offset : offset + _TEXT_BYTES]))


def ask(
    question: str,
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    fallback: bool = False,
    sender: str = "",
) -> receiver_service_pb2.AskRequest:
    """Return a question; the artifact is filled in by the caller.

    Raises:
        InvalidRequestError: naming the option, its value and what is allowed.
        TooLargeError: when the question is over the limit.
    """
    _check_question(question)
    _check_integer("max_tokens", max_tokens, 1, _UINT32)
    _check_integer("seed", seed, 0, _UINT64)
    _check_number("temperature", temperature, "a finite number of at least 0", lambda value: value >= 0)
    _check_number("top_p", top_p, "above 0, at most 1", lambda value: 0 < value <= 1)
    _types.check_flag("fallback", fallback)
    return receiver_service_pb2.AskRequest(
        question=question,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        allow_fallback=fallback,
        sender=sender,
    )


def fetch_spans(document_digest: str, spans: Iterable[tuple[int, int]]) -> sender_service_pb2.FetchSpansRequest:
    """Return a look-up.

    Raises:
        InvalidRequestError: when the digest or a span is malformed.
    """
    _types.check_text("document_digest", document_digest)
    request = sender_service_pb2.FetchSpansRequest(document_digest=digests.from_hex(document_digest, "document_digest"))
    for start, end in _pairs(spans):
        _check_integer("spans", start, 0, _UINT64)
        _check_integer("spans", end, start, _UINT64)
        request.spans.add(start=start, end=end)
    return request


def _pairs(spans: object) -> Iterator[tuple[int, int]]:
    if isinstance(spans, str | bytes) or not isinstance(spans, Iterable):
        raise _types.wrong("spans", spans, "pairs of whole numbers")
    for span in spans:
        if not isinstance(span, tuple | list) or len(span) != len(("start", "end")):
            raise _types.wrong("spans", span, "a pair of whole numbers each")
        yield span[0], span[1]


def _check_question(question: str) -> None:
    _types.check_text("question", question)
    if not question.strip():
        raise InvalidRequestError("question: is empty", field="question")
    _check_text(question, "question")
    size = len(question.encode("utf-8"))
    if size > MAX_QUESTION_BYTES:
        raise TooLargeError(
            f"question: {size} bytes, the limit is {MAX_QUESTION_BYTES}",
            field="question",
            value=size,
            limit=MAX_QUESTION_BYTES,
        )


def _check_text(value: str, field: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field}: the character at {error.start} is half of a surrogate pair", field=field, character=error.start
        ) from error


def _check_integer(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise InvalidRequestError(
            f"{field}: {value!r}, must be a whole number from {low} to {high - 1}", field=field, value=str(value)
        )


def _check_number(field: str, value: float, allowed: str, fits: Callable[[float], bool]) -> None:
    if not _types.is_number(value):
        raise _types.wrong(field, value, f"a number, {allowed}")
    if not (fits(value) and math.isfinite(value)):
        raise InvalidRequestError(f"{field}: {value!r}, must be {allowed}", field=field, value=value)
