"""Serves `/metrics` for Prometheus, and `/healthz` and `/readyz` for the kubelet."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kdist.threads import OnError, start_thread

_SECONDS = 10.0  # for a request to arrive whole


class Endpoint:
    """The HTTP server of one controller.

    Args:
        port: 0 for a free one.
        registry: the metrics.
        healthy: whether its threads still work.
        ready: whether it has what it needs.

    Attributes:
        port: the port that it listens on.
    """

    def __init__(
        self,
        port: int,
        registry: CollectorRegistry,
        *,
        healthy: Callable[[], bool],
        ready: Callable[[], bool],
    ) -> None:
        routes: dict[str, Callable[[], tuple[bool, bytes]]] = {
            "/metrics": lambda: (True, generate_latest(registry)),
            "/healthz": lambda: _say(healthy()),
            "/readyz": lambda: _say(ready()),
        }

        class Handler(_Handler):
            pages = routes

        self._server = ThreadingHTTPServer(("", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port

    def start(self) -> None:
        """Serve on a thread that ends with the process."""
        start_thread(self._server.serve_forever, name="http", on_error=OnError.RESTART)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _say(good: bool) -> tuple[bool, bytes]:
    return good, b"ok\n" if good else b"not yet\n"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the pages."""

    pages: dict[str, Callable[[], tuple[bool, bytes]]]
    timeout = _SECONDS

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        good, body = page()
        self.send_response(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Requests of probes and scrapes are no news."""
