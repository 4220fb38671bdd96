"""Running a gRPC server as a daemon: limits, health, reflection, one line when it listens, graceful stop on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.core import addresses, channel, ports, security
from kvferry.core.config import NodeConfig
from kvferry.core.errors import ConfigError
from kvferry.core.logs import logger
from kvferry.core.metrics import NodeMetrics
from kvferry.core.metrics_server import MetricsServer
from kvferry.core.request_ids import RequestIdInterceptor
from kvferry.core.rpc_metrics import MetricsInterceptor
from kvferry.core.security import ServerSecurity

_WANTED_FILES = 2 * channel.MAX_CONNECTIONS
# Room beside the calls that run: for health checks, and for calls that are being refused.
_SPARE_CALLS = 512


class Companion(Protocol):
    """Another door of the daemon, open when the server is given it."""

    @property
    def address(self) -> addresses.Address:
        """Where it is."""

    def close(self, grace_seconds: float) -> None:
        """Take nobody in any more, and end what still runs after the grace period. Blocking."""


async def serve(
    config: NodeConfig,
    register: Callable[[grpc.aio.Server], Iterable[str]],
    *,
    protection: ServerSecurity | None = None,
    metrics: NodeMetrics | None = None,
    tcp: Companion | None = None,
    announce_json: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then let calls in flight finish within the grace period.

    Args:
        config: address and grace period.
        register: adds the servicers to the server and returns their full service names.
        protection: what it shows and whom it lets in, where that was read already.
        metrics: what the daemon counts, served where the configuration says; None counts nothing.
        tcp: the daemon's plain TCP worker; it is announced, and closed with the server.
        announce_json: print the listening line as JSON.

    Raises:
        ConfigError: when an address cannot be bound, or a file that protects the server cannot be used.
    """
    log = logger("serving")
    protection = protection or security.for_server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # A refused call has its id and is counted as well, so these two come before whatever may refuse it.
    interceptors = [RequestIdInterceptor(), *([MetricsInterceptor(metrics)] if metrics else []), protection.gate]
    server = grpc.aio.server(
        interceptors=interceptors,
        options=channel.server_options(_raise_file_limit() // 2),
        maximum_concurrent_rpcs=config.max_calls + _SPARE_CALLS,
    )
    names = [*register(server), health.SERVICE_NAME, reflection.SERVICE_NAME]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    address = _bind(server, addresses.parse(config.listen, "listen"), protection.credentials)
    page = _metrics_page(config, metrics)
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    role = type(config).__name__.removesuffix("Config").lower()
    _announce(role, address, page.address if page else None, tcp.address if tcp else None, as_json=announce_json)
    try:
        await stop.wait()
        log.info("stopping", grace_seconds=config.grace_seconds)
        await health_servicer.enter_graceful_shutdown()
    finally:
        closing = [asyncio.to_thread(tcp.close, config.grace_seconds)] if tcp is not None else []
        await asyncio.gather(server.stop(config.grace_seconds), *closing)
        if page is not None:
            await asyncio.to_thread(page.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)


def _raise_file_limit() -> int:
    """Let this process open as many files as it may need, and return how many it may: macOS allows 256 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    wanted = _WANTED_FILES if unlimited else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _bind(
    server: grpc.aio.Server, wanted: addresses.Address, credentials: grpc.ServerCredentials | None
) -> addresses.Address:
    # gRPC prints a failure itself and does not say why, so it gets only what can be bound.
    problem = ports.trouble(wanted)
    if problem is not None:
        raise ports.cannot_be_bound("listen", wanted, problem)
    try:
        port = (
            server.add_secure_port(str(wanted), credentials) if credentials else server.add_insecure_port(str(wanted))
        )
    except RuntimeError as error:
        raise ConfigError(f"listen: {wanted} cannot be bound: {error}", field="listen", value=str(wanted)) from error
    if port == 0:
        raise ConfigError(f"listen: {wanted} cannot be bound", field="listen", value=str(wanted))
    return addresses.Address(wanted.host, port)


def _metrics_page(config: NodeConfig, metrics: NodeMetrics | None) -> MetricsServer | None:
    if not config.metrics or metrics is None:
        return None
    return MetricsServer(metrics.registry, addresses.parse(config.metrics, "metrics"))


def _announce(
    role: str,
    address: addresses.Address,
    page: addresses.Address | None,
    tcp: addresses.Address | None = None,
    *,
    as_json: bool,
) -> None:
    record = {"event": "listening", "role": role, "address": str(address)}
    text = f"kvferry {role}: listening on {address}"
    if tcp is not None:
        record["tcp"] = str(tcp)
        text += f", {addresses.TCP_SCHEME}{tcp}"
    if page is not None:
        record["metrics"] = str(page)
        text += f", metrics at http://{page}/metrics"
    sys.stdout.write((json.dumps(record) if as_json else text) + "\n")
    sys.stdout.flush()
