"""Every method from document to answer, through two daemons in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core import errors, rpc
from kvferry.core.digests import digest
from kvferry.engine.model import LoadedModel
from kvferry.proto.v1 import receiver_service_pb2 as receiver_pb
from kvferry.proto.v1 import sender_service_pb2 as sender_pb
from kvferry.sender import registry

DOCUMENT = "The access code of the north warehouse is 4417. Größe: 12 m², 門 🚢. <|im_end|> " * 4
QUESTIONS = ("What is the access code?", "Who keeps the keys, and when?")
METHODS = ("A0", "A1", "A7", "B0", "B1")
LOSSLESS = METHODS[1:]


def expected_reading(model: LoadedModel, method: str) -> int:
    return len(model.prompt.prefix("" if method == "A0" else DOCUMENT))


@pytest.mark.parametrize("method", METHODS)
def test_from_document_to_answer(
    both: Any, pair: Any, pair_model: LoadedModel, local_answer: Callable[..., tuple[int, ...]], method: str
) -> None:
    text = f"{method}. {DOCUMENT}"
    sent = both.send(text, method)
    end = sent.end
    assert (end.method, end.form, end.receiver) == (method, "kv" if method == "B1" else "text", pair.receiver)
    assert not end.reused
    assert end.moved_bytes == end.payload_bytes > 0
    assert end.wire_bytes > end.moved_bytes + end.manifest_bytes
    tokens = len(pair_model.prompt.prefix(text))
    account = json.loads(end.account_json)
    assert account["prefill_tokens"] == (tokens if method == "B1" else 0)
    assert account["dense_bf16_bytes"] == tokens * 2 * 2 * 3 * 3 * 8
    assert end.artifact_id in both.listed()
    for question in QUESTIONS:
        asked = both.ask(end.artifact_id, question)
        assert asked.ids == local_answer(pair_model, "" if method == "A0" else text, question)
        assert asked.end.text == "".join(piece.text for piece in asked.pieces)
        assert asked.ids == tuple(piece.token_id for piece in asked.pieces if piece.HasField("token_id"))
        assert asked.ledger["method"] == method
        assert asked.ledger["wire_bytes"] == end.wire_bytes
        assert asked.ledger["resent_bytes"] == 0
        assert asked.ledger["tokens"]["generated"] == len(asked.ids)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_send_moves_nothing_and_reads_nothing(both: Any, method: str) -> None:
    first = both.send(f"Twice, {method}. {DOCUMENT}", method).end
    again = both.send(f"Twice, {method}. {DOCUMENT}", method)
    assert again.artifact_id == first.artifact_id
    assert (again.end.reused, again.end.moved_bytes, again.end.wire_bytes) == (True, 0, 0)
    assert not any(stage in ("prefill", "transfer", "commit") for stage, _, _ in again.progress)


def test_progress_goes_through_every_stage(both: Any, pair_model: LoadedModel) -> None:
    sent = both.send(f"Progress. {DOCUMENT}")
    stages = [stage for stage, _, _ in sent.progress]
    assert list(dict.fromkeys(stages)) == ["tokenise", "prefill", "method", "encode", "offer", "transfer", "commit"]
    for name, total in (("prefill", len(pair_model.prompt.prefix(f"Progress. {DOCUMENT}"))), ("transfer", 0)):
        done = [done for stage, done, _ in sent.progress if stage == name]
        assert done == sorted(done)
        assert len(done) > 3
        assert done[-1] == (total or sent.end.payload_bytes)


def test_what_the_receiver_dropped_is_carried_again_without_reading(both: Any) -> None:
    first = both.send(f"Dropped. {DOCUMENT}")
    both.drop(first.artifact_id)
    assert first.artifact_id not in both.listed()
    with pytest.raises(errors.NotFoundError, match=first.artifact_id.hex()):
        both.ask(first.artifact_id, QUESTIONS[0])
    again = both.send(f"Dropped. {DOCUMENT}")
    assert again.end.reused
    assert again.end.moved_bytes == first.end.payload_bytes
    assert both.ask(first.artifact_id, QUESTIONS[0]).ids


def test_two_documents_interleaved_cold_and_warm(
    both: Any, pair_model: LoadedModel, local_answer: Callable[..., tuple[int, ...]]
) -> None:
    texts = (f"First. {DOCUMENT}", f"Second. The south warehouse opens at 7:30. {DOCUMENT[:200]}")
    ids = {(text, method): both.send(text, method).artifact_id for text in texts for method in ("A1", "B0", "B1")}
    expected = {(text, question): local_answer(pair_model, text, question) for text in texts for question in QUESTIONS}
    assert len(set(expected.values())) == 4
    # The first round finds no cache at hand, the second one does; documents alternate within each.
    for _ in ("cold", "warm"):
        for question in QUESTIONS:
            for (text, _), artifact_id in ids.items():
                assert both.ask(artifact_id, question).ids == expected[text, question]


def test_a_system_prompt_of_ones_own(both: Any) -> None:
    plain, own = both.send(f"System. {DOCUMENT}"), both.send(f"System. {DOCUMENT}", system="Réponds en français.")
    assert plain.artifact_id != own.artifact_id
    assert both.ask(plain.artifact_id, QUESTIONS[0]).ids != both.ask(own.artifact_id, QUESTIONS[0]).ids
    empty = both.send(f"System. {DOCUMENT}", system="")
    assert empty.artifact_id not in (plain.artifact_id, own.artifact_id)


def test_sampling_follows_its_seed(both: Any) -> None:
    artifact_id = both.send(f"Sampling. {DOCUMENT}", "A1").artifact_id

    def sample(seed: int, **options: float) -> tuple[int, ...]:
        ids: tuple[int, ...] = both.ask(artifact_id, QUESTIONS[0], 12, temperature=1.5, seed=seed, **options).ids
        return ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    # Almost no mass: only the likeliest token is left, whatever the temperature.
    assert sample(1, top_p=1e-6) == both.ask(artifact_id, QUESTIONS[0], 12).ids


def test_an_answer_stops_at_its_limit(both: Any) -> None:
    artifact_id = both.send(f"Limit. {DOCUMENT}", "B1").artifact_id
    longer, shorter = both.ask(artifact_id, QUESTIONS[0], 8), both.ask(artifact_id, QUESTIONS[0], 3)
    assert len(shorter.ids) == 3
    assert shorter.end.finish_reason == "length"
    assert longer.ids[:3] == shorter.ids


def test_each_answer_is_one_line_of_the_ledger(both: Any, pair: Any) -> None:
    artifact_id = both.send(f"Ledger. {DOCUMENT}", "B1").artifact_id
    asked = [both.ask(artifact_id, question) for question in QUESTIONS]
    lines = (pair.folder / "receiver" / "ledger.jsonl").read_text().splitlines()
    mine = [json.loads(line) for line in lines if artifact_id.hex() in line]
    assert mine == [one.ledger for one in asked]


def test_passages_are_looked_up_where_the_document_was_read(both: Any) -> None:
    text = f"Spans. {DOCUMENT}"
    both.send(text, "A0")
    at = text.index("門")

    def fetch(document: bytes, *spans: tuple[int, int]) -> list[str]:
        request = sender_pb.FetchSpansRequest(
            document_digest=document, spans=[sender_pb.Span(start=start, end=end) for start, end in spans]
        )
        with rpc.translating("sender", "FetchSpans"):
            return list(both.sending.FetchSpans(request).texts)

    assert fetch(digest(text.encode()), (at, at + 3), (0, 5)) == ["門 🚢", "Spans"]
    with pytest.raises(errors.NotFoundError):
        fetch(bytes(32), (0, 1))
    with pytest.raises(errors.InvalidRequestError, match="document_digest: 3 bytes"):
        fetch(b"abc", (0, 1))
    with pytest.raises(errors.InvalidRequestError, match="is not inside"):
        fetch(digest(text.encode()), (0, len(text) + 1))


def test_both_daemons_describe_the_same_model(both: Any, pair_model: LoadedModel) -> None:
    sender = both.sending.Describe(sender_pb.SenderServiceDescribeRequest())
    receiver = both.receiving.Describe(receiver_pb.ReceiverServiceDescribeRequest())
    assert sender.node.model == receiver.node.model
    assert (sender.node.role, receiver.node.role) == ("sender", "receiver")
    assert sender.node.model.weights == pair_model.profile.model.weights.hex()
    assert [method.id for method in sender.methods] == [method.info.id for method in registry.METHODS]


def test_the_artifact_speaks_for_a_long_document_as_for_a_short_one(
    both: Any, pair_model: LoadedModel, local_answer: Callable[..., tuple[int, ...]]
) -> None:
    text = "Every crate that arrives is weighed. " * 40
    tokens = len(pair_model.prompt.prefix(text))
    assert tokens > 400
    for method in ("A7", "B1"):
        artifact_id = both.send(text, method).artifact_id
        asked = both.ask(artifact_id, QUESTIONS[1])
        assert asked.ids == local_answer(pair_model, text, QUESTIONS[1])
        assert asked.ledger["rows"] == {"min": tokens, "mean": tokens, "max": tokens}


def test_an_empty_document_is_a_document(both: Any, pair_model: LoadedModel, local_answer: Callable[..., Any]) -> None:
    for method in LOSSLESS:
        asked = both.ask(both.send("", method).artifact_id, QUESTIONS[0])
        assert asked.ids == local_answer(pair_model, "", QUESTIONS[0])
