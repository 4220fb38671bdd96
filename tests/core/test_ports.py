"""Addresses that a daemon is told to listen at: free, taken, or none of this machine's."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.core import ports
from kvferry.core.addresses import Address
from kvferry.core.config import ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError


@pytest.fixture
def taken() -> Iterator[Address]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield Address("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])  # noqa: S104  (any interface is what is tried)
def test_a_free_port_is_free_and_stays_so(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert ports.trouble(Address(host, 0)) is None
    assert ports.trouble(Address("127.0.0.1", port)) is None
    socket.create_server(("127.0.0.1", port)).close()


def test_a_taken_port_is_the_systems_error(taken: Address) -> None:
    problem = ports.trouble(taken)
    assert isinstance(problem, OSError)
    assert problem.errno == errno.EADDRINUSE
    # A name that stands for this address among others is taken as well.
    named = ports.trouble(Address("localhost", taken.port))
    assert isinstance(named, OSError)
    assert named.errno == errno.EADDRINUSE


def test_one_address_of_a_name_that_this_machine_lacks_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    here: Any = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    elsewhere: Any = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))
    for places, fine in (([elsewhere, here], True), ([elsewhere], False)):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=places, **__: found)
        assert (ports.trouble(Address("some-name", 0)) is None) is fine


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 100])
def test_a_name_that_means_nothing(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^listen: {host}:7412 cannot be bound: .+") as caught:
        ports.check(ReceiverConfig(listen=f"{host}:7412"))
    assert "another daemon" not in caught.value.message


@pytest.mark.parametrize("field", ["listen", "metrics", "tcp"])
def test_every_address_of_a_configuration_is_looked_at(field: str, taken: Address) -> None:
    given = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "tcp": "127.0.0.1:0"}
    ports.check(ReceiverConfig(**given))
    with pytest.raises(ConfigError) as caught:
        ports.check(ReceiverConfig(**{**given, field: str(taken)}))
    assert caught.value.message == (
        f"{field}: {taken} cannot be bound: Address already in use; is another daemon there?"
    )
    assert caught.value.fields == {"field": field, "value": str(taken)}


def test_a_sender_without_a_metrics_page_has_one_address(taken: Address) -> None:
    ports.check(SenderConfig(listen="127.0.0.1:0"))
    with pytest.raises(ConfigError, match=f"^metrics: {taken} cannot be bound"):
        ports.check(SenderConfig(listen="127.0.0.1:0", metrics=str(taken)))
