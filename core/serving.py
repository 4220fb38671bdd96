"""Running a gRPC server as a daemon: limits, health, reflection, one line when it listens, graceful stop on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.core import addresses, channel
from kvferry.core.config import NodeConfig
from kvferry.core.errors import ConfigError
from kvferry.core.logs import logger
from kvferry.core.metrics import NodeMetrics
from kvferry.core.metrics_server import MetricsServer
from kvferry.core.request_ids import RequestIdInterceptor
from kvferry.core.rpc_metrics import MetricsInterceptor


async def serve(
    config: NodeConfig,
    register: Callable[[grpc.aio.Server], Iterable[str]],
    *,
    metrics: NodeMetrics | None = None,
    announce_json: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then let calls in flight finish within the grace period.

    Args:
        config: address and grace period.
        register: adds the servicers to the server and returns their full service names.
        metrics: what the daemon counts, served where the configuration says; None counts nothing.
        announce_json: print the listening line as JSON.

    Raises:
        ConfigError: when an address cannot be bound.
    """
    log = logger("serving")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # A refused call has its id and is counted as well, so these two come before whatever may refuse it.
    interceptors = [RequestIdInterceptor(), *([MetricsInterceptor(metrics)] if metrics else [])]
    server = grpc.aio.server(interceptors=interceptors, options=channel.server_options())
    names = [*register(server), health.SERVICE_NAME, reflection.SERVICE_NAME]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    address = _bind(server, addresses.parse(config.listen, "listen"))
    page = _metrics_page(config, metrics)
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    role = type(config).__name__.removesuffix("Config").lower()
    _announce(role, address, page.address if page else None, as_json=announce_json)
    try:
        await stop.wait()
        log.info("stopping", grace_seconds=config.grace_seconds)
        await health_servicer.enter_graceful_shutdown()
    finally:
        await server.stop(config.grace_seconds)
        if page is not None:
            await asyncio.to_thread(page.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)


def _bind(server: grpc.aio.Server, wanted: addresses.Address) -> addresses.Address:
    try:
        port = server.add_insecure_port(str(wanted))
    except RuntimeError as error:
        raise ConfigError(f"listen: {wanted} cannot be bound; is another daemon there?", field="listen") from error
    if port == 0:
        raise ConfigError(f"listen: {wanted} cannot be bound; is another daemon there?", field="listen")
    return addresses.Address(wanted.host, port)


def _metrics_page(config: NodeConfig, metrics: NodeMetrics | None) -> MetricsServer | None:
    if not config.metrics or metrics is None:
        return None
    return MetricsServer(metrics.registry, addresses.parse(config.metrics, "metrics"))


def _announce(role: str, address: addresses.Address, page: addresses.Address | None, *, as_json: bool) -> None:
    record = {"event": "listening", "role": role, "address": str(address)}
    text = f"kvferry {role}: listening on {address}"
    if page is not None:
        record["metrics"] = str(page)
        text += f", metrics at http://{page}/metrics"
    sys.stdout.write((json.dumps(record) if as_json else text) + "\n")
    sys.stdout.flush()
