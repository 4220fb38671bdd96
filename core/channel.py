"""gRPC options that both ends agree on, and channels to a peer."""

from __future__ import annotations

import grpc

from kvferry.core import addresses, bearer, limits, tls
from kvferry.core.errors import ConfigError
from kvferry.core.tls import PeerSecurity

KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
_MIN_PING_INTERVAL_MS = 10_000
HANDSHAKE_MS = 10_000
CONNECTION_AGE_MS = 120_000
MAX_CONNECTIONS = 2_000
_FIRST_RECONNECT_MS = 200
_LONGEST_RECONNECT_MS = 2_000
_MAX_STREAMS = 128
_PLAINTEXT = PeerSecurity()

Options = list[tuple[str, int]]


def channel_options() -> Options:
    """Options of every channel: explicit limits, keepalive, quick reconnection, and no proxy between peers."""
    return [
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        *_keepalive(),
        ("grpc.enable_http_proxy", 0),
        # A peer that is started again is found soon; by default a channel waits up to two minutes between two looks.
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _LONGEST_RECONNECT_MS),
        # And no new channel inherits the wait of an older one to the same peer.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _keepalive() -> Options:
    """The same at both ends: a peer that does not answer a ping within the time limit is gone."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # What really ends the wait for the answer; a minute by default, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_connections: int = MAX_CONNECTIONS) -> Options:
    """Options of every server. Pings may come as often as our channels send them, also while it computes.

    Args:
        max_connections: a connection above this number is closed at once.
    """
    return [
        ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        # A caller that is frozen, or whose machine is gone, says nothing: it must not keep its place for ever.
        *_keepalive(),
        # Two daemons must never share a port by accident.
        ("grpc.so_reuseport", 0),
        # By default a stranger who says nothing is waited for two minutes, in either stage of a connection's start.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_MS),
        # No connection is kept for ever: calls that run are finished, and our channels connect again by themselves. To
        # close idle ones only would do, but then gRPC writes a line to the caller's standard error about each.
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        # Connections take files, and the store must always be able to open one.
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        # How far a caller may be ahead of a busy handler. gRPC estimates it otherwise, at times at tens of MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", limits.MAX_MESSAGE_BYTES),
    ]


def open_async(address: addresses.Address, security: PeerSecurity = _PLAINTEXT) -> grpc.aio.Channel:
    """Return a channel for asyncio. It connects on first use.

    Raises:
        ConfigError: when a file of ``security`` cannot be used, or the token would cross a network in the clear.
    """
    check_token(address, security)
    credentials = tls.channel_credentials(security)
    opened = (
        grpc.aio.secure_channel(_target(address), credentials, options=channel_options())
        if credentials
        else grpc.aio.insecure_channel(_target(address), options=channel_options())
    )
    return bearer.AsyncChannel(opened, security.token) if security.token else opened


def open_blocking(address: addresses.Address, security: PeerSecurity = _PLAINTEXT) -> grpc.Channel:
    """Return a channel for threads. It connects on first use.

    Raises:
        ConfigError: when a file of ``security`` cannot be used, or the token would cross a network in the clear.
    """
    check_token(address, security)
    credentials = tls.channel_credentials(security)
    opened = (
        grpc.secure_channel(_target(address), credentials, options=channel_options())
        if credentials
        else grpc.insecure_channel(_target(address), options=channel_options())
    )
    return bearer.BlockingChannel(opened, security.token) if security.token else opened


def check_token(address: addresses.Address, security: PeerSecurity) -> None:
    """Check that a token stays off networks where others can read it.

    Raises:
        ConfigError: when it would not.
    """
    if security.token and security.authority is None and not address.is_loopback and not security.insecure:
        raise ConfigError(
            f"token: would cross the network to {address} unencrypted; give the authority that signed its certificate, "
            "or say insecure if that is what you want",
            field="authority",
            peer=str(address),
        )


def _target(address: addresses.Address) -> str:
    # With the scheme spelt out, gRPC never reads a host as a scheme of its own.
    return f"dns:///{address}"
