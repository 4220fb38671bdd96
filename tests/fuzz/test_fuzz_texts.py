"""JSON, TOML and metadata: accounts, ledgers, token files, configuration, and the errors that a peer reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from hypothesis import strategies as st

from kvferry.client._responses import AnswerReader, SendReader
from kvferry.core import config, errors, ledger, rpc, tokens
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError, InvalidRequestError, KvferryError, PeerError, TransferError
from kvferry.proto.v1 import receiver_service_pb2, sender_service_pb2
from kvferry.receiver import intake

MIB = 2**20
ACCOUNT = ledger.to_json(ledger.SenderAccount(1, 2, 3.0, 4.0, 5.0, 6.0, "why"))
LEDGER = ledger.to_json(
    ledger.Ledger(
        artifact_id="ab" * 32,
        method="B1",
        form="kv",
        verdict="accepted",
        fallback=None,
        fallback_reason=None,
        manifest_bytes=1,
        payload_bytes=2,
        resent_bytes=3,
        control_bytes=4,
        lookups=ledger.Lookups(),
        wire_bytes=5,
        dense_bf16_bytes=6,
        ratio=1.5,
        tokens=ledger.Tokens(1, 2, 3, 4, 5),
        ms=ledger.Milliseconds(*[1.0] * 9),
        rows=ledger.Rows(),
        parity=None,
        resident_bytes=7,
        finish_reason="stop",
        prompt_version=1,
        system="cd",
        runtime={"mlx": "0"},
    )
)
edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 9), st.text(max_size=9)), min_size=1, max_size=3
)


def edited(text: str, changes: list[tuple[float, int, str]]) -> str:
    for place, removed, added in changes:
        at = int(place * (len(text) + 1))
        text = text[:at] + added + text[at + removed :]
    return text


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + closing * depth


deep = st.builds(nested, st.sampled_from(("[", '{"x":[')), st.sampled_from(("]", "]}")), st.integers(1, 5000))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


def json_around(record: str) -> st.SearchStrategy[str]:
    """Text near a record: edited, one value exchanged, one key more with something deep in it, or nothing like it."""
    plain = json.loads(record)
    swapped = st.builds(lambda key, value: json.dumps(plain | {key: value}), st.sampled_from(sorted(plain)), values)
    surplus = deep.map(lambda text: record[:-1] + ',"surplus":' + text + "}")
    return st.builds(edited, st.just(record), edits) | swapped | surplus | deep | st.text(max_size=60)


def test_accounts(fuzz: Any) -> None:
    def reads(budget: Any, text: str) -> None:
        with budget.at_most(MIB):
            try:
                account = intake._parse_account(text)
            except InvalidRequestError:
                return
        # Its numbers go into sums, ratios and metrics.
        figures = msgspec.structs.astuple(account)[:6]
        assert all(0 <= figure < 1e16 for figure in figures)
        assert ledger.account_from_json(ledger.to_json(account)) == account

    fuzz(reads, text=json_around(ACCOUNT))


def test_ends_of_answers(fuzz: Any) -> None:
    request = receiver_service_pb2.AskRequest(artifact_id=b"\xab" * 32)

    def takes(budget: Any, text: str, ids: list[int], seen: list[int]) -> None:
        reader = AnswerReader("peer:1", request)
        with budget.at_most(MIB):
            try:
                for token_id in seen:
                    piece = receiver_service_pb2.AnswerPiece(token_id=token_id, text="x")
                    reader.take(receiver_service_pb2.AskResponse(piece=piece))
                end = receiver_service_pb2.AnswerEnd(text="x", token_ids=ids, finish_reason="stop", ledger_json=text)
                reader.take(receiver_service_pb2.AskResponse(end=end))
            except (PeerError, TransferError):
                return
        assert ids == seen
        assert reader.answer.ledger.artifact_id == "ab" * 32

    some = st.lists(st.integers(0, 2**32 - 1), max_size=3)
    fuzz(takes, text=json_around(LEDGER).filter(encodable), ids=st.just([]) | some, seen=st.just([]) | some)


def encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def test_ends_of_sends(fuzz: Any) -> None:
    from kvferry.client import _documents

    document = _documents.read(None, "hello")

    def takes(budget: Any, text: str, artifact_id: bytes) -> None:
        reader = SendReader("peer:1", document)
        with budget.at_most(MIB):
            try:
                end = sender_service_pb2.SendEnd(artifact_id=artifact_id, account_json=text)
                reader.take(sender_service_pb2.SendResponse(end=end))
            except PeerError:
                return
        assert len(artifact_id) == 32

    fuzz(
        takes,
        text=json_around(ACCOUNT).filter(encodable),
        artifact_id=st.binary(max_size=40) | st.binary(min_size=32, max_size=32),
    )


# TOML

lines = st.lists(
    st.sampled_from(
        (
            "[[tokens]]",
            'name = "studio"',
            'digest = "' + "ab" * 32 + '"',
            "expires = 2027-11-30",
            "max_bytes = 5",
            "max_calls = 1",
            "listen = '127.0.0.1:0'",
            "max_calls = 0",
            "rpc_seconds = 1e400",
            "rpc_seconds = nan",
            "chunk_bytes = 0x7fffffffffffffff",
            "durable = 1",
            "x = " + "9" * 5000,
            "x = " + "[" * 3000 + "]" * 3000,
            "x = " + "{a=" * 3000 + "1" + "}" * 3000,
            "x" + ".x" * 200 + " = 1",
            "expires = 0000-99-99",
            "store = '\\u0000'",
            'store = "\\u0000"',
        )
    )
    | st.text(max_size=20),
    max_size=6,
).map("\n".join)


def test_token_files(fuzz: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"

    def reads(budget: Any, data: bytes) -> None:
        path.write_bytes(data)
        with budget.at_most(4 * MIB):
            try:
                found = tokens.load(path)
            except ConfigError as error:
                said = error.message
            else:
                said = ""
        assert said.startswith(f"tokens: {path}: ") or len({token.digest for token in found}) == len(found)

    fuzz(reads, data=lines.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=60))


def test_configuration(fuzz: Any, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"

    def reads(budget: Any, data: bytes, kind: Any, environment: dict[str, str]) -> None:
        path.write_bytes(data)
        with budget.at_most(4 * MIB):
            try:
                loaded = config.load(kind, path, environment)
            except ConfigError as error:
                assert error.message  # noqa: PT017
                return
        assert loaded.listen
        assert loaded.max_calls >= 1

    names = [f"KVFERRY_{role}_{name}" for role in ("SENDER", "RECEIVER") for name in ("LISTEN", "MAX_CALLS", "TTL_X")]
    fuzz(
        reads,
        data=lines.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=60),
        kind=st.sampled_from((SenderConfig, ReceiverConfig)),
        environment=st.dictionaries(st.sampled_from(names), st.text(max_size=9), max_size=2),
    )


# What a peer's error says of itself


def test_errors_of_a_stranger(fuzz: Any) -> None:
    def rebuilds(budget: Any, packed: bytes) -> None:
        with budget.at_most(MIB + 60 * len(packed)):
            error = rpc._unpack(packed, "what it says")
        if error is not None:
            assert isinstance(error, KvferryError)
            assert error.message == "what it says"

    scalar = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    scalar |= st.binary(max_size=9) | st.builds(msgpack.Timestamp, st.integers(-(2**63), 2**63 - 1), st.integers(0, 9))
    scalar |= st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9))
    anything = st.recursive(
        scalar, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalar, inner, max_size=4), max_leaves=8
    )
    near = st.fixed_dictionaries(
        {
            "code": st.sampled_from(sorted(errors.error_classes())) | anything,
            "fields": st.dictionaries(
                st.sampled_from(("self", "message", "field", "status")) | scalar, anything, max_size=4
            ),
        }
    )
    fuzz(rebuilds, packed=st.binary(max_size=60) | (near | anything).map(msgpack.packb))
