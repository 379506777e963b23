"""A small HTTP server that serves one ConfigMap as an API server does, and fails on request."""

from __future__ import annotations

import itertools
import json
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kdist_trainer.rendezvous.configmap_client import ApiEndpoint, ConfigMap
from kdist_trainer.rendezvous.exchange import KEY_FILE
from tests.trainer.rendezvous.keys import KEY_TEXT

TOKEN = "token-1"  # noqa: S105 - of nobody
LOST_ANSWER, CUT = -1, -2
"""Instead of a status: the request is served but the answer is lost; the connection is cut before
the request is served.
"""


class ApiServer:
    """Serves `/api/v1/namespaces/ml/configmaps/store` on a free port, to many clients at once.

    `faults` are statuses, or `LOST_ANSWER` or `CUT`, one for each of the next requests; None serves
    it. With `tls`, agents that are processes reach it through `environment`.
    """

    def __init__(self, account: Path, *, tls: bool = False) -> None:
        account.mkdir(exist_ok=True)
        self.account = account
        self._context = _certify(account) if tls else None
        self.tokens = {TOKEN}
        self.faults: Iterator[int | None] = iter(())
        self.retry_after: str | None = None
        self.requests: list[tuple[str, int]] = []
        self.document: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": "store",
                "namespace": "ml",
                "resourceVersion": "1",
                "labels": {"kdist.dev/job": "digits"},
            },
        }
        self._lock = threading.Lock()
        self._versions = itertools.count(2)
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        (account / "token").write_text(TOKEN)
        (account / KEY_FILE).write_text(KEY_TEXT)
        self.start()

    def start(self) -> None:
        """Listen, after a stop on the same port."""
        self._server = _Http(("127.0.0.1", self.port), _handler(self))
        if self._context is not None:
            self._server.socket = self._context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @contextmanager
    def failing(self, *faults: int | None, for_ever: bool = False) -> Iterator[None]:
        """Answer the next requests with these faults: each once, or `for_ever` in a cycle."""
        self.faults = itertools.cycle(faults) if for_ever else iter(faults)
        try:
            yield
        finally:
            self.faults = iter(())

    def environment(self, port: int | None = None) -> dict[str, str]:
        """A pod's variables for this server; `port` is that of a proxy, if there is one."""
        address = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(port or self.port),
        }
        return {**address, "KDIST_ACCOUNT": str(self.account)}

    def config_map(self, *, retry_seconds: float = 10.0, name: str = "store") -> ConfigMap:
        """A new client."""
        server = ApiEndpoint("127.0.0.1", self.port, scheme="http", account=self.account)
        return ConfigMap(server, "ml", name, retry_seconds=lambda: retry_seconds)

    def serve(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """The status and the document that answer one request."""
        if token not in {f"Bearer {one}" for one in self.tokens}:
            return 401, _status(401)
        if path.partition("?")[0] != "/api/v1/namespaces/ml/configmaps/store":
            return 404, _status(404)
        with self._lock:
            if method == "PUT":
                document = json.loads(body)
                if (
                    document["metadata"].get("resourceVersion")
                    != self.document["metadata"]["resourceVersion"]
                ):
                    return 409, _status(409)
                document["metadata"]["resourceVersion"] = str(next(self._versions))
                self.document = document
            return 200, self.document

    def next_fault(self) -> int | None:
        with self._lock:
            return next(self.faults, None)


def _certify(account: Path) -> ssl.SSLContext:
    """The TLS context of a server with a self-signed certificate, which is the CA of `account`."""
    key, certificate = account.with_name("server.key"), account / "ca.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self.connections):
            _reset(connection)


def _reset(connection: socket.socket) -> None:
    """Reset a connection, so that the other side notices at once."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _status(code: int) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Status", "code": code, "message": f"no: {code}"}


def _handler(api: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = api.next_fault()
            if fault == CUT:
                return self._cut()
            if fault is None or fault == LOST_ANSWER:
                status, document = api.serve(
                    self.command, self.path, self.headers.get("Authorization", ""), body
                )
            else:
                status, document = fault, _status(fault)
            api.requests.append((self.command, status))
            if fault == LOST_ANSWER:
                return self._cut()
            text = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if api.retry_after is not None and status == 429:
                self.send_header("Retry-After", api.retry_after)
            self.end_headers()
            self.wfile.write(text)
            return None

        def _cut(self) -> None:
            _reset(self.connection)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler
