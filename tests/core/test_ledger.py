from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.core import ledger
from kvferry.core.choice import AutoChoice
from kvferry.core.ledger import (
    AutoAccount,
    Ledger,
    Lookups,
    Milliseconds,
    ParityFigures,
    Rows,
    SenderAccount,
    Tokens,
    Traffic,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "ledger.md"
ACCOUNT = SenderAccount(
    prefill_tokens=900, dense_bf16_bytes=20_736_000, prefill_ms=1.5, method_ms=2.5, encode_ms=3.5, transfer_ms=4.5
)
TRAFFIC = Traffic(manifest_bytes=4000, payload_bytes=100_000, received_bytes=130_000, control_bytes=2500)
RECORD = Ledger(
    artifact_id="ab" * 32,
    method="B4",
    form="kv",
    verdict="accepted",
    fallback="text",
    fallback_reason="WEIGHTS_MISMATCH model.weights",
    manifest_bytes=4000,
    payload_bytes=100_000,
    resent_bytes=30_000,
    control_bytes=2500,
    lookups=Lookups(count=2, calls=1, bytes=512, text_bytes=400, ms=7.25, hit=True, missing=("gate code",)),
    wire_bytes=137_012,
    dense_bf16_bytes=20_736_000,
    ratio=20_736_000 / 137_012,
    tokens=Tokens(900, 12, 900, 33, 7),
    ms=Milliseconds(1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5),
    rows=Rows(24, 32.5, 41),
    parity=ParityFigures(0.001, top1=True, bound=0.01),
    resident_bytes=123_456,
    finish_reason="stop",
    prompt_version=1,
    system="cd" * 32,
    runtime={"kvferry": "0.1.0", "device": "cpu"},
    request_id="0f" * 8,
)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and path != ("runtime",):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def edited(record: dict[str, Any], path: tuple[str, ...], *value: Any) -> str:
    """The record with the value at ``path`` replaced, or without it when no value is given."""
    found = copy.deepcopy(record)
    parent = found
    for key in path[:-1]:
        parent = parent[key]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return json.dumps(found)


def test_round_trip() -> None:
    assert ledger.ledger_from_json(ledger.to_json(RECORD)) == RECORD
    assert ledger.account_from_json(ledger.to_json(ACCOUNT)) == ACCOUNT


def test_a_record_is_one_line_of_plain_json() -> None:
    record = msgspec.structs.replace(RECORD, fallback_reason='line one\nline "two"\u2028\x00é', fallback=None)
    line = ledger.to_json(record)
    assert "\n" not in line
    assert json.loads(line)["fallback_reason"] == record.fallback_reason
    assert json.loads(line)["fallback"] is None
    assert list(json.loads(line)) == list(Ledger.__struct_fields__)
    assert ledger.ledger_from_json(line) == record


def test_every_field_must_be_there_and_of_its_type() -> None:
    plain = json.loads(ledger.to_json(RECORD))
    for path, value in leaves(plain):
        if path[0] not in ("lookups", "rows", "request_id", "auto", "tokenizer_bytes") and path[-1] != "tokenizer":
            with pytest.raises(msgspec.ValidationError, match=path[-1]):
                ledger.ledger_from_json(edited(plain, path))
        wrong: object = 5 if isinstance(value, str) else "5"
        with pytest.raises(msgspec.ValidationError, match=re.escape(".".join(path))):
            ledger.ledger_from_json(edited(plain, path, wrong))


def test_only_what_may_be_absent_may_be_null() -> None:
    plain = json.loads(ledger.to_json(RECORD))
    for path, _ in leaves(plain):
        line = edited(plain, path, None)
        if path in (("fallback",), ("fallback_reason",), ("ms", "first_token"), ("lookups", "hit"), ("auto",)):
            ledger.ledger_from_json(line)
            continue
        with pytest.raises(msgspec.ValidationError):
            ledger.ledger_from_json(line)


def test_an_account_from_the_wire_is_strict() -> None:
    absent = {"tokenizer_bytes": 0, "tokenizer_ms": 0.0}
    plain = json.loads(ledger.to_json(ACCOUNT)) | absent | {"fallback_reason": "so"}
    for name in plain.keys() - {"fallback_reason", "auto"}:
        if name in absent:
            assert getattr(ledger.account_from_json(edited(plain, (name,))), name) == absent[name]
        else:
            with pytest.raises(msgspec.ValidationError, match=name):
                ledger.account_from_json(edited(plain, (name,)))
        for wrong in (None, "1", [1], {}, True):
            with pytest.raises(msgspec.ValidationError, match=name):
                ledger.account_from_json(edited(plain, (name,), wrong))
    for wrong in (1, [1], {}, True):
        with pytest.raises(msgspec.ValidationError, match="fallback_reason"):
            ledger.account_from_json(edited(plain, ("fallback_reason",), wrong))
    assert ledger.account_from_json(edited(plain, ("fallback_reason",))).fallback_reason is None
    with pytest.raises(msgspec.ValidationError, match="surplus"):
        ledger.account_from_json(json.dumps(plain | {"surplus": 1}))


def test_an_account_does_not_say_what_is_not_there() -> None:
    # A receiver of before a field knows these names and no other.
    first = [
        "prefill_tokens",
        "dense_bf16_bytes",
        "prefill_ms",
        "method_ms",
        "encode_ms",
        "transfer_ms",
        "fallback_reason",
        "auto",
    ]
    account = SenderAccount(0, 0, 0.0, 0.0, 0.0, 0.0)
    assert list(json.loads(ledger.to_json(account))) == first
    said = json.loads(ledger.to_json(msgspec.structs.replace(account, tokenizer_bytes=107, tokenizer_ms=2.5)))
    assert list(said) == [*first, "tokenizer_bytes", "tokenizer_ms"]
    assert (said["tokenizer_bytes"], said["tokenizer_ms"]) == (107, 2.5)


@pytest.mark.parametrize("text", ["", "null", "[]", "1", '{"prefill_tokens":', "{}", "NaN", "\x00"])
def test_what_is_no_record_is_refused(text: str) -> None:
    for parse in (ledger.account_from_json, ledger.ledger_from_json):
        with pytest.raises(msgspec.DecodeError):
            parse(text)


def test_wire_bytes_are_everything_that_crossed_resent_chunks_once() -> None:
    assert TRAFFIC.wire_bytes == 4000 + 130_000 + 2500
    assert TRAFFIC.resent_bytes == 30_000


@pytest.mark.parametrize(("received", "resent"), [(0, 0), (99_999, 0), (100_000, 0), (100_001, 1)])
def test_nothing_is_resent_before_the_payload_is_whole(received: int, resent: int) -> None:
    assert msgspec.structs.replace(TRAFFIC, received_bytes=received).resent_bytes == resent


def test_the_document_explains_every_field() -> None:
    cells = [line.split("|")[1] for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| `")]
    explained = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    whole = [name for name in Ledger.__struct_fields__ if name not in ("tokens", "ms", "lookups", "auto")]
    expected = {
        *whole,
        *(f"lookups.{name}" for name in Lookups.__struct_fields__),
        *(f"tokens.{name}" for name in Tokens.__struct_fields__),
        *(f"ms.{name}" for name in Milliseconds.__struct_fields__),
        *(f"auto.{name}" for name in AutoAccount.__struct_fields__ if name != "choice"),
        *(f"auto.choice.{name}" for name in AutoChoice.__struct_fields__),
    }
    assert sorted(explained) == sorted(expected)


def test_the_document_defines_the_ratio_as_dense_over_wire() -> None:
    (row,) = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| `ratio`")]
    assert "`dense_bf16_bytes / wire_bytes`" in row
    assert "dense bf16 bytes over wire bytes" in (Ledger.__doc__ or "")


def test_a_record_that_nests_without_end_is_no_record() -> None:
    deep = '{"surplus":' + "[" * 100_000 + "]" * 100_000 + "}"
    for parse in (ledger.account_from_json, ledger.ledger_from_json):
        with pytest.raises(msgspec.DecodeError):
            parse(deep)
