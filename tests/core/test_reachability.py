"""Why a peer cannot be reached: what macOS means by "No route to host", and what it means elsewhere."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import grpc
import pytest

from kvferry.core import reachability, rpc
from kvferry.core.errors import UnavailableError
from kvferry.core.reachability import explain, explain_errno, is_local_network

GRPC_DETAILS = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:{}:7412: Failed to connect to remote host: "
    "connect: No route to host (65)"
)
SETTINGS = "System Settings → Privacy & Security → Local Network"


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("192.168.1.20:7412", True),
        ("10.0.0.5:7412", True),
        ("172.16.3.4:7412", True),
        ("169.254.10.1:7412", True),
        ("[fe80::1%en0]:7412", True),
        ("[fd12::1]:7412", True),
        ("fe80::1", True),
        ("studio.local:7412", True),
        ("Studio.LOCAL.:7412", True),
        ("studio:7412", True),
        ("127.0.0.1:7412", False),
        ("[::1]:7412", False),
        ("localhost:7412", False),
        ("0.0.0.0:7412", False),
        ("8.8.8.8:7412", False),
        ("[2606:4700::1111]:7412", False),
        ("kvferry.example.org:7412", False),
    ],
)
def test_what_counts_as_the_local_network(address: str, *, local: bool) -> None:
    assert is_local_network(address) is local


@pytest.mark.parametrize("details", ["[Errno 65] No route to host", "EHOSTUNREACH", GRPC_DETAILS.format("192.168.1.9")])
def test_no_route_on_macos_names_the_setting_and_the_daemons(details: str) -> None:
    text = explain(details, "192.168.1.9:7412", "darwin")
    assert SETTINGS in text
    assert "launchd" in text
    assert "ssh" in text


def test_the_address_that_was_dialled_counts_more_than_the_name() -> None:
    name = "kvferry.example.org:7412"
    assert SETTINGS in explain(GRPC_DETAILS.format("10.1.2.3"), name, "darwin")
    assert SETTINGS not in explain(GRPC_DETAILS.format("8.8.8.8"), name, "darwin")
    assert SETTINGS in explain("ipv6:[fe80::5%25en0]:7412: No route to host", name, "darwin")


@pytest.mark.parametrize(("address", "platform"), [("192.168.1.9:1", "linux"), ("8.8.8.8:1", "darwin")])
def test_no_route_elsewhere_speaks_of_the_network(address: str, platform: str) -> None:
    text = explain("No route to host", address, platform)
    assert "firewall" in text
    assert "macOS" not in text


@pytest.mark.parametrize("details", ["Operation not permitted", "connect: Operation timed out (60)", "timed out"])
def test_a_denial_or_silence_on_macos_is_only_a_suspicion(details: str) -> None:
    assert "may be" in explain(details, "192.168.1.9:1", "darwin")
    assert explain(details, "192.168.1.9:1", "linux") == ""
    assert explain(details, "127.0.0.1:1", "darwin") == ""


@pytest.mark.parametrize("details", ["Connection refused", "", "Name or service not known", "GOAWAY received"])
def test_an_error_that_speaks_for_itself_gets_nothing(details: str) -> None:
    assert explain(details, "192.168.1.9:1", "darwin") == ""


def test_socket_errors_go_by_their_number_on_this_system() -> None:
    address = "10.0.0.1:7412"
    assert explain_errno(errno.EHOSTUNREACH, address, "darwin") == explain("No route to host", address, "darwin")
    assert "may be" in explain_errno(None, address, "darwin")
    assert "may be" in explain_errno(errno.EPERM, address, "darwin")
    assert explain_errno(errno.ECONNREFUSED, address, "darwin") == ""


class FailedCall(grpc.RpcError):
    """A call as gRPC gives it up."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()


def test_the_error_of_a_failed_call_carries_the_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = FailedCall(grpc.StatusCode.UNAVAILABLE, GRPC_DETAILS.format("192.168.1.9"))
    monkeypatch.setattr(reachability.explain, "__defaults__", ("darwin",))
    error = rpc.from_rpc(failed, "studio.local:7412", "Offer")
    assert isinstance(error, UnavailableError)
    assert SETTINGS in error.message
    assert "No route to host (65)" in error.message
    assert "\n" not in error.message
    plain = rpc.from_rpc(FailedCall(grpc.StatusCode.UNAVAILABLE, "Connection refused"), "studio.local:7412", "Offer")
    assert plain.message == "studio.local:7412: cannot be reached for Offer (Connection refused)"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX error texts")
def test_the_systems_own_text_is_recognised() -> None:
    text = str(OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)))
    assert "firewall" in explain(text, "10.0.0.1:1", "linux")
