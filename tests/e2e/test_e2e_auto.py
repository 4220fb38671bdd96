"""The sender chooses the method: what it weighs, what it delivers, and what it says when a form does not fit."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import (
    AuthenticationError,
    Client,
    ContextOverflowError,
    InvalidRequestError,
    PeerError,
    RefusedError,
    SendReport,
    UnknownMethodError,
)
from kvferry.core.evidence import Evidence, Fact
from kvferry.core.progress import Progress
from kvferry.core.tokens import digest_of
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel
from kvferry.engine.speed import Speed
from kvferry.sender.method import EvidenceMaterial
from kvferry.sender.text.evidence import StructuredEvidence

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 2}
SLIDING: dict[str, Any] = {
    "model_type": "gemma3_text",
    "config": {"sliding_window": 32, "sliding_window_pattern": 2},
}
SHORT: dict[str, Any] = {**SHAPE, "context": 128}
DOCUMENT = "The access code of the north warehouse is 4417. Größe: 12 m², 門 🚢. " * 8
QUESTION = "What is the access code?"
SLOW = 1.0
QUICK = 1e-6

Connect = Callable[..., Client]


def at(seconds_a_token: float) -> Callable[[LoadedModel], LoadedModel]:
    """Return a wrap that makes a daemon believe that its model reads and writes at this speed."""

    def wrap(model: LoadedModel) -> LoadedModel:
        speed = Speed()
        speed.seed(seconds_a_token, seconds_a_token)
        # What it really takes must not get into the average.
        speed.note = lambda *_: None  # type: ignore[method-assign]
        return dataclasses.replace(model, speed=speed)

    return wrap


@pytest.fixture
def connect(here: Callable[..., Any], tiny_model_dir: Callable[..., Path]) -> Iterator[Connect]:
    """Return a factory: ``connect(sender_at=…, receiver_at=…, receiver_model={…}, **receiver options)``."""
    opened: list[Client] = []

    def build(
        sender_at: float = SLOW,
        receiver_at: float = SLOW,
        sender_model: dict[str, Any] = SHAPE,
        receiver_model: dict[str, Any] | None = None,
        **options: Any,
    ) -> Client:
        number = str(len(opened))
        model = tiny_model_dir(**(receiver_model or sender_model))
        receiver = here("receiver", model, f"receiver-{number}", at(receiver_at), **options)
        sender = here("sender", tiny_model_dir(**sender_model), f"sender-{number}", at(sender_at), chunk_bytes=4096)
        opened.append(Client(sender=sender.address, receiver=receiver.address))
        return opened[-1]

    yield build
    for client in opened:
        client.close()


def methods(report: SendReport) -> list[tuple[str, str]]:
    assert report.account.auto is not None
    return [(item.method, item.parameters) for item in report.account.auto.estimates]


# What wins


def test_a_slow_receiver_gets_the_cache_and_the_ledger_has_estimate_and_outcome(connect: Connect) -> None:
    kv = connect(sender_at=QUICK, receiver_at=SLOW)
    report = kv.send(text=DOCUMENT, method="auto")
    auto = report.account.auto
    assert auto is not None
    assert (report.method, report.form, report.fallback_reason) == ("B1", "kv", None)
    assert (auto.quality, auto.chosen.method, auto.chosen.bytes) == ("exact", "B1", report.payload_bytes)
    assert methods(report) == [("B1", ""), ("A7", ""), ("A1", "")]
    assert (auto.passed_over, auto.reused) == ((), False)
    assert auto.sender_tokens_per_second == pytest.approx(1e6)
    assert auto.receiver_tokens_per_second == pytest.approx(1.0)
    assert auto.link.rtt_ms > 0
    # At least one padding went out.
    assert auto.probe_bytes > 16 * 1024
    first, second = (report.ask(QUESTION, max_tokens=2).ledger for _ in range(2))
    assert first.auto is not None
    assert first.auto.choice == auto
    assert first.auto.expected_ms == auto.chosen.first_token_ms
    ms = first.ms
    spent = ms.prefill + ms.method + ms.encode + ms.transfer + ms.verify + (ms.first_token or 0.0)
    assert first.auto.happened_ms == pytest.approx(spent)
    assert second.auto is not None
    assert second.auto.happened_ms != first.auto.happened_ms


@pytest.mark.parametrize("name", ["auto", "AUTO"])
def test_a_slow_sender_sends_the_text(connect: Connect, name: str) -> None:
    kv = connect(sender_at=SLOW, receiver_at=QUICK)
    report = kv.send(text=DOCUMENT, method=name)
    auto = report.account.auto
    assert auto is not None
    assert report.form == "text"
    assert report.method in {"A1", "A7"}
    # It lost on time, which is no fallback.
    assert (report.fallback_reason, auto.passed_over) == (None, ())
    answer = report.ask(QUESTION, max_tokens=2)
    assert (answer.ledger.fallback, answer.ledger.method) == (None, report.method)


def test_sizes_of_what_is_not_there_yet_are_the_real_ones(connect: Connect) -> None:
    kv = connect(sender_at=QUICK, receiver_at=SLOW)
    auto = kv.send(text=DOCUMENT, method="auto", quality="reduced").account.auto
    assert auto is not None
    exact = [item for item in auto.estimates if item.method not in {"A3", "A5"}]
    assert len(exact) == 7
    for item in exact:
        given = dict(word.split("=") for word in item.parameters.split())
        sent = kv.send(text=DOCUMENT, method=item.method, **{name: json.loads(value) for name, value in given.items()})
        assert sent.payload_bytes == item.bytes, item


def test_what_was_made_before_costs_the_sender_nothing(connect: Connect) -> None:
    kv = connect(sender_at=SLOW, receiver_at=SLOW)
    before = kv.send(text=DOCUMENT, method="B1")
    report = kv.send(text=DOCUMENT, method="auto")
    auto = report.account.auto
    assert auto is not None
    assert (report.method, report.artifact_id, report.reused, auto.reused) == ("B1", before.artifact_id, True, True)
    assert auto.chosen.sender_ms == 0
    assert report.moved_bytes == 0
    # The receiver has the account of the send that delivered it.
    assert report.ask(QUESTION, max_tokens=1).ledger.auto is None


def test_a_cache_at_hand_is_not_read_again(connect: Connect) -> None:
    kv = connect(sender_at=SLOW, receiver_at=SLOW)
    first = kv.send(text=DOCUMENT, method="auto", quality="exact").account.auto
    kv.send(text=DOCUMENT, method="l2norm", budget=1.0, bits=8)
    second = kv.send(text=DOCUMENT, method="auto", quality="near").account.auto
    assert first is not None
    assert second is not None
    cost = {(item.method, item.parameters): item.sender_ms for item in first.estimates}
    again = {(item.method, item.parameters): item.sender_ms for item in second.estimates}
    tokens = len(DOCUMENT) / 5
    assert cost["B1", ""] > 1000 * tokens
    # What is left of B2 is the probe of its own cache.
    assert 0 < again["B2", "bits=8"] < cost["B1", ""] / 2


def test_the_link_is_measured_once_for_a_while(connect: Connect) -> None:
    kv = connect(sender_at=QUICK, receiver_at=SLOW)
    first, second = (kv.send(text=text, method="auto").account.auto for text in (DOCUMENT, DOCUMENT[:200]))
    assert first is not None
    assert second is not None
    assert first.probe_bytes > 16 * 1024
    # The receiver is asked what it runs every time.
    assert 0 < second.probe_bytes < 2048


@pytest.mark.slow
def test_what_a_choice_moved_and_led_to_is_counted_at_both_ends(
    process: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    daemons, pages = {}, {}
    for role in ("receiver", "sender"):
        daemons[role] = process(role, tiny_model_dir(**SHAPE), metrics="127.0.0.1:0")
        listening = json.loads(daemons[role].popen.stdout.readline())
        daemons[role].__dict__["address"], pages[role] = listening["address"], listening["metrics"]
    with Client(sender=daemons["sender"].address, receiver=daemons["receiver"].address) as kv:
        report = kv.send(text=DOCUMENT, method="auto")
        speeds = {"sender": kv.describe_sender(), "receiver": kv.describe_receiver()}
    counted = {}
    for role, address in pages.items():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            counted[role] = response.read().decode().splitlines()
        assert f"kvferry_prefill_tokens_per_second {speeds[role].prefill_tokens_per_second}" in counted[role]

    def moved(role: str, way: str) -> float:
        start = f'kvferry_{way}_bytes_total{{kind="measure"}} '
        (line,) = [line for line in counted[role] if line.startswith(start)]
        return float(line.removeprefix(start))

    assert moved("sender", "sent") == moved("receiver", "received") > 16 * 1024
    assert moved("receiver", "sent") == moved("sender", "received") > 0
    auto = report.account.auto
    assert auto is not None
    assert auto.probe_bytes > moved("sender", "sent") + moved("sender", "received")
    assert f'kvferry_auto_choices_total{{method="{report.method}",quality="exact"}} 1.0' in counted["sender"]


# What does not fit


def test_another_checkpoint_gets_the_text_and_the_reason_names_the_weights(
    connect: Connect, local_answer: Callable[..., tuple[int, ...]], tiny_model: Callable[..., LoadedModel]
) -> None:
    other = {**SHAPE, "seed": 1}
    kv = connect(sender_at=QUICK, receiver_at=SLOW, receiver_model=other)
    report = kv.send(text=DOCUMENT, method="auto", quality="near")
    auto = report.account.auto
    assert auto is not None
    assert report.form == "text"
    assert report.account.prefill_tokens == 0
    assert [item.method for item in auto.passed_over] == ["B1", "B2", "B2"]
    assert {item.spent_ms for item in auto.passed_over} == {0.0}
    ours, theirs = kv.describe_sender().weights, kv.describe_receiver().weights
    assert auto.passed_over[0].reason == f"WEIGHTS_MISMATCH model.weights: artifact {ours}, receiver {theirs}"
    assert report.fallback_reason is not None
    assert report.fallback_reason.startswith(
        "B1, B2 bits=8, B2 key_bits=8 value_bits=4: WEIGHTS_MISMATCH model.weights"
    )
    answer = report.ask(QUESTION, max_tokens=6)
    assert answer.token_ids == local_answer(tiny_model(**other), DOCUMENT, QUESTION, 6)
    assert (answer.ledger.fallback, answer.ledger.fallback_reason) == ("fallback_reprefill", report.fallback_reason)
    # No cache crossed, and the same text asked for by name is another artifact.
    assert [item.artifact_id for item in kv.artifacts()] == [report.artifact_id]
    assert kv.send(text=DOCUMENT, method=report.method).artifact_id != report.artifact_id


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("max_payload_bytes", "refused: TOO_LARGE payload.length: artifact "), ("max_store_bytes", "store: ")],
)
def test_what_the_receiver_refuses_at_offer_gives_way_with_what_it_cost(
    connect: Connect, limit: str, reason: str
) -> None:
    kv = connect(sender_at=QUICK, receiver_at=SLOW, **{limit: 20_000})
    report = kv.send(text=DOCUMENT, method="auto")
    auto = report.account.auto
    assert auto is not None
    assert (report.form, auto.chosen.method) == ("text", report.method)
    (passed,) = auto.passed_over
    assert (passed.method, passed.form) == ("B1", "kv")
    assert passed.reason.startswith(reason)
    assert "20000" in passed.reason
    assert passed.spent_ms > 0
    assert report.fallback_reason == f"B1: {passed.reason}"
    # Weighed like the rest, since nobody knew.
    assert "B1" in [item.method for item in auto.estimates]
    ledger = report.ask(QUESTION, max_tokens=1).ledger
    assert ledger.fallback_reason == report.fallback_reason
    assert ledger.auto is not None
    assert ledger.auto.happened_ms is not None
    assert ledger.auto.happened_ms > passed.spent_ms + (ledger.ms.first_token or 0.0)


def test_a_model_whose_cache_cannot_be_sent_sends_text(connect: Connect) -> None:
    kv = connect(sender_at=QUICK, receiver_at=SLOW, sender_model=SLIDING)
    report = kv.send(text=DOCUMENT, method="auto")
    auto = report.account.auto
    assert auto is not None
    assert report.form == "text"
    assert [item.method for item in auto.passed_over] == ["B1"]
    assert "RotatingKVCache" in auto.passed_over[0].reason
    assert report.fallback_reason == f"B1: {auto.passed_over[0].reason}"


@pytest.mark.parametrize("quality", ["exact", "near"])
def test_a_document_that_certainly_does_not_fit_is_refused_before_it_is_encoded(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, quality: str
) -> None:
    encode, text = ContentEncoder.encode, DOCUMENT * 2000

    def short(self: ContentEncoder, given: str) -> list[int]:
        assert len(given) < len(text)
        return encode(self, given)

    monkeypatch.setattr(ContentEncoder, "encode", short)
    kv = connect()
    with pytest.raises(ContextOverflowError, match=f"^context: {len(text)} characters are .* the model takes 4096$"):
        kv.send(text=text, method="auto", quality=quality)
    assert kv.artifacts() == []


def test_a_document_over_the_context_of_both_ends_is_refused_by_name(connect: Connect) -> None:
    kv = connect(sender_model={**SHAPE, "context": 64})
    with pytest.raises(
        RefusedError, match=r"nothing of quality exact can be used: B1, A7, A1: TOO_LARGE prefix"
    ) as caught:
        kv.send(text=DOCUMENT, method="auto")
    assert "receiver context of 64" in str(caught.value)
    assert kv.artifacts() == []


def finding(*facts: Fact) -> Callable[..., Generator[Progress, None, EvidenceMaterial]]:
    """Return what makes evidence of these facts, whatever the model would write."""

    def make(_: Any, reading: Any, parameters: Any) -> Generator[Progress, None, EvidenceMaterial]:
        yield Progress("method", 1, 1)
        outcome = {"facts": len(facts), "confirmed": sum(fact.confirmed for fact in facts)}
        return EvidenceMaterial(Evidence(facts, (), (), complete=True, stop="stop"), outcome)

    return make


def test_a_refused_cache_gives_way_to_evidence_where_the_bound_allows_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = Fact("north warehouse", "access code", "4417", "exact", ((43, 47),), 0, supported=True)
    monkeypatch.setattr(StructuredEvidence, "make", finding(code))
    kv = connect(sender_at=QUICK, receiver_at=SLOW, receiver_model={**SHAPE, "seed": 1})
    report = kv.send(text=DOCUMENT, method="auto", quality="reduced")
    auto = report.account.auto
    assert auto is not None
    assert (report.method, report.form) == ("A5", "evidence")
    assert {item.form for item in auto.passed_over} == {"kv"}
    assert report.fallback_reason is not None
    assert "WEIGHTS_MISMATCH" in report.fallback_reason
    ledger = report.ask(QUESTION, max_tokens=1).ledger
    assert (ledger.form, ledger.fallback_reason) == ("evidence", report.fallback_reason)
    assert ledger.fallback == "fallback_evidence"
    # Within "near" there is none.
    assert kv.send(text=DOCUMENT, method="auto", quality="near").form == "text"


def test_evidence_that_the_document_does_not_confirm_gives_way_to_text(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = Fact("north warehouse", "access code", "1234", "unresolved", (), 0, supported=False)
    monkeypatch.setattr(StructuredEvidence, "make", finding(made_up))
    kv = connect(sender_at=QUICK, receiver_at=SLOW, receiver_model={**SHAPE, "seed": 1})
    reason = "the document confirms none of the 1 facts that the sender's model wrote"
    for spends in (True, False):
        report = kv.send(text=DOCUMENT, method="auto", quality="reduced")
        auto = report.account.auto
        assert auto is not None
        assert (report.method, report.form) == ("A3", "text")
        (passed,) = (item for item in auto.passed_over if item.form == "evidence")
        # The second time that is known beforehand.
        assert (passed.method, passed.reason, passed.spent_ms > 0) == ("A5", reason, spends)
        assert report.fallback_reason is not None
        assert report.fallback_reason.endswith(f"; A5: {reason}")
        assert report.ask(QUESTION, max_tokens=1).ledger.fallback == "fallback_text"
    assert [item.form for item in kv.artifacts()] == ["text"]


NOTE = "The north gate opens at seven. The north gate closes at nine. The north gate is shut on Sundays."


def test_a_note_too_short_for_a_part_is_sent_whole_and_says_so(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> Generator[Progress, None, EvidenceMaterial]:
        yield Progress("method", 0, 1)
        raise InvalidRequestError("budget: 20 tokens do not suffice for a fact", field="budget", value=20)

    monkeypatch.setattr(StructuredEvidence, "make", nothing)
    kv = connect(sender_at=QUICK, receiver_at=SLOW, receiver_model={**SHAPE, "seed": 1})
    report = kv.send(text=NOTE, method="auto", quality="reduced")
    auto = report.account.auto
    assert auto is not None
    assert report.method in {"A1", "A7"}
    passed = {item.method: item.reason for item in auto.passed_over if item.form != "kv"}
    assert passed["A5"] == "budget: 20 tokens do not suffice for a fact"
    assert passed["A3"].startswith("budget: ")
    assert " tokens do not suffice for the shortest piece of this document, which takes " in passed["A3"]
    # The text stands in for cache and evidence, not for the shorter text.
    assert report.fallback_reason is not None
    assert "a fact" in report.fallback_reason
    assert "piece" not in report.fallback_reason
    assert report.ask("When does it open?", max_tokens=2).ledger.fallback == "fallback_reprefill"


def test_what_lost_on_time_is_no_fallback_though_another_of_its_form_cannot_be_used(connect: Connect) -> None:
    # Rows of 48 numbers cannot be packed by eights, and can be sent dense.
    kv = connect(sender_at=SLOW, receiver_at=QUICK, sender_model={**SHAPE, "head_dim": 16})
    report = kv.send(text=DOCUMENT, method="auto", quality="near")
    auto = report.account.auto
    assert auto is not None
    assert {item.method for item in auto.passed_over} == {"B2"}
    assert report.form == "text"
    assert report.fallback_reason is None
    assert report.ask(QUESTION, max_tokens=1).ledger.fallback is None


def test_what_the_receiver_could_never_read_is_not_delivered(connect: Connect) -> None:
    kv = connect(sender_at=QUICK, receiver_at=SLOW, sender_model={**SHAPE, "context": 4096}, receiver_model=SHORT)
    with pytest.raises(RefusedError, match="A3 budget=0.25: TOO_LARGE prefix.tokens: artifact") as caught:
        kv.send(text=DOCUMENT * 4, method="auto", quality="reduced")
    assert "receiver context of 128" in caught.value.message
    assert kv.artifacts() == []


# What is wrong with a request


@pytest.fixture
def plain(connect: Connect) -> Client:
    return connect()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quality": "best"}, "^quality: 'best', must be exact, near or reduced"),
        ({"quality": 1}, "^quality: 1, must be exact, near or reduced"),
        ({"budget": 0.5}, r"^budget: method auto has no such parameter; it takes quality$"),
        ({"quality": "near", "bits": 8}, r"^bits: method auto has no such parameter; it takes quality$"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(plain: Client, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        plain.send(text=DOCUMENT, method="auto", **given)
    assert caught.value.fields["field"] == next(name for name in ("budget", "bits", "quality") if name in given)
    assert plain.artifacts() == []


def test_a_tcp_worker_cannot_be_asked(here: Callable[..., Any], tiny_model_dir: Callable[..., Path]) -> None:
    sender = here("sender", tiny_model_dir(**SHAPE))
    kv = Client(sender=sender.address, deliver_to="tcp://127.0.0.1:9")
    with kv, pytest.raises(InvalidRequestError, match=r"^receiver: tcp://127.0.0.1:9: method auto asks") as caught:
        kv.send(text=DOCUMENT, method="auto")
    assert caught.value.fields["field"] == "receiver"


def test_a_receiver_that_is_not_there_is_an_error(
    here: Callable[..., Any], tiny_model_dir: Callable[..., Path]
) -> None:
    sender = here("sender", tiny_model_dir(**SHAPE))
    with Client(sender=sender.address, deliver_to="127.0.0.1:9") as kv, pytest.raises(PeerError, match="127.0.0.1:9"):
        kv.send(text=DOCUMENT, method="auto")


def test_an_unknown_method_is_told_of_auto(plain: Client) -> None:
    with pytest.raises(UnknownMethodError, match="^method: 'atuo' is not one of A0 .*, or auto$"):
        plain.send(text=DOCUMENT, method="atuo")
    assert "auto" not in {name for info in plain.methods() for name in (info.id, info.name)}


def test_measuring_needs_a_token_like_everything_else(
    here: Callable[..., Any], tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[[tokens]]\nname = "reader"\ndigest = "{digest_of("kvf_secret")}"\n')
    receiver = here("receiver", tiny_model_dir(**SHAPE), tokens=str(tokens))
    sender = here("sender", tiny_model_dir(**SHAPE))
    with (
        Client(sender=sender.address, deliver_to=receiver.address) as kv,
        pytest.raises(AuthenticationError, match="the sender's own token_file"),
    ):
        kv.send(text=DOCUMENT, method="auto")
