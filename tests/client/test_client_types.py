"""Arguments of a wrong type are refused by name and type, by both clients, before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.client import AsyncClient, Client, ConfigError, InvalidRequestError

ID = "ab" * 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("question", 5),
        ("question", b"Why?"),
        ("question", None),
        ("artifact", 5),
        ("artifact", None),
        ("artifact", b"ab" * 32),
        ("max_tokens", "many"),
        ("seed", 1.5),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", "all"),
        ("top_p", [1]),
        ("fallback", "yes"),
        ("fallback", 1),
    ],
)
def test_a_question_names_what_is_of_a_wrong_type(kv: Any, daemons: Any, field: str, value: Any) -> None:
    given: dict[str, Any] = {"artifact": ID, "question": "Why?"} | {field: value}
    artifact, question = given.pop("artifact"), given.pop("question")
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
        kv.ask(artifact, question, **given)
    assert caught.value.fields["field"] == field
    if field not in {"max_tokens", "seed"}:
        assert caught.value.message.startswith(f"{field}: of type {type(value).__name__}, must be ")
    assert daemons.receiver.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", 5),
        ("method", None),
        ("system", 5),
        ("system", b"You help."),
        ("question", 5),
        ("fallback", "no"),
        ("progress", 5),
        ("text", 5),
        ("text", b"A text."),
    ],
)
def test_a_send_names_what_is_of_a_wrong_type(kv: Any, daemons: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kv.send(**({"text": "A text."} | {field: value}))
    assert caught.value.message.startswith(f"{field}: of type {type(value).__name__}, must be ")
    assert caught.value.fields == {"field": field, "value": type(value).__name__}
    assert not daemons.sender.start.ByteSize()


def test_a_document_and_a_parameter_of_a_wrong_type(kv: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^document: a int is neither"):
        kv.send(5)
    with pytest.raises(InvalidRequestError, match="^budget: a list cannot be a parameter"):
        kv.send(text="A text.", budget=[1])


@pytest.mark.parametrize("questions", ["Why?", b"Why?", 5, None])
def test_several_questions_are_not_the_characters_of_one(kv: Any, questions: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^questions: of type {type(questions).__name__}, must be several"):
        kv.ask_many(ID, questions)


@pytest.mark.parametrize("concurrency", ["4", 1.5, None, True])
def test_a_concurrency_is_a_whole_number(kv: Any, concurrency: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^concurrency: of type {type(concurrency).__name__}, must be"):
        kv.ask_many(ID, ["Why?"], concurrency=concurrency)


@pytest.mark.parametrize("spans", [5, None, "ab", [5], [(1,)], [(1, 2, 3)], [("1", 2)], [(1.0, 2)]])
def test_spans_are_pairs_of_whole_numbers(kv: Any, spans: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^spans: "):
        kv.fetch_spans(ID, spans)


@pytest.mark.parametrize("digest", [5, None, b"ab" * 32])
def test_a_digest_is_a_text(kv: Any, digest: Any) -> None:
    with pytest.raises(InvalidRequestError, match="^document_digest: of type"):
        kv.fetch_spans(digest, [(0, 1)])


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sender", 7411),
        ("receiver", None),
        ("deliver_to", 5),
        ("look_up_at", 5),
        ("timeout", "30"),
        ("timeout", True),
        ("idle_timeout", None),
        ("authority", 5),
        ("certificate", b"a.pem"),
        ("key", 5),
        ("token", b"secret"),
    ],
)
def test_a_client_names_what_is_of_a_wrong_type(client: type[Any], field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        client(**{field: value})
    assert caught.value.message.startswith(f"{field}: of type {type(value).__name__}, must be ")
    assert caught.value.fields == {"field": field, "value": type(value).__name__}


def test_numbers_of_numpy_are_numbers(kv: Any, fakes: Any) -> None:
    assert kv.ask(fakes.OTHER.hex(), "Why?", temperature=np.float32(0.5), top_p=np.float64(0.5)).text
