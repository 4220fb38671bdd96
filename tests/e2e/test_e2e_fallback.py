"""What happens when a cache cannot be used: refused, damaged on disk, put aside.

Allowed to, the daemons read the text or the ids instead, and every account says so. Otherwise there is a typed error.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import (
    Answer,
    Client,
    IntegrityError,
    NotFoundError,
    QuarantinedError,
    RefusedError,
    SendReport,
)
from kvferry.engine.model import LoadedModel

DOCUMENT = "The access code of the north warehouse is 4417. Größe: 12 m², 門 🚢. " * 4
OTHER = "The south warehouse opens at 7:30 and closes at 18:00; its keys are with Ada. " * 4
QUESTION = "What is the access code?"
QUESTIONS = (QUESTION, "Who keeps the keys, and when?", "Where?", "What else is there?")
SHAPE: dict[str, Any] = {"heads": 6, "kv_heads": 3, "head_dim": 8, "layers": 3}


@dataclass
class Ferry:
    """Both daemons and a client of them."""

    client: Client
    model: LoadedModel
    sender_store: Path
    receiver_store: Path
    stop_receiver: Callable[[], None]

    def payload(self, report: SendReport, area: str = "artifacts") -> Path:
        return self.receiver_store / area / report.artifact_id / "payload.safetensors"

    def held(self) -> dict[str, str | None]:
        """What the receiver lists, with the reasons for what was put aside."""
        return {item.artifact_id: item.quarantined for item in self.client.artifacts()}


@pytest.fixture
def ferry(
    here: Callable[..., Any],
    tiny_model_dir: Callable[..., Path],
    tiny_model: Callable[..., LoadedModel],
    tmp_path: Path,
) -> Iterator[Callable[..., Ferry]]:
    """Return a factory: ``ferry(receiver={…model options}, store=…, **receiver options)``; the sender starts once.

    Nothing is kept at hand at the receiver, so that every question reads the disk.
    """
    senders: list[str] = []
    clients: list[Client] = []

    def build(receiver: dict[str, Any] | None = None, **options: Any) -> Ferry:
        shape = receiver or SHAPE
        started = here("receiver", tiny_model_dir(**shape), **{"cache_bytes": 0, **options})
        if not senders:
            senders.append(here("sender", tiny_model_dir(**SHAPE), chunk_bytes=1024).address)
        clients.append(Client(sender=senders[0], receiver=started.address))
        return Ferry(clients[-1], tiny_model(**shape), tmp_path / "sender", tmp_path / "receiver", started.stop)

    yield build
    for client in clients:
        client.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def section_start(path: Path, name: str) -> int:
    """Where a section of a safetensors file begins."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    start: int = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    return 8 + length + start


def ids(answer: Answer) -> tuple[int, ...]:
    return answer.token_ids


# A receiver with another model


def test_a_refused_cache_is_replaced_by_the_text_when_that_is_allowed(
    ferry: Callable[..., Ferry], local_answer: Callable[..., tuple[int, ...]]
) -> None:
    pair = ferry({**SHAPE, "seed": 1})
    report = pair.client.send(text=DOCUMENT, method="B1", fallback=True)
    assert (report.method, report.form) == ("A1", "text")
    assert report.fallback_reason is not None
    assert report.fallback_reason.startswith("refused: WEIGHTS_MISMATCH model.weights: artifact ")
    assert report.account.fallback_reason == report.fallback_reason
    assert report.account.prefill_tokens == 0
    for question in QUESTIONS[:2]:
        answer = report.ask(question, max_tokens=8)
        assert ids(answer) == local_answer(pair.model, DOCUMENT, question)
        assert answer.ledger.fallback == "fallback_reprefill"
        assert answer.ledger.fallback_reason == report.fallback_reason
        assert (answer.ledger.method, answer.ledger.form) == ("A1", "text")
    # The cache did not cross.
    assert list(pair.held()) == [report.artifact_id]
    assert report.wire_bytes < report.account.dense_bf16_bytes


def test_the_replacement_is_not_taken_for_a_text_that_was_asked_for(ferry: Callable[..., Ferry]) -> None:
    pair = ferry({**SHAPE, "seed": 1})
    replaced = pair.client.send(text=DOCUMENT, method="B1", fallback=True)
    asked = pair.client.send(text=DOCUMENT, method="A1", fallback=True)
    assert asked.artifact_id != replaced.artifact_id
    assert asked.fallback_reason is None
    assert asked.ask(QUESTION, max_tokens=2).ledger.fallback is None
    # Sent again, it is refused again, found again, and nothing moves.
    again = pair.client.send(text=DOCUMENT, method="B1", fallback=True)
    assert (again.artifact_id, again.moved_bytes, again.reused) == (replaced.artifact_id, 0, True)
    assert again.fallback_reason == replaced.fallback_reason
    assert replaced.ask(QUESTION, max_tokens=2).ledger.fallback == "fallback_reprefill"


def test_a_refused_cache_is_an_error_when_nothing_else_is_allowed(ferry: Callable[..., Ferry]) -> None:
    pair = ferry({**SHAPE, "seed": 1})
    with pytest.raises(RefusedError, match="WEIGHTS_MISMATCH"):
        pair.client.send(text=DOCUMENT, method="B1")
    assert pair.held() == {}


def test_a_cache_that_fits_is_sent_although_a_text_would_be_allowed(ferry: Callable[..., Ferry]) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1", fallback=True)
    assert (report.method, report.fallback_reason, report.account.fallback_reason) == ("B1", None, None)
    answer = report.ask(QUESTION, fallback=True, max_tokens=2)
    assert (answer.ledger.fallback, answer.ledger.fallback_reason) == (None, None)
    assert answer.ledger.tokens.reused > 0


# Damage at the receiver


def test_a_damaged_cache_is_read_again_when_that_is_allowed(
    ferry: Callable[..., Ferry], local_answer: Callable[..., tuple[int, ...]]
) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    expected = local_answer(pair.model, DOCUMENT, QUESTION)
    assert ids(report.ask(QUESTION, max_tokens=8)) == expected
    flip(pair.payload(report), section_start(pair.payload(report), "layers.1.keys"))
    answer = report.ask(QUESTION, fallback=True, max_tokens=8)
    assert ids(answer) == expected
    ledger = answer.ledger
    assert ledger.fallback == "fallback_reprefill"
    assert ledger.fallback_reason is not None
    assert ledger.fallback_reason.startswith("section layers.1.keys: chunk ")
    assert (ledger.method, ledger.form, ledger.parity) == ("B1", "kv", None)
    assert (ledger.tokens.reused, ledger.ms.reconstruct) == (0, 0)
    prefix = len(pair.model.prompt.prefix(DOCUMENT))
    assert ledger.tokens.receiver_prefill == prefix + len(pair.model.prompt.fresh(QUESTION))
    assert pair.held() == {report.artifact_id: ledger.fallback_reason}
    # And again, from quarantine; other questions too.
    for question in QUESTIONS[:2]:
        again = report.ask(question, fallback=True, max_tokens=8)
        assert ids(again) == local_answer(pair.model, DOCUMENT, question)
        assert again.ledger.fallback_reason == ledger.fallback_reason


def test_without_permission_damage_is_an_error_and_another_send_mends_it(ferry: Callable[..., Ferry]) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    before = report.ask(QUESTION, max_tokens=8)
    flip(pair.payload(report), -1)
    with pytest.raises(IntegrityError, match=r"^section layers\.2\.values: chunk \d+: digest"):
        report.ask(QUESTION)
    (reason,) = pair.held().values()
    assert reason is not None
    with pytest.raises(QuarantinedError, match="put aside: section layers.2.values: chunk") as caught:
        report.ask(QUESTION)
    assert caught.value.fields["reason"] == reason
    again = pair.client.send(text=DOCUMENT, method="B1")
    assert (again.artifact_id, again.reused) == (report.artifact_id, True)
    assert again.moved_bytes == again.payload_bytes
    assert pair.held() == {report.artifact_id: None}
    assert not pair.payload(report, "quarantine").exists()
    after = again.ask(QUESTION, max_tokens=8)
    assert ids(after) == ids(before)
    assert after.ledger.fallback is None


def test_damaged_ids_cannot_be_read_again(ferry: Callable[..., Ferry]) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    flip(pair.payload(report), section_start(pair.payload(report), "prefix.ids"))
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"^section prefix\.ids: chunk 1: digest"):
            report.ask(QUESTION, fallback=True)
    assert list(pair.held().values()) != [None]


@pytest.mark.parametrize("method", ["A1", "B0"])
def test_a_damaged_text_has_nothing_to_fall_back_to(ferry: Callable[..., Ferry], method: str) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method=method)
    flip(pair.payload(report), -1)
    with pytest.raises(IntegrityError, match=r"^section document\.text: chunk \d+: digest"):
        report.ask(QUESTION, fallback=True)
    with pytest.raises(QuarantinedError, match=r"put aside: section document\.text"):
        report.ask(QUESTION, fallback=True)


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_payload_cut_short_under_a_running_daemon_is_mended_by_another_send(
    ferry: Callable[..., Ferry], *, asked_first: bool
) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    os.truncate(pair.payload(report), 0)
    if asked_first:
        with pytest.raises(IntegrityError, match=r"payload\.safetensors has 0 bytes"):
            report.ask(QUESTION)
        assert "payload.safetensors has 0 bytes" in str(pair.held()[report.artifact_id])
    assert pair.client.send(text=DOCUMENT, method="B1").moved_bytes == report.payload_bytes
    assert report.ask(QUESTION, max_tokens=2).ledger.fallback is None


@pytest.mark.parametrize("name", ["manifest.msgpack", "record.json", "payload.safetensors"])
def test_a_file_that_is_gone_under_a_running_daemon_is_mended_by_another_send(
    ferry: Callable[..., Ferry], name: str
) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    pair.payload(report).with_name(name).unlink()
    with pytest.raises((NotFoundError, IntegrityError)):
        report.ask(QUESTION)
    assert pair.client.send(text=DOCUMENT, method="B1").moved_bytes == report.payload_bytes
    assert pair.held() == {report.artifact_id: None}
    assert report.ask(QUESTION, max_tokens=2).ledger.fallback is None


@pytest.mark.parametrize("method", ["B1", "A1"])
@pytest.mark.parametrize("fallback", [True, False])
def test_many_questions_find_the_same_damage_at_once(
    ferry: Callable[..., Ferry], local_answer: Callable[..., tuple[int, ...]], method: str, *, fallback: bool
) -> None:
    """Whoever comes second finds the files put aside under its hands, and must say the same as the first."""
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method=method)
    flip(pair.payload(report), -1)
    streams = [report.stream(question, fallback=fallback, max_tokens=8) for question in QUESTIONS * 2]
    outcomes: list[Any] = []

    def finish(stream: Any) -> None:
        try:
            outcomes.append((stream, stream.finish()))
        except (IntegrityError, QuarantinedError) as error:
            outcomes.append((stream, error))

    threads = [threading.Thread(target=finish, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == len(streams)
    for stream, outcome in outcomes:
        if method == "B1" and fallback:
            question = (QUESTIONS * 2)[streams.index(stream)]
            assert ids(outcome) == local_answer(pair.model, DOCUMENT, question)
            assert outcome.ledger.fallback == "fallback_reprefill"
        else:
            assert isinstance(outcome, IntegrityError | QuarantinedError), outcome
            assert "digest" in outcome.message
    assert len(pair.held()) == 1
    assert pair.payload(report, "quarantine").exists()


def test_dropping_what_was_put_aside_removes_it(ferry: Callable[..., Ferry]) -> None:
    pair = ferry(cache_bytes=2**30)
    report = pair.client.send(text=DOCUMENT, method="B1")
    flip(pair.payload(report), -1)
    assert report.ask(QUESTION, fallback=True, max_tokens=2).ledger.resident_bytes > 0
    pair.client.drop(report.artifact_id)
    assert pair.held() == {}
    with pytest.raises(NotFoundError):
        report.ask(QUESTION, fallback=True)
    # Nothing of it is at hand either.
    other = pair.client.send(text=OTHER, method="A1")
    assert other.ask(QUESTION, max_tokens=2).ledger.resident_bytes == 0


# Restarts


def test_what_is_found_damaged_at_start_is_listed_and_hides_nothing(ferry: Callable[..., Ferry]) -> None:
    pair = ferry()
    whole, changed, cut = (pair.client.send(text=text, method="B1") for text in (DOCUMENT, OTHER, "Nothing."))
    pair.stop_receiver()
    manifest = pair.payload(changed).with_name("manifest.msgpack")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    os.truncate(pair.payload(cut), 100)
    pair = ferry()
    held = pair.held()
    assert held[whole.artifact_id] is None
    assert "its manifest on disk has changed" in (held[changed.artifact_id] or "")
    assert "payload.safetensors has 100 bytes" in (held[cut.artifact_id] or "")
    listed = {item.artifact_id: item for item in pair.client.artifacts()}
    assert listed[changed.artifact_id].method == ""
    assert listed[cut.artifact_id].method == "B1"
    assert pair.client.ask(whole.artifact_id, QUESTION, max_tokens=2).ledger.fallback is None
    for report, text in ((changed, OTHER), (cut, "Nothing.")):
        with pytest.raises(QuarantinedError):
            pair.client.ask(report.artifact_id, QUESTION)
        assert pair.client.send(text=text, method="B1").artifact_id == report.artifact_id
    assert set(pair.held().values()) == {None}


def test_one_unreadable_artifact_does_not_hide_the_others(ferry: Callable[..., Ferry]) -> None:
    pair = ferry()
    whole, changed = (pair.client.send(text=text, method="B1") for text in (DOCUMENT, OTHER))
    manifest = pair.payload(changed).with_name("manifest.msgpack")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    held = pair.held()
    assert held[whole.artifact_id] is None
    assert "its manifest on disk has changed" in (held[changed.artifact_id] or "")
    # The next offer of it puts the damaged copy aside.
    assert pair.client.send(text=OTHER, method="B1").moved_bytes == changed.payload_bytes
    assert set(pair.held().values()) == {None}


def test_a_cache_of_the_model_before_is_refused_by_the_model_after(ferry: Callable[..., Ferry]) -> None:
    """The store outlives the daemon: what fitted when it came may not fit what runs now."""
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    text = pair.client.send(text=DOCUMENT, method="A1")
    assert report.ask(QUESTION, max_tokens=2).ledger.parity is not None
    pair.stop_receiver()
    pair = ferry({**SHAPE, "seed": 1})
    for fallback in (False, True):
        with pytest.raises(RefusedError, match="WEIGHTS_MISMATCH"):
            pair.client.ask(report.artifact_id, QUESTION, fallback=fallback)
    assert pair.held()[report.artifact_id] is None
    assert pair.client.ask(text.artifact_id, QUESTION, max_tokens=2).token_ids


# Damage at the sender


def test_a_sender_makes_anew_what_went_bad_on_its_disk(ferry: Callable[..., Ferry]) -> None:
    pair = ferry()
    report = pair.client.send(text=DOCUMENT, method="B1")
    pair.client.drop(report.artifact_id)
    own = pair.sender_store / "artifacts" / report.artifact_id
    flip(own / "payload.safetensors", -1)
    with pytest.raises(IntegrityError, match="digest"):
        pair.client.send(text=DOCUMENT, method="B1")
    assert not own.exists()
    mended = pair.client.send(text=DOCUMENT, method="B1")
    assert (mended.artifact_id, mended.reused) == (report.artifact_id, False)
    assert mended.ask(QUESTION, max_tokens=2).ledger.fallback is None
    # What can be seen without reading the payload is seen before anything is sent.
    for name in ("manifest.msgpack", "payload.safetensors"):
        (own / name).write_bytes(b"")
        assert pair.client.send(text=DOCUMENT, method="B1").reused is False
