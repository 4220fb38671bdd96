"""The way to another daemon: name, connection, link, health, clock."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvferry.cli.checks import daemons
from kvferry.cli.checks.daemons import Answer
from kvferry.cli.checks.findings import Finding
from kvferry.cli.checks.system import System
from kvferry.core import links, reachability
from kvferry.core.addresses import Address
from kvferry.core.errors import ConfigError
from kvferry.core.tls import PeerSecurity

CONNECT_SECONDS = 3.0
SKEW_SECONDS = 2.0
LARGE_SKEW_SECONDS = 300.0
_CLOCK_REMEDY = (
    "let both machines set their clocks by themselves (macOS: System Settings → General → Date & Time; Linux: "
    "timedatectl set-ntp true)"
)
_OTHER_END = "start the daemon there, and compare its `listen` with this address: 127.0.0.1 takes no calls from here"

Connect = Callable[[Address, float], socket.socket]


@dataclass(frozen=True)
class Road:
    """A connection that stood: the address here, the one at the other end, and how long it took to open."""

    local: str
    remote: str
    seconds: float


def dial(address: Address, seconds: float) -> socket.socket:
    """Open a connection; each address of a name gets ``seconds``."""
    return socket.create_connection((address.host, address.port), timeout=seconds)


def peer(address: Address, security: PeerSecurity, system: System, connect: Connect = dial) -> list[Finding]:
    """Check everything between here and a daemon, up to the first thing that fails."""
    resolved = resolve(address, system)
    if resolved.status == "problem":
        return [resolved]
    road, connection = reach(address, system, connect)
    if road is None:
        return [resolved, connection]
    try:
        answer = daemons.ask(address, security)
    except ConfigError as error:
        refused = Finding("peer", "problem", error.message, "mend the files that the configuration names")
        return [resolved, connection, link(road, system), refused]
    return [resolved, connection, link(road, system), health(address, answer), *clock(address, answer)]


def resolve(address: Address, system: System) -> Finding:
    """Check that the host's name means something here."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = f"{address.host} does not resolve: {getattr(error, 'strerror', None) or error}"
        remedy = "check the spelling, or give the other machine's IP address"
        if address.host.endswith(".local"):
            remedy += "; names in .local need both machines on the same network"
            remedy += "" if system.is_macos else ", and avahi with nss-mdns here"
        return Finding("peer name", "problem", text, remedy)
    numbers = sorted({str(item[4][0]) for item in found})
    return Finding("peer name", "ok", f"{address.host} is {', '.join(numbers)}")


def reach(address: Address, system: System, connect: Connect = dial) -> tuple[Road | None, Finding]:
    """Open a connection and close it again."""
    start = time.perf_counter()
    try:
        with connect(address, CONNECT_SECONDS) as connection:
            seconds = time.perf_counter() - start
            road = Road(str(connection.getsockname()[0]), str(connection.getpeername()[0]), seconds)
    except OSError as error:
        return None, _unreached(address, error, system)
    return road, Finding("peer", "ok", f"{address} takes connections, from {road.local}, in {seconds * 1000:.1f} ms")


def link(road: Road, system: System) -> Finding:
    """Say which interface leads there: it may be another than the cable that was meant."""
    found = links.find(road.local, road.remote, system.platform, system.run, system.root)
    if found is None:
        return Finding(
            "link", "ok", f"{road.remote} is reached from {road.local}; the system does not name the interface"
        )
    text = f"{road.remote} is reached by {found}, from {road.local}"
    if found.is_tunnel and reachability.is_local_network(road.remote):
        remedy = "if that is not meant, leave the VPN, or give the address that the other machine has on the cable"
        return Finding("link", "warning", f"{text}: a VPN's interface", remedy)
    return Finding("link", "ok", text)


def health(address: Address, answer: Answer) -> Finding:
    """Judge what came back from the peer."""
    if answer.error is not None:
        text = answer.error.message
        if str(address) not in text:
            text = f"{address}: {text}"
        remedy = (
            "see that the port is a kvferry daemon's (7411 sender, 7412 receiver), and that both ends use TLS or none"
        )
        return Finding("health", "problem", text, remedy)
    trip = f"{answer.round_trip * 1000:.1f} ms a call"
    if not answer.serving:
        return Finding("health", "problem", f"{address} is stopping", "wait for it to end, and start it again")
    if answer.node is None and not answer.withheld:
        text = f"{address} is healthy, but no kvferry daemon"
        return Finding("health", "problem", text, "give the port of a kvferry daemon: 7411 sender, 7412 receiver")
    if answer.node is None:
        text = f"{address} is a healthy kvferry daemon, {trip}; it does not describe itself: {answer.withheld}"
        return Finding("health", "warning", text, "give the configuration that holds its token: --config")
    node = answer.node
    text = f"{address} is a healthy {node.role} {node.kvferry_version} with {node.model} on the {node.device}, {trip}"
    own = _own_version()
    if own and own != node.kvferry_version:
        text += f"; this is kvferry {own}"
        return Finding("health", "warning", text, "install the same version of kvferry on both machines")
    return Finding("health", "ok", text)


def clock(address: Address, answer: Answer) -> list[Finding]:
    """Compare the clocks, as far as the peer tells the time."""
    if answer.node is None:
        return []
    if answer.skew is None:
        text = f"{address} is too old to tell the time: clocks were not compared"
        return [Finding("clock", "warning", text, "install the same version of kvferry on both machines")]
    ahead = abs(answer.skew) - answer.skew_bound
    way = "ahead of" if answer.skew > 0 else "behind"
    text = f"the clock of {address} is {abs(answer.skew):.1f} s {way} this one (±{answer.skew_bound:.1f} s)"
    if ahead > LARGE_SKEW_SECONDS:
        return [Finding("clock", "problem", f"{text}: certificates may seem expired or not yet valid", _CLOCK_REMEDY)]
    if ahead > SKEW_SECONDS:
        return [Finding("clock", "warning", f"{text}: the logs of both do not line up", _CLOCK_REMEDY)]
    return [Finding("clock", "ok", text)]


def _unreached(address: Address, error: OSError, system: System) -> Finding:
    timed_out = isinstance(error, TimeoutError)
    number = None if timed_out and error.errno is None else error.errno
    advice = reachability.explain_errno(number, str(address), system.platform)
    text = f"{address}: {error.strerror or f'no answer within {CONNECT_SECONDS:g} s'}"
    if advice:
        return Finding("peer", "problem", text, advice)
    if number == errno.ECONNREFUSED:
        return Finding("peer", "problem", f"{text}: the machine is there, the daemon is not", _OTHER_END)
    if timed_out:
        remedy = "see that the other machine is on and awake, and that its firewall lets this port in"
        return Finding("peer", "problem", text, remedy)
    return Finding("peer", "problem", text, "check the address, and that both machines are on the same network")


def _own_version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:
        return ""
