"""gRPC options that both ends agree on, and channels to a peer."""

from __future__ import annotations

import grpc

from kvferry.core import addresses, limits

KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
_MIN_PING_INTERVAL_MS = 10_000

Options = list[tuple[str, int]]


def channel_options() -> Options:
    """Options of every channel: explicit limits, keepalive, and no proxy between peers."""
    return [
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> Options:
    """Options of every server. Pings may come as often as our channels send them, also while it computes."""
    return [
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        # Two daemons must never share a port by accident.
        ("grpc.so_reuseport", 0),
    ]


def open_async(address: addresses.Address) -> grpc.aio.Channel:
    """Return a channel for asyncio. It connects on first use."""
    return grpc.aio.insecure_channel(str(address), options=channel_options())


def open_blocking(address: addresses.Address) -> grpc.Channel:
    """Return a channel for threads. It connects on first use."""
    return grpc.insecure_channel(str(address), options=channel_options())
