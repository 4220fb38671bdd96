"""Two real daemons around sends and asks: every counter against the ledger and against the other side, exactly."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.core.digests import digest
from kvferry.core.ledger import Ledger, SenderAccount, account_from_json, ledger_from_json
from kvferry.proto.v1 import common_pb2
from kvferry.proto.v1 import receiver_service_pb2 as receiver_pb
from kvferry.proto.v1 import receiver_service_pb2_grpc as receiver_grpc
from kvferry.proto.v1 import sender_service_pb2 as sender_pb
from kvferry.proto.v1 import sender_service_pb2_grpc as sender_grpc

pytestmark = pytest.mark.slow

DOCUMENT = "The access code of the north warehouse is 4417. The keys are with Ada Lindqvist. " * 4
START = """
import json, sys, msgspec
from kvferry.core.config import {config}
from kvferry.{role} import daemon
daemon.main(msgspec.convert(json.loads(sys.argv[1]), {config}), announce_json=True)
"""
ASK = "kvferry.proto.v1.ReceiverService/Ask"
SEND = "kvferry.proto.v1.SenderService/Send"


@dataclass
class Daemon:
    """A daemon process and where it answers."""

    process: subprocess.Popen[str]
    log: Path
    listening: dict[str, str] = field(default_factory=dict)

    def scrape(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        with urllib.request.urlopen(f"http://{self.listening['metrics']}/metrics", timeout=10) as response:
            text = response.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def daemons(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Callable[..., Path]
) -> Iterator[tuple[Daemon, Daemon]]:
    root = tmp_path_factory.mktemp("metrics")
    started = []
    try:
        for role in ("sender", "receiver"):
            settings = {
                "model": str(tiny_model_dir()),
                "store": str(root / role),
                "listen": "127.0.0.1:0",
                "metrics": "127.0.0.1:0",
                "log_format": "json",
                **({"chunk_bytes": 4096} if role == "sender" else {"max_answer_tokens": 16}),
            }
            source = START.format(role=role, config=f"{role.title()}Config")
            log = root / f"{role}.log"
            with log.open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-c", source, json.dumps(settings)],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            started.append(Daemon(process, log))
        for daemon in started:
            line = daemon.process.stdout.readline() if daemon.process.stdout else ""
            assert line, daemon.log.read_text()[-2000:]
            daemon.listening = json.loads(line)
        yield started[0], started[1]
    finally:
        for daemon in started:
            daemon.process.terminate()
        for daemon in started:
            daemon.process.wait(20)
            if daemon.process.stdout:
                daemon.process.stdout.close()


def send(stub: Any, receiver: str, method: str, request_id: str) -> sender_pb.SendEnd:
    text = DOCUMENT.encode()
    start = sender_pb.SendStart(method=method, receiver=receiver, text_bytes=len(text), text_digest=digest(text))
    requests = iter([sender_pb.SendRequest(start=start), sender_pb.SendRequest(text=text)])
    call = stub.Send(requests, timeout=60, metadata=(("x-request-id", request_id),))
    end: sender_pb.SendEnd = list(call)[-1].end
    assert dict(call.initial_metadata())["x-request-id"] == request_id
    return end


def ask(stub: Any, artifact_id: bytes, request_id: str | None, max_tokens: int = 8) -> Ledger:
    request = receiver_pb.AskRequest(artifact_id=artifact_id, question="Which code?", max_tokens=max_tokens, top_p=1.0)
    call = stub.Ask(request, timeout=60, metadata=(("x-request-id", request_id),) if request_id else ())
    ledger = ledger_from_json(list(call)[-1].end.ledger_json)
    assert ledger.request_id == dict(call.initial_metadata())["x-request-id"]
    return ledger


@dataclass
class Story:
    """What happened, and what both daemons counted of it."""

    ends: list[sender_pb.SendEnd]
    ledgers: list[Ledger]
    lines: list[Ledger]
    accounts: list[SenderAccount]
    sender: dict[tuple[str, frozenset[tuple[str, str]]], float]
    receiver: dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def story(daemons: tuple[Daemon, Daemon], tmp_path_factory: pytest.TempPathFactory) -> Story:
    sender, receiver = daemons
    where = receiver.listening["address"]
    with grpc.insecure_channel(sender.listening["address"]) as one, grpc.insecure_channel(where) as two:
        senders, receivers = sender_grpc.SenderServiceStub(one), receiver_grpc.ReceiverServiceStub(two)
        ends = [
            send(senders, where, method, name) for method, name in [("A1", "s1"), ("B1", "send.2"), ("B1", "again")]
        ]
        text, cache = ends[0].artifact_id, ends[1].artifact_id
        ledgers = [ask(receivers, text, "q-1"), ask(receivers, cache, "q-2"), ask(receivers, cache, None)]
        with pytest.raises(grpc.RpcError):
            ask(receivers, cache, "too-long", max_tokens=17)
    store = Path(receiver.log).parent / "receiver"
    lines = [ledger_from_json(line) for line in (store / "ledger.jsonl").read_text().splitlines()]
    accounts = [account_from_json(end.account_json) for end in ends[:2]]
    return Story(ends, ledgers, lines, accounts, sender.scrape(), receiver.scrape())


def value(scraped: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return scraped.get((name, frozenset(labels.items())), 0.0)


def receipt_bytes(ledger: Ledger) -> int:
    """Size of the Commit response, which the ledger cannot hold because it carries the ledger's own sum."""
    return receiver_pb.CommitResponse(
        receipt=receiver_pb.Receipt(
            artifact_id=bytes.fromhex(ledger.artifact_id),
            payload_bytes=ledger.payload_bytes,
            payload_digest=b"d" * 32,
            verify_ms=ledger.ms.verify,
            received_bytes=ledger.payload_bytes + ledger.resent_bytes,
            control_bytes=ledger.control_bytes,
        )
    ).ByteSize()


def held_offer_bytes(end: sender_pb.SendEnd) -> int:
    """Size of an Offer for an artifact that is there already, both ways, less the manifest."""
    request = receiver_pb.OfferRequest(manifest=bytes(end.manifest_bytes)).ByteSize() - end.manifest_bytes
    verdict = common_pb2.Verdict(accepted=True)
    return request + receiver_pb.OfferResponse(artifact_id=end.artifact_id, verdict=verdict, committed=True).ByteSize()


def test_the_ledger_file_holds_the_answers_and_their_request_ids(story: Story) -> None:
    assert story.lines == story.ledgers
    assert [ledger.request_id for ledger in story.ledgers[:2]] == ["q-1", "q-2"]
    assert len(story.ledgers[2].request_id) == 16


def test_received_bytes_are_those_of_the_ledger(story: Story) -> None:
    text, cache, _ = story.ledgers
    again = story.ends[2]
    count = lambda kind: value(story.receiver, "kvferry_received_bytes_total", kind=kind)  # noqa: E731
    assert count("manifest") == text.manifest_bytes + cache.manifest_bytes + again.manifest_bytes
    assert count("payload") == text.payload_bytes + cache.payload_bytes
    assert cache.payload_bytes > 3 * 4096
    assert count("resent") == text.resent_bytes + cache.resent_bytes == 0
    assert count("lookups") == 0
    control = count("control") + value(story.receiver, "kvferry_sent_bytes_total", kind="control")
    receipts = receipt_bytes(text) + receipt_bytes(cache)
    assert control == text.control_bytes + cache.control_bytes + receipts + held_offer_bytes(again)


def test_what_one_side_sent_is_what_the_other_received(story: Story) -> None:
    for kind in ("manifest", "payload", "resent", "control"):
        sent = value(story.sender, "kvferry_sent_bytes_total", kind=kind)
        assert sent == value(story.receiver, "kvferry_received_bytes_total", kind=kind), kind
    returned = value(story.sender, "kvferry_received_bytes_total", kind="control")
    assert returned == value(story.receiver, "kvferry_sent_bytes_total", kind="control")


def test_tokens_are_those_of_the_ledger(story: Story) -> None:
    for kind, name in [("prefill", "receiver_prefill"), ("reused", "reused"), ("generated", "generated")]:
        expected = sum(getattr(ledger.tokens, name) for ledger in story.ledgers)
        assert value(story.receiver, "kvferry_tokens_total", kind=kind) == expected > 0
    prefilled = sum(account.prefill_tokens for account in story.accounts)
    assert value(story.sender, "kvferry_tokens_total", kind="prefill") == prefilled > 0


def test_answers_are_counted_by_method_and_reason(story: Story) -> None:
    counted = {
        tuple(dict(labels)[key] for key in ("method", "finish_reason")): number
        for (name, labels), number in story.receiver.items()
        if name == "kvferry_asks_total"
    }
    assert counted == Counter((ledger.method, ledger.finish_reason) for ledger in story.ledgers)


def test_durations_sum_up_to_the_ledgers(story: Story) -> None:
    ledgers = story.ledgers
    committed = ledgers[:2]
    for name, milliseconds in {
        "kvferry_answer_seconds": [ledger.ms.total for ledger in ledgers],
        "kvferry_first_token_seconds": [ledger.ms.first_token for ledger in ledgers if ledger.ms.first_token],
        "kvferry_reconstruct_seconds": [ledger.ms.reconstruct for ledger in ledgers if ledger.ms.reconstruct],
        "kvferry_prefill_seconds": [ledger.ms.receiver_prefill for ledger in ledgers if ledger.ms.receiver_prefill],
        "kvferry_verify_seconds": [ledger.ms.verify for ledger in committed],
    }.items():
        assert value(story.receiver, f"{name}_count") == len(milliseconds), name
        assert value(story.receiver, f"{name}_sum") == pytest.approx(sum(milliseconds) / 1000), name
    assert value(story.sender, "kvferry_transfer_seconds_count") == 2
    transferred = sum(ledger.ms.transfer for ledger in committed) / 1000
    assert value(story.sender, "kvferry_transfer_seconds_sum") == pytest.approx(transferred)
    read = [ledger.ms.prefill for ledger in committed if ledger.ms.prefill]
    assert value(story.sender, "kvferry_prefill_seconds_count") == len(read) == 1
    assert value(story.sender, "kvferry_prefill_seconds_sum") == pytest.approx(sum(read) / 1000)


def test_artifacts_and_offers_are_counted_once(story: Story) -> None:
    assert value(story.receiver, "kvferry_artifacts_stored") == value(story.sender, "kvferry_artifacts_stored") == 2
    for form in ("text", "kv"):
        assert value(story.receiver, "kvferry_artifacts_committed_total", form=form) == 1
    assert value(story.receiver, "kvferry_offers_total", verdict="accepted") == 2
    assert value(story.receiver, "kvferry_offers_total", verdict="held") == 1
    assert value(story.sender, "kvferry_sends_total", method="B1", outcome="moved") == 1
    assert value(story.sender, "kvferry_sends_total", method="B1", outcome="held") == 1
    assert value(story.receiver, "kvferry_store_bytes", area="artifacts") >= story.ledgers[1].payload_bytes
    assert value(story.receiver, "kvferry_store_bytes", area="partial") == 0
    assert value(story.receiver, "kvferry_resident_bytes") == story.ledgers[-1].resident_bytes > 0


def test_calls_are_counted_by_status_and_none_is_left_in_flight(story: Story) -> None:
    assert value(story.receiver, "kvferry_rpcs_total", rpc=ASK, code="OK") == 3
    assert value(story.receiver, "kvferry_rpcs_total", rpc=ASK, code="RESOURCE_EXHAUSTED") == 1
    assert value(story.sender, "kvferry_rpcs_total", rpc=SEND, code="OK") == 3
    assert value(story.receiver, "kvferry_rpc_seconds_count", rpc=ASK) == 4
    for scraped in (story.sender, story.receiver):
        in_flight = [number for (name, _), number in scraped.items() if name == "kvferry_rpcs_in_flight"]
        assert in_flight
        assert not any(in_flight)
        assert value(scraped, "kvferry_worker_queue_depth") == 0
        assert value(scraped, "kvferry_process_peak_resident_bytes") > 10e6


def test_one_request_id_runs_through_the_logs_of_both_daemons(daemons: tuple[Daemon, Daemon], story: Story) -> None:
    sender, receiver = daemons
    artifacts = [end.artifact_id.hex() for end in story.ends]
    sent = {line["request_id"]: line["artifact"] for line in sender.log_lines() if line["event"] == "sent"}
    assert sent == dict(zip(["s1", "send.2", "again"], artifacts, strict=True))
    committed = {line["request_id"]: line["artifact"] for line in receiver.log_lines() if line["event"] == "committed"}
    assert committed == dict(zip(["s1", "send.2"], artifacts[:2], strict=True))
