"""A small HTTP server for one page, /metrics, on threads of its own: a slow reader holds nothing else up."""

from __future__ import annotations

import http.server
import socket
import threading
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvferry.core import addresses, ports

PATH = "/metrics"
_IDLE_SECONDS = 10.0


class MetricsServer:
    """Serves a registry until it is closed."""

    def __init__(self, registry: CollectorRegistry, wanted: addresses.Address) -> None:
        """Bind and begin to serve.

        Args:
            registry: what to serve.
            wanted: where; port 0 takes a free one.

        Raises:
            ConfigError: when the address cannot be bound.
        """
        self._server = _bind(registry, wanted)
        self.address = addresses.Address(wanted.host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Requests in flight are dropped."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: a scraper that hangs up is no news."""

    def server_bind(self) -> None:
        """Bind without looking the host's name up, which http.server does and which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


def _bind(registry: CollectorRegistry, wanted: addresses.Address) -> _Server:
    try:
        family, _, _, _, where = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server_class = type("_MetricsServer", (_Server,), {"address_family": family})
        server: _Server = server_class(where, _handler(registry))
    except (OSError, UnicodeError) as error:
        raise ports.cannot_be_bound("metrics", wanted, error) from error
    return server


def _handler(registry: CollectorRegistry) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _IDLE_SECONDS
        server_version = "kvferry"
        sys_version = ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self.send_error(HTTPStatus.NOT_FOUND, explain=f"Metrics are at {PATH}")
                return
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            body = encode(registry)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (http.server's name)
            """Leave scrapes out of the log."""

    return Handler
