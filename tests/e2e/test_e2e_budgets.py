"""A receiver whose tokenizer is not the sender's: budgets are in its tokens, exactly, and the ledger says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import zstandard
from blake3 import blake3

from kvferry.client import Client, KvferryError, PeerError, TooLargeError
from kvferry.core import limits
from kvferry.core.container import ENDS, EXCERPTS
from kvferry.core.stored import read
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel, load
from kvferry.proto.v1 import receiver_service_pb2 as pb
from kvferry.receiver.service import ReceiverServicer
from kvferry.sender.auto import candidates

SHAPE: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 2}
DOCUMENT = (
    "The access code of the south pier is 2093. Größe: 12 m², 門 🚢. The mill opens at 7:30, not before. "
    "The quick brown fox jumps over the lazy dog.\n"
) * 4
QUESTION = "What is the access code?"
BUDGETED = ("A2", "A3", "A3-aware", "A4", "A4-aware", "A5", "A5-aware")


def without_merges(model: Path, to: Path) -> Path:
    """Copy a model with a tokenizer that spells byte by byte, which takes half as many tokens again."""
    shutil.copytree(model, to)
    path = to / "tokenizer.json"
    state = json.loads(path.read_text("utf-8"))
    assert state["model"]["merges"]
    state["model"]["merges"] = []
    path.write_text(json.dumps(state), "utf-8")
    return to


@pytest.fixture
def models(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """The sender's, and a receiver's that is the same but for its tokenizer."""
    ours = tiny_model_dir(**SHAPE)
    return ours, without_merges(ours, tmp_path / "bytewise")


@pytest.fixture
def apart(here: Callable[..., Any], models: tuple[Path, Path]) -> Iterator[Client]:
    sender, receiver = here("sender", models[0]), here("receiver", models[1])
    with Client(sender=sender.address, receiver=receiver.address) as client:
        yield client


@pytest.fixture
def theirs(models: tuple[Path, Path]) -> LoadedModel:
    return load(str(models[1]))


@pytest.fixture
def ours(models: tuple[Path, Path]) -> LoadedModel:
    return load(str(models[0]))


def added(model: LoadedModel, text: str) -> int:
    """How many tokens a text adds to a model's prompt."""
    return len(model.prompt.prefix(text)) - len(model.prompt.prefix(""))


def test_the_two_tokenizers_count_differently(ours: LoadedModel, theirs: LoadedModel) -> None:
    assert added(theirs, DOCUMENT) > 1.4 * added(ours, DOCUMENT)
    assert theirs.profile.tokenizer.vocab != ours.profile.tokenizer.vocab


@pytest.mark.parametrize("method", BUDGETED)
def test_a_budget_is_in_the_receivers_tokens(
    apart: Client, ours: LoadedModel, theirs: LoadedModel, tmp_path: Path, method: str
) -> None:
    question = QUESTION if method.endswith("-aware") else None
    for budget in (150, 0.3):
        report = apart.send(text=DOCUMENT, method=method, question=question, budget=budget)
        ledger = report.ask(QUESTION, max_tokens=2).ledger
        most = budget if isinstance(budget, int) else int(added(theirs, DOCUMENT) * budget)
        assert 0 < ledger.outcome["tokens"] == ledger.tokens.material <= most
        assert ledger.outcome["tokenizer"] == theirs.profile.tokenizer.vocab.hex()
        stored = read(tmp_path / "sender" / "artifacts" / report.artifact_id, bytes.fromhex(report.artifact_id))
        if method in ("A2", "A3", "A3-aware"):
            # And it is used: sentences are up to 60 tokens long, the ends are cut anywhere.
            text = bytes(stored.sections.read(ENDS if method == "A2" else EXCERPTS)).decode("utf-8")
            assert added(theirs, text) == ledger.tokens.material > most - (3 if method == "A2" else 60)


def test_references_are_counted_in_them_too(apart: Client, theirs: LoadedModel) -> None:
    ledger = apart.send(text=DOCUMENT, method="A6", budget=400).ask(QUESTION, max_tokens=2).ledger
    assert 0 < ledger.outcome["tokens"] <= 400
    assert ledger.outcome["tokenizer"] == theirs.profile.tokenizer.vocab.hex()


def test_a_tokenizer_crosses_once_and_is_in_report_and_ledger(apart: Client, theirs: LoadedModel) -> None:
    first = apart.send(text=DOCUMENT, method="A2", budget=100)
    second = apart.send(text=DOCUMENT, method="A2", budget=101)
    whole = len(zstandard.ZstdCompressor().compress(theirs.prompt.content.description))
    assert first.account.tokenizer_bytes > whole / 2 > 200 > second.account.tokenizer_bytes > 32
    assert first.account.tokenizer_ms > 0
    for report in (first, second):
        ledger = report.ask(QUESTION, max_tokens=1).ledger
        assert ledger.tokenizer_bytes == report.account.tokenizer_bytes
        assert ledger.ms.tokenizer == report.account.tokenizer_ms
        # They belong to no artifact.
        assert ledger.wire_bytes == report.wire_bytes
    assert first.wire_bytes - second.wire_bytes < 100


@pytest.mark.parametrize("method", ["A0", "A1", "A7", "B1"])
def test_nobody_is_asked_where_nothing_counts(pair: Any, method: str) -> None:
    with Client(sender=pair.sender, receiver=pair.receiver) as client:
        report = client.send(text=DOCUMENT + method, method=method)
        ledger = report.ask(QUESTION, max_tokens=1).ledger
    assert (report.account.tokenizer_bytes, ledger.tokenizer_bytes, ledger.ms.tokenizer) == (0, 0, 0.0)
    assert "tokenizer" not in ledger.outcome


def test_what_was_made_for_one_tokenizer_is_not_sent_to_another(
    here: Callable[..., Any], models: tuple[Path, Path], ours: LoadedModel
) -> None:
    sender, near, far = here("sender", models[0]), here("receiver", models[0]), here("receiver", models[1], "far")
    with Client(sender=sender.address, receiver=near.address) as client:
        first = client.send(text=DOCUMENT, method="A3", budget=120)
        assert client.send(text=DOCUMENT, method="A3", budget=120).reused
        assert first.ask(QUESTION, max_tokens=1).ledger.outcome["tokenizer"] == ours.profile.tokenizer.vocab.hex()
        full = client.send(text=DOCUMENT, method="A1")
    with Client(sender=sender.address, receiver=far.address) as client:
        other = client.send(text=DOCUMENT, method="A3", budget=120)
        assert not other.reused
        assert other.artifact_id != first.artifact_id
        # What no tokenizer shaped serves everybody.
        assert client.send(text=DOCUMENT, method="A1").artifact_id == full.artifact_id


def test_a_choice_counts_as_the_receiver_does(
    apart: Client, theirs: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "ALLOWED", {"reduced": (("B1", {}), ("A3", {"budget": 0.25}))})
    ledger = apart.send(text=DOCUMENT, method="auto", quality="reduced").ask(QUESTION, max_tokens=1).ledger
    assert ledger.auto is not None
    assert {item.method for item in ledger.auto.choice.passed_over} == {"B1"}
    assert ledger.method == "A3"
    assert ledger.outcome["tokenizer"] == theirs.profile.tokenizer.vocab.hex()
    assert 0 < ledger.tokens.material <= added(theirs, DOCUMENT) * 0.25
    assert ledger.tokenizer_bytes > 200


@pytest.mark.parametrize(
    ("status", "said"),
    [
        # A receiver of before the call.
        (grpc.StatusCode.UNIMPLEMENTED, "Tokenizer failed with UNIMPLEMENTED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Tokenizer: no"),
    ],
)
def test_without_the_receivers_tokenizer_what_needs_no_budget_is_sent(
    here: Callable[..., Any],
    models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    status: grpc.StatusCode,
    said: str,
) -> None:
    async def refuse(_: Any, __: Any, context: Any) -> None:
        await context.abort(status, "no")

    monkeypatch.setattr(ReceiverServicer, "Tokenizer", refuse)
    sender, receiver = here("sender", models[0]), here("receiver", models[1])
    with Client(sender=sender.address, receiver=receiver.address) as client:
        with pytest.raises(KvferryError, match=said):
            client.send(text=DOCUMENT, method="A3")
        report = client.send(text=DOCUMENT, method="auto", quality="reduced")
        assert report.ask(QUESTION, max_tokens=1).ledger.tokenizer_bytes == 0
    assert report.method in ("A1", "A7")
    assert report.account.auto is not None
    reasons = {item.method: item.reason for item in report.account.auto.passed_over}
    assert said in reasons["A3"]
    assert reasons["A5"] == reasons["A3"]
    # Those for which nothing is counted are judged as ever.
    assert "TOKENIZER_MISMATCH" in reasons["B1"]


def test_a_document_of_which_a_tokenizer_may_make_too_much_is_refused_with_a_budget_and_sent_without(
    apart: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = sum(char > "\x7f" for char in DOCUMENT)
    # A byte-level tokenizer makes up to four characters of one, and one of one of ASCII.
    most = len(DOCUMENT) + 3 * beyond
    monkeypatch.setattr(limits, "MAX_GROWN_CHARACTERS", most)
    assert apart.send(text=DOCUMENT, method="A2", budget=100).method == "A2"
    monkeypatch.setattr(limits, "MAX_GROWN_CHARACTERS", most - 1)
    said = f"may make {most} characters of its {len(DOCUMENT)} before it counts them, the limit is {most - 1}"
    with pytest.raises(TooLargeError, match=f"^document: the tokenizer of 127.0.0.1.* {said}"):
        apart.send(text=DOCUMENT, method="A2", budget=99)
    report = apart.send(text=DOCUMENT, method="auto", quality="reduced")
    assert report.method in ("A1", "A7")
    assert report.account.auto is not None
    assert said in {item.method: item.reason for item in report.account.auto.passed_over}["A3"]


def test_over_tcp_nobody_can_be_asked_and_the_outcome_says_who_counted(
    here: Callable[..., Any], models: tuple[Path, Path], ours: LoadedModel
) -> None:
    receiver, sender = here("receiver", models[1], tcp="127.0.0.1:0"), here("sender", models[0])
    with Client(sender=sender.address, receiver=receiver.address, deliver_to=receiver.tcp) as client:
        ledger = client.send(text=DOCUMENT, method="A2", budget=100).ask(QUESTION, max_tokens=1).ledger
    assert ledger.outcome["tokenizer"] == ours.profile.tokenizer.vocab.hex()
    assert ledger.outcome["tokens"] <= 100 < ledger.tokens.material
    assert (ledger.tokenizer_bytes, ledger.ms.tokenizer) == (0, 0.0)


def test_a_tokenizer_that_cannot_be_used_refuses_the_budget_and_nothing_else(
    here: Callable[..., Any], models: tuple[Path, Path]
) -> None:
    def of_a_later_day(model: LoadedModel) -> LoadedModel:
        later = model.prompt.content.description.replace(b'"type":"BPE"', b'"type":"Later"')
        vars(model.prompt.content).update(description=later, vocab=blake3(later).digest())
        return model

    receiver = here("receiver", models[1], wrap=of_a_later_day)
    with Client(sender=here("sender", models[0]).address, receiver=receiver.address) as client:
        with pytest.raises(PeerError, match=f"^{receiver.address}: tokenizer: the library here makes nothing of it"):
            client.send(text=DOCUMENT, method="A3", budget=100)
        assert client.send(text=DOCUMENT, method="A1").ask(QUESTION, max_tokens=1).ledger.method == "A1"


def test_a_description_is_what_it_is_said_to_be(pair: Any, peers: Callable[..., Any], pair_model: LoadedModel) -> None:
    """Read as docs/wire.md says, without our own reader."""
    receiving = peers(receiver=pair.receiver).receiving
    responses = list(receiving.Tokenizer(pb.TokenizerRequest(known=[bytes(32)]), timeout=10))
    frame = b"".join(response.data for response in responses)
    description = zstandard.ZstdDecompressor().decompress(frame)
    assert len(description) == responses[0].length
    assert blake3(description).digest() == responses[0].digest == pair_model.profile.tokenizer.vocab
    assert all(not response.digest and not response.length for response in responses[1:])
    tokenizer, ends = json.loads(description)
    assert set(tokenizer["model"]["vocab"]) >= set("abc")
    assert ends == sorted(pair_model.tokenizer.eos_token_ids)
    assert ContentEncoder(description).encode("the pier") == pair_model.prompt.content.encode("the pier")
    [known] = receiving.Tokenizer(pb.TokenizerRequest(known=[bytes(32), responses[0].digest]), timeout=10)
    assert (known.digest, known.data) == (responses[0].digest, b"")
