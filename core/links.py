"""Which network interface leads to a peer, and its MTU: a Mac with a cable may still send by Wi-Fi."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints, "" when that fails."""

_COMMAND_SECONDS = 3.0
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_TUNNELS = ("utun", "tun", "tap", "wg", "ppp", "ipsec", "tailscale", "zt")


@dataclass(frozen=True)
class Link:
    """An interface that traffic leaves by.

    Attributes:
        interface: such as "en0".
        kind: such as "Wi-Fi" or "Thunderbolt Bridge"; "" when the system does not say.
        mtu: largest packet in bytes; None when the system does not say.
    """

    interface: str
    kind: str
    mtu: int | None

    @property
    def is_tunnel(self) -> bool:
        """Whether it is a VPN's, by its name."""
        return self.interface.startswith(_TUNNELS)

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.interface}{kind}, MTU {self.mtu or 'unknown'}"


def run_command(arguments: Sequence[str]) -> str:
    """Run a command of the system for at most three seconds. Return its output, "" when it fails."""
    try:
        done = subprocess.run(
            list(arguments), capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def find(
    local: str, peer: str, platform: str = sys.platform, run: Run = run_command, root: Path = Path("/")
) -> Link | None:
    """Find the interface of a connection.

    Args:
        local: the connection's address here, as the socket tells it.
        peer: the address at the other end.
        platform: as ``sys.platform``.
        run: runs the system's commands.
        root: of the file system that Linux describes itself in.

    Returns:
        The link, or None when the system does not tell.
    """
    if platform == "darwin":
        return _find_macos(peer, run)
    if platform.startswith("linux"):
        return _find_linux(local, root)
    return None


def _find_macos(peer: str, run: Run) -> Link | None:
    family = "-inet6" if ":" in peer else "-inet"
    text = run(["/sbin/route", "-n", "get", family, peer])
    found = re.search(r"interface:\s*(\S+)", text)
    if not found:
        return None
    # The figures stand in the last line, below their names.
    names, _, figures = text.strip().rpartition("\n")
    columns = names.rpartition("\n")[2].split()
    values = dict(zip(columns, figures.split(), strict=False))
    mtu = values.get("mtu", "")
    return Link(found.group(1), _macos_kind(found.group(1), run), int(mtu) if mtu.isdigit() else None)


def _macos_kind(interface: str, run: Run) -> str:
    if interface.startswith("lo"):
        return "loopback"
    text = run(["/usr/sbin/networksetup", "-listallhardwareports"])
    ports = re.findall(r"Hardware Port:\s*(.+)\nDevice:\s*(\S+)", text)
    return next((name.strip() for name, device in ports if device == interface), "")


def _find_linux(local: str, root: Path) -> Link | None:
    interface = _linux_interface(ipaddress.ip_address(local.partition("%")[0]), root)
    if not interface:
        return None
    folder = root / "sys/class/net" / interface
    kind = "loopback" if interface == "lo" else "Wi-Fi" if (folder / "wireless").exists() else ""
    try:
        mtu: int | None = int((folder / "mtu").read_text("ascii"))
    except (OSError, ValueError):
        mtu = None
    return Link(interface, kind, mtu)


def _linux_interface(local: ipaddress.IPv4Address | ipaddress.IPv6Address, root: Path) -> str:
    if isinstance(local, ipaddress.IPv6Address) and local.ipv4_mapped:
        local = local.ipv4_mapped
    if local.is_loopback:
        return "lo"
    if isinstance(local, ipaddress.IPv6Address):
        return _linux_interface_v6(local, root)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()))
            except OSError:
                continue
            if answer[20:24] == local.packed:
                return name
    return ""


def _linux_interface_v6(local: ipaddress.IPv6Address, root: Path) -> str:
    try:
        lines = (root / "proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        return ""
    return next((line.split()[-1] for line in lines if line.startswith(local.packed.hex())), "")
