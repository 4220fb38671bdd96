"""host:port: what is taken, what is refused, and what counts as loopback."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core.addresses import RECEIVER_PORT, SENDER_PORT, Address, parse, parse_receiver
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9-]{0,20}){0,2}", fullmatch=True)
HOSTS = NAMES | st.ip_addresses().map(str)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:7411", Address("127.0.0.1", 7411)),
        ("localhost:0", Address("localhost", 0)),
        ("mac-studio.local:65535", Address("mac-studio.local", 65535)),
        ("[::1]:7412", Address("::1", 7412)),
        ("[fe80::1%en0]:1", Address("fe80::1%en0", 1)),
    ],
)
def test_host_and_port(text: str, expected: Address) -> None:
    assert parse(text, "receiver") == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", ["mac-studio.local", "192.0.2.7", "[::1]", "[2001:db8::2]"])
def test_the_default_port_fills_in(text: str) -> None:
    assert str(parse(text, "receiver", 7412)) == f"{text}:7412"
    with pytest.raises(ConfigError):
        parse(text, "receiver")


def test_a_given_port_is_not_replaced() -> None:
    assert parse("[::1]:9", "receiver", 7412).port == 9
    assert parse("host:9", "receiver", 7412).port == 9


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":7411",
        "host:",
        "host:65536",
        "host:-1",
        "host:+1",
        "host: 1",
        "host:1_0",
        "host:٣",
        "host:http",
        "[]:1",
    ],
)
def test_what_is_no_address_is_refused_by_field_and_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "receiver")
    assert caught.value.message.startswith(f"receiver: {text!r}")
    assert caught.value.fields == {"field": "receiver", "value": text}


@pytest.mark.parametrize("text", ["::1", "::1:7412", "fe80::1", "2001:db8::2:7412"])
def test_an_ipv6_address_without_brackets_is_not_guessed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[address\]:port"):
        parse(text, "listen", 7412)


@given(st.text(), st.none() | st.integers(0, 65535))
@example("host:" + "9" * 5000, None)
@example("[" * 50 + "]:1", None)
def test_any_text_is_an_address_or_one_clear_error(text: str, default: int | None) -> None:
    try:
        address = parse(text, "receiver", default)
    except ConfigError as error:
        assert error.fields["field"] == "receiver"  # noqa: PT017  (most texts raise, some do not)
    else:
        assert address.host
        assert 0 <= address.port <= 65535


@given(HOSTS, st.integers(0, 65535))
def test_what_is_written_is_read_again(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse(str(address), "receiver") == address


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),  # noqa: S104  (nothing listens)
        ("::", False),
        ("192.168.1.2", False),
        ("mac-studio.local", False),
        # A name is whatever its name server says, so none but localhost is trusted.
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_loopback(host: str, *, expected: bool) -> None:
    assert Address(host, 7411).is_loopback is expected


def test_daemons_listen_where_the_other_one_looks() -> None:
    assert parse(SenderConfig().listen, "listen") == Address("127.0.0.1", SENDER_PORT)
    assert parse(SenderConfig().receiver, "receiver") == parse(ReceiverConfig().listen, "listen")
    assert parse(ReceiverConfig().listen, "listen").port == RECEIVER_PORT


def test_a_receiver_may_be_a_tcp_worker() -> None:
    plain, worker = (parse_receiver(text, "receiver") for text in ("mini.local", "tcp://mini.local:7413"))
    assert (plain, str(plain)) == (Address("mini.local", RECEIVER_PORT), "mini.local:7412")
    assert (worker, str(worker)) == (Address("mini.local", 7413, tcp=True), "tcp://mini.local:7413")
    assert parse_receiver("tcp://[::1]:5", "receiver") == Address("::1", 5, tcp=True)
    assert parse_receiver("tcp://[::1]:5", "receiver").is_loopback


@pytest.mark.parametrize(
    "text", ["tcp://", "tcp://host", "tcp://host:70000", "tcp://::1:5", "tcp://tcp://h:1", "TCP://h:1", "http://h:1"]
)
def test_what_is_no_tcp_worker_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="^receiver: "):
        parse_receiver(text, "receiver")


def test_a_tcp_worker_is_no_address_of_anything_else() -> None:
    with pytest.raises(ConfigError):
        parse("tcp://127.0.0.1:7413", "listen")
