"""The account of a choice: strict on the wire, beside what happened, and in one line for people."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.core import ledger
from kvferry.core.choice import AutoChoice, Estimate, LinkSpeed, PassedOver, explain
from kvferry.core.ledger import SenderAccount

CACHE = Estimate("B2", "kv", "bits=8", 9000, 1500.0, 30.5, 70.0, 1600.5)
TEXT = Estimate("A7", "text", "", 800, 2.0, 31.0, 4000.0, 4033.0)
CHOICE = AutoChoice(
    quality="near",
    chosen=CACHE,
    estimates=(CACHE, TEXT),
    passed_over=(PassedOver("B1", "kv", "", "refused: TOO_LARGE", 250.0), PassedOver("A5", "evidence", "", "no fact")),
    link=LinkSpeed(10.0, 1e6),
    sender_tokens_per_second=100.0,
    receiver_tokens_per_second=50.0,
    probe_bytes=1234,
    deciding_ms=40.0,
)
ACCOUNT = SenderAccount(900, 1000, 1.0, 2.0, 4.0, 8.0, auto=CHOICE)


def test_it_travels_with_the_account() -> None:
    assert ledger.account_from_json(ledger.to_json(ACCOUNT)) == ACCOUNT


def test_an_account_from_before_there_was_a_choice_is_read() -> None:
    plain = json.loads(ledger.to_json(ACCOUNT))
    del plain["auto"]
    assert ledger.account_from_json(json.dumps(plain)).auto is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quality",), "best"),
        (("surplus",), 1),
        (("probe_bytes",), -1),
        (("probe_bytes",), 2**60),
        (("deciding_ms",), -0.5),
        (("deciding_ms",), 1e300),
        (("sender_tokens_per_second",), 0.0),
        (("link", "bytes_per_second"), 0.0),
        (("link", "rtt_ms"), "1"),
        (("chosen", "method"), "x" * 257),
        (("chosen", "first_token_ms"), 1e13),
        (("chosen",), None),
        (("estimates",), [json.loads(msgspec.json.encode(CACHE))] * 33),
        (("passed_over",), [{"method": "B1", "form": "kv", "parameters": "", "reason": "x" * 1025}]),
        (("reused",), 1),
    ],
)
def test_what_another_machine_sends_is_bounded(path: tuple[str, ...], value: Any) -> None:
    plain = json.loads(ledger.to_json(ACCOUNT))
    parent = plain["auto"]
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        ledger.account_from_json(json.dumps(plain))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_no_number_is_endless(number: str) -> None:
    line = ledger.to_json(ACCOUNT).replace('"deciding_ms":40.0', f'"deciding_ms":{number}')
    with pytest.raises(msgspec.DecodeError):
        ledger.account_from_json(line)


def test_what_happened_stands_beside_what_was_expected() -> None:
    found = ledger.auto_account(ACCOUNT, 16.0, 32.0)
    assert found is not None
    # A failed attempt, making, transfer, verification, first token.
    assert (found.expected_ms, found.happened_ms) == (1600.5, 250 + 7 + 8 + 16 + 32)
    assert found.choice == CHOICE


def test_what_an_earlier_send_made_was_not_made_for_this_one() -> None:
    again = msgspec.structs.replace(ACCOUNT, auto=msgspec.structs.replace(CHOICE, reused=True, passed_over=()))
    found = ledger.auto_account(again, 16.0, 32.0)
    assert found is not None
    assert found.happened_ms == 8 + 16 + 32


def test_an_answer_without_text_has_no_first_token() -> None:
    found = ledger.auto_account(ACCOUNT, 16.0, None)
    assert found is not None
    assert found.happened_ms is None
    assert ledger.auto_account(msgspec.structs.replace(ACCOUNT, auto=None), 16.0, 32.0) is None


def test_one_line_says_what_it_was_quicker_than() -> None:
    assert explain(CHOICE) == (
        "B2 bits=8: first token expected in 1,600 ms (sender 1,500, transfer 30, receiver 70); A7 in 4,033 ms"
    )
    # What failed is nothing to compare with.
    failed = Estimate("B1", "kv", "", 1, 1.0, 1.0, 1.0, 3.0)
    assert explain(msgspec.structs.replace(CHOICE, estimates=(failed, CACHE, TEXT))) == explain(CHOICE)
    slow = Estimate("A1", "text", "", 900, 0.0, 31.0, 9000.0, 9031.0)
    for estimates in ((CACHE, slow, TEXT), (TEXT, CACHE, slow)):
        assert explain(msgspec.structs.replace(CHOICE, estimates=estimates)) == explain(CHOICE)
    packed = Estimate("B2", "kv", "key_bits=8 value_bits=4", 1, 1.0, 1.0, 1.0, 3.0)
    gone = (PassedOver("B2", "kv", "key_bits=8 value_bits=4", "refused"),)
    gave_way = msgspec.structs.replace(CHOICE, chosen=TEXT, estimates=(packed, CACHE, TEXT), passed_over=gone)
    assert explain(gave_way).endswith("; B2 bits=8 in 1,600 ms")
    alone = msgspec.structs.replace(CHOICE, chosen=TEXT, estimates=(TEXT,))
    assert explain(alone) == "A7: first token expected in 4,033 ms (sender 2, transfer 31, receiver 4,000)"
