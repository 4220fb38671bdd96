"""Values that cannot travel are refused here, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvferry.client import ConfigError, InvalidRequestError, NotFoundError, TooLargeError
from kvferry.client._documents import Document
from kvferry.client._peers import Peers
from kvferry.client._references import digits, match
from kvferry.client._requests import ask, fetch_spans, send_start
from kvferry.client._values import Artifact

OPTIONS: dict[str, Any] = {"max_tokens": 128, "temperature": 0.0, "top_p": 1.0, "seed": 0}
ID = "ab" * 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**32),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("seed", -1),
        ("seed", 2**64),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
    ],
)
def test_an_impossible_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: .*must be") as caught:
        ask("Why?", **(OPTIONS | {field: value}))
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 2**32 - 1), ("seed", 2**64 - 1), ("temperature", 2), ("top_p", 1)]
)
def test_the_largest_values_travel(field: str, value: Any) -> None:
    request = ask("Why?", **(OPTIONS | {field: value}))
    assert getattr(request.FromString(request.SerializeToString()), field) == value


@pytest.mark.parametrize("question", ["", " \n\t"])
def test_an_empty_question_is_refused(question: str) -> None:
    with pytest.raises(InvalidRequestError, match="question: is empty"):
        ask(question, **OPTIONS)


def test_a_huge_question_is_refused() -> None:
    limit = 256 * 1024
    assert len(ask("é" * (limit // 2), **OPTIONS).question) == limit // 2
    with pytest.raises(TooLargeError, match=f"question: {limit + 2} bytes, the limit is {limit}"):
        ask("é" * (limit // 2 + 1), **OPTIONS)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("question", {"question": "a\ud800"}),
        ("system", {"system": "a\ud800"}),
        ("method", {"method": "a\ud800"}),
        ("rule", {"parameters": {"rule": "a\ud800"}}),
        ("budget", {"parameters": {"budget": 2**63}}),
        ("budget", {"parameters": {"budget": [1]}}),
    ],
)
def test_what_protobuf_would_choke_on_is_named(field: str, changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"method": "B1", "receiver": "", "question": None, "system": None, "parameters": {}}
    with pytest.raises(InvalidRequestError) as caught:
        send_start(Document(b"a", b"", 1), **(values | changes))
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(("digest", "spans"), [("ab", [(0, 1)]), (ID, [(2, 1)]), (ID, [(-1, 1)])])
def test_an_impossible_span_is_refused(digest: str, spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequestError):
        fetch_spans(digest, spans)


class TestReferences:
    def test_case_and_space_do_not_matter(self) -> None:
        assert digits(f" {ID.upper()}\n") == ID
        assert digits(Artifact(ID, "B1", "kv", 1, 1, 0.0)) == ID

    @pytest.mark.parametrize("text", ["", "abcdef1", "xyzxyzxyz", ID + "a", "abcdefg0"])
    def test_what_is_no_id_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequestError, match="is not an artifact id"):
            digits(text)

    def test_a_prefix_must_be_unique(self) -> None:
        known = ["abcdef0011", "abcdef0022", "ff00000000"]
        assert match("abcdef001", known, "here") == "abcdef0011"
        with pytest.raises(InvalidRequestError, match="abcdef00 begins 2 ids at here: abcdef0011…, abcdef0022…"):
            match("abcdef00", known, "here")
        with pytest.raises(NotFoundError, match="artifact cdef0011: not held by here"):
            match("cdef0011", known, "here")


class TestPeers:
    def parse(self, **changes: Any) -> Peers:
        values: dict[str, Any] = {
            "sender": "127.0.0.1:1",
            "receiver": "127.0.0.1:2",
            "deliver_to": None,
            "look_up_at": None,
            "timeout": 1,
            "idle_timeout": 1,
        }
        return Peers.parse(**(values | changes))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("sender", "host:port"),
            ("receiver", "::1:5"),
            ("deliver_to", ":5"),
            ("look_up_at", ":5"),
            ("look_up_at", "tcp://studio.local:7"),
            ("timeout", 0),
            ("timeout", math.nan),
            ("idle_timeout", -1),
            ("idle_timeout", math.inf),
        ],
    )
    def test_an_impossible_setting_is_named(self, field: str, value: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            self.parse(**{field: value})
        assert caught.value.fields["field"] == field

    def test_ports_have_defaults(self) -> None:
        peers = self.parse(sender="studio.local", receiver="mini.local")
        assert (str(peers.sender), str(peers.receiver)) == ("studio.local:7411", "mini.local:7412")

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({}, "127.0.0.1:2"),
            ({"sender": "studio.local"}, None),
            ({"sender": "studio.local", "receiver": "localhost:5"}, None),
            ({"sender": "studio.local", "receiver": "[::1]:5"}, None),
            ({"sender": "studio.local", "receiver": "mini.local:5"}, "mini.local:5"),
            ({"receiver": "mini.local:5"}, "mini.local:5"),
            ({"sender": "studio.local", "deliver_to": "mini.local:9"}, "mini.local:9"),
            ({"sender": "studio.local", "deliver_to": ""}, ""),
        ],
    )
    def test_this_machine_is_never_mistaken_for_the_senders(self, changes: dict[str, Any], told: str | None) -> None:
        peers = self.parse(**changes)
        if told is not None:
            assert peers.delivery_address == told
            return
        with pytest.raises(ConfigError, match=r"deliver_to: .* is this machine"):
            _ = peers.delivery_address

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({}, "127.0.0.1:1"),
            ({"sender": "studio.local", "receiver": "mini.local:5"}, "studio.local:7411"),
            ({"sender": "studio.local"}, "studio.local:7411"),
            # This machine is another one to the receiver, which may know the sender better.
            ({"receiver": "mini.local"}, ""),
            ({"receiver": "mini.local", "sender": "[::1]:5"}, ""),
            ({"receiver": "mini.local", "look_up_at": "studio.local"}, "studio.local"),
            ({"sender": "studio.local", "look_up_at": "10.0.0.1:9"}, "10.0.0.1:9"),
            ({"sender": "studio.local", "look_up_at": ""}, ""),
        ],
    )
    def test_the_receiver_is_told_where_it_finds_the_sender(self, changes: dict[str, Any], told: str) -> None:
        assert self.parse(**changes).look_up_address == told
