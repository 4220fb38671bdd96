"""Which checks a machine, its daemons and its peers need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvferry.cli.checks import certificates, disk, memory, model, peers, ports, runtime, tokens
from kvferry.cli.checks.findings import Check, Finding
from kvferry.cli.checks.system import System
from kvferry.core import addresses, config, security
from kvferry.core.addresses import Address
from kvferry.core.config import NodeConfig, ReceiverConfig, SenderConfig
from kvferry.core.errors import ConfigError
from kvferry.core.tls import PeerSecurity

KINDS: dict[str, type[NodeConfig]] = {"sender": SenderConfig, "receiver": ReceiverConfig}
_PEER_SECONDS = 30.0


@dataclass(frozen=True)
class Daemon:
    """A daemon of this machine. ``config`` is None when its configuration is wrong; ``mistake`` then says why."""

    role: str
    config: NodeConfig | None
    mistake: str = ""


def load(role: str, path: Path | None) -> Daemon:
    """Read a daemon's configuration as the daemon itself would."""
    try:
        return Daemon(role, config.load(KINDS[role], path))
    except ConfigError as error:
        return Daemon(role, None, error.message)


def checks(
    system: System, daemons: Sequence[Daemon], dialled: Mapping[Address, PeerSecurity | None]
) -> Iterator[Check]:
    """Yield every check, in the order of the report.

    Args:
        system: the machine.
        daemons: of this machine.
        dialled: peers whose reachability matters, and how they are called; None is as a daemon of this machine would.
    """
    yield Check("python", lambda: [runtime.python(system)])
    yield Check("mlx", partial(_mlx, system), runtime.PROBE_SECONDS + 5)
    yield Check("compiler", lambda: _some(runtime.compiler(system)), 30.0)
    for daemon in daemons:
        yield Check(f"{daemon.role} configuration", partial(_configuration, daemon))
    known = {daemon.role: daemon.config for daemon in daemons if daemon.config is not None}
    # Two daemons mostly share a model, and it need not be looked at twice.
    for loaded in {(item.model, item.revision, item.adapter): item for item in known.values()}.values():
        yield Check("model", partial(_model, system, loaded))
    for role, loaded in known.items():
        yield Check("port", partial(_ports, role, loaded))
        yield Check("store", partial(_store, loaded))
        yield Check("certificate", partial(_credentials, loaded))
    for address, calling in dialled.items():
        yield Check("peer", partial(_peer, system, address, calling, list(known.values())), _PEER_SECONDS)


def _mlx(system: System) -> list[Finding]:
    probe = runtime.probe_mlx()
    return [runtime.mlx(system, probe), *_some(runtime.blas(system, probe))]


def _configuration(daemon: Daemon) -> list[Finding]:
    name = "configuration"
    if daemon.config is None:
        remedy = f"correct it; deploy/{daemon.role}.toml lists every key with its default"
        return [Finding(name, "problem", daemon.mistake, remedy)]
    exposed = not addresses.parse(daemon.config.listen, "listen").is_loopback
    if exposed and not (daemon.config.certificate and daemon.config.tokens):
        text = f"the {daemon.role} listens on {daemon.config.listen} unprotected: insecure = true"
        return [Finding(name, "warning", text, "use it only on a network that you trust, or see `kvferry certs`")]
    return [Finding(name, "ok", f"the {daemon.role}'s configuration is in order")]


def _model(system: System, loaded: NodeConfig) -> list[Finding]:
    from kvferry.engine import model_store

    path, located = model.locate(loaded, model_store.resolve)
    if path is None:
        return [located]
    whole = model.files(path)
    fitting = [model.fits(path, memory.read(system), system)] if whole.status == "ok" else []
    return [located, whole, *_some(model.adapter(loaded)), *fitting]


def _ports(role: str, loaded: NodeConfig) -> list[Finding]:
    found = [ports.listen(loaded.listen, role, _own_security(loaded))]
    if loaded.metrics:
        found.append(ports.page(loaded.metrics, role))
    return found


def _own_security(loaded: NodeConfig) -> PeerSecurity:
    """Return how a daemon with this configuration would be called from here."""
    if not loaded.certificate:
        return PeerSecurity()
    certificate, key = Path(loaded.certificate).expanduser(), Path(loaded.key).expanduser()
    mutual = loaded.client_certificates
    return PeerSecurity(
        authority=Path(loaded.authority).expanduser() if loaded.authority else certificate,
        certificate=certificate if mutual else None,
        key=key if mutual else None,
    )


def _store(loaded: NodeConfig) -> list[Finding]:
    path = config.store_path(loaded)
    return [disk.writable(path), disk.space(path), *_some(disk.ledger(loaded))]


def _credentials(loaded: NodeConfig) -> list[Finding]:
    shown = [*certificates.certificate(loaded), *certificates.authority(loaded)]
    return [*shown, *_some(tokens.accepted(loaded)), *_some(tokens.shown(loaded))]


def _peer(system: System, address: Address, calling: PeerSecurity | None, known: Sequence[NodeConfig]) -> list[Finding]:
    try:
        calling = calling or (security.for_peer(known[0], address, address) if known else PeerSecurity())
    except ConfigError as error:
        return [Finding("peer", "problem", error.message, "mend the files that the configuration names")]
    return peers.peer(address, calling, system)


def _some(finding: Finding | None) -> list[Finding]:
    return [] if finding is None else [finding]
