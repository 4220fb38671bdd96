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


async def serve(
    config: NodeConfig, register: Callable[[grpc.aio.Server], Iterable[str]], *, announce_json: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT, then let calls in flight finish within the grace period.

    Args:
        config: address and grace period.
        register: adds the servicers to the server and returns their full service names.
        announce_json: print the listening line as JSON.

    Raises:
        ConfigError: when the address cannot be bound.
    """
    log = logger("serving")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = grpc.aio.server(options=channel.server_options())
    names = [*register(server), health.SERVICE_NAME, reflection.SERVICE_NAME]
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(names, server)
    address = _bind(server, addresses.parse(config.listen, "listen"))
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    _announce(type(config).__name__.removesuffix("Config").lower(), address, as_json=announce_json)
    try:
        await stop.wait()
        log.info("stopping", grace_seconds=config.grace_seconds)
        await health_servicer.enter_graceful_shutdown()
    finally:
        await server.stop(config.grace_seconds)
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


def _announce(role: str, address: addresses.Address, *, as_json: bool) -> None:
    line = json.dumps({"event": "listening", "role": role, "address": str(address)})
    sys.stdout.write((line if as_json else f"kvferry {role}: listening on {address}") + "\n")
    sys.stdout.flush()
