"""Why another machine cannot be reached, in words that say what to do.

macOS 15 and later answer "No route to host" to a program that may not use the local network, so the system's own words
send people looking for a network fault that is not there.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import sys

MACOS = "darwin"
LOCAL_NETWORK_REMEDY = (
    "allow the program that starts kvferry (your terminal, or Python) in System Settings → Privacy & Security → "
    "Local Network; if it is on already, turn it off and on again. Each way of starting is judged for itself: a daemon "
    "that launchd or an ssh session starts needs it as well, even when the same command works in Terminal"
)
# Numbers differ between systems, and the text may come from another one than ours.
_NO_ROUTE = re.compile(r"no route to host|host is unreachable|EHOSTUNREACH", re.IGNORECASE)
_NOT_PERMITTED = re.compile(r"operation not permitted|EPERM", re.IGNORECASE)
_TIMED_OUT = re.compile(r"timed out|timeout|ETIMEDOUT", re.IGNORECASE)
_DIALLED = re.compile(r"ipv[46]:\[?([0-9a-fA-F:.%]+?)\]?:\d+\b")
_LOCAL_SUFFIXES = (".local", ".lan", ".home", ".internal", ".home.arpa")


def explain(details: str, address: str, platform: str = sys.platform) -> str:
    """Say what probably keeps a peer out of reach.

    Args:
        details: the error's text, of a socket or of gRPC.
        address: host:port, or a host.
        platform: as ``sys.platform``.

    Returns:
        One sentence without a full stop, or "" when the error speaks for itself.
    """
    local = is_local_network(_dialled(details) or address)
    if _NO_ROUTE.search(details):
        if platform == MACOS and local:
            return f"macOS keeps programs off the local network until they are allowed: {LOCAL_NETWORK_REMEDY}"
        return "check that the address is right, that both machines are on the same network, and the other's firewall"
    if platform == MACOS and local and (_NOT_PERMITTED.search(details) or _TIMED_OUT.search(details)):
        return f"if the other machine is up, macOS may be keeping this program off the network: {LOCAL_NETWORK_REMEDY}"
    return ""


def explain_errno(number: int | None, address: str, platform: str = sys.platform) -> str:
    """Say the same of a socket error by its number; None stands for a timeout."""
    names = {errno.EHOSTUNREACH: "EHOSTUNREACH", errno.EPERM: "EPERM", errno.ETIMEDOUT: "ETIMEDOUT", None: "timed out"}
    return explain(names.get(number, ""), address, platform)


def is_local_network(address: str) -> bool:
    """Whether an address, with or without a port, belongs to a private network. Loopback does not."""
    host = _host(address)
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        name = host.casefold().rstrip(".")
        return name != "localhost" and ("." not in name or name.endswith(_LOCAL_SUFFIXES))
    return (parsed.is_private or parsed.is_link_local) and not (parsed.is_loopback or parsed.is_unspecified)


def _dialled(details: str) -> str:
    """Return the address that gRPC says it tried, which a name does not show."""
    found = _DIALLED.search(details)
    return found.group(1) if found else ""


def _host(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address
