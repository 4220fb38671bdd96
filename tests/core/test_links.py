"""The interface that traffic leaves by, as Linux and macOS tell it."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvferry.core import links
from kvferry.core.links import Link, find

ROUTE = """   route to: 169.254.87.12
destination: 169.254.0.0
       mask: 255.255.0.0
  interface: bridge0
      flags: <UP,DONE,CLONING,STATIC>
 recvpipe  sendpipe  ssthresh  rtt,msec    rttvar  hopcount      mtu     expire
       0         0         0         0         0         0      9000      -123
"""
PORTS = """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: aa:bb:cc:dd:ee:ff

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: aa:bb:cc:dd:ee:00
"""


def mac(route: str, ports: str = PORTS) -> tuple[Callable[[Sequence[str]], str], list[list[str]]]:
    asked: list[list[str]] = []

    def run(arguments: Sequence[str]) -> str:
        asked.append(list(arguments))
        return route if "route" in arguments[0] else ports

    return run, asked


def test_a_mac_names_the_port_and_the_mtu() -> None:
    run, asked = mac(ROUTE)
    found = find("169.254.1.1", "169.254.87.12", "darwin", run)
    assert found == Link("bridge0", "Thunderbolt Bridge", 9000)
    assert str(found) == "bridge0 (Thunderbolt Bridge), MTU 9000"
    assert asked[0][1:] == ["-n", "get", "-inet", "169.254.87.12"]


def test_a_mac_asks_for_the_other_family_with_ipv6() -> None:
    run, asked = mac(ROUTE.replace("bridge0", "utun4").replace("9000", "1280"))
    found = find("fd7a::1", "fd7a::2", "darwin", run)
    assert found == Link("utun4", "", 1280)
    assert found.is_tunnel
    assert "-inet6" in asked[0]


@pytest.mark.parametrize("route", ["", "route: writing to routing socket: not in table\n", "interface:"])
def test_a_mac_that_does_not_tell_gives_nothing(route: str) -> None:
    assert find("10.0.0.1", "10.0.0.2", "darwin", mac(route)[0]) is None


def test_a_route_without_figures_has_no_mtu() -> None:
    assert find("10.0.0.1", "10.0.0.2", "darwin", mac("interface: en0\n")[0]) == Link("en0", "Wi-Fi", None)


def test_linux_reads_mtu_and_kind_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/wlan0/wireless").mkdir(parents=True)
    (tmp_path / "sys/class/net/wlan0/mtu").write_text("1492\n")
    (tmp_path / "proc/net").mkdir(parents=True)
    address = ipaddress.ip_address("fe80::1234")
    lines = [f"{'0' * 31}1 01 80 10 80       lo", f"{address.packed.hex()} 02 40 20 80    wlan0"]
    (tmp_path / "proc/net/if_inet6").write_text("\n".join(lines) + "\n")
    assert find("fe80::1234%wlan0", "fe80::9", "linux", root=tmp_path) == Link("wlan0", "Wi-Fi", 1492)
    assert find("fe80::77", "fe80::9", "linux", root=tmp_path) is None
    assert find("127.0.0.1", "127.0.0.1", "linux", root=tmp_path) == Link("lo", "loopback", None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_the_address_of_this_machine_belongs_to_an_interface_of_its_own() -> None:
    loopback = find("127.0.0.1", "127.0.0.1")
    assert loopback is not None
    assert loopback.interface == "lo"
    assert loopback.mtu == int(Path("/sys/class/net/lo/mtu").read_text())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A datagram socket chooses its way here and sends nothing.
            probe.connect(("203.0.113.1", 9))
        except OSError:
            pytest.skip("no network")
        local = probe.getsockname()[0]
    found = find(local, "203.0.113.1")
    assert found is None or found.interface in {name for _, name in socket.if_nameindex()} - {"lo"}


def test_a_system_that_is_neither_gives_nothing() -> None:
    assert find("10.0.0.1", "10.0.0.2", "win32") is None


@pytest.mark.parametrize(
    ("arguments", "output"), [(["/bin/echo", "hi"], "hi\n"), (["/bin/sh", "-c", "exit 3"], ""), (["/no/such"], "")]
)
def test_a_command_that_fails_prints_nothing(arguments: list[str], output: str) -> None:
    assert links.run_command(arguments) == output


def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_COMMAND_SECONDS", 0.1)
    assert links.run_command(["/bin/sleep", "30"]) == ""
