"""A bare HTTP server in the place of an API server, without a cluster behind it: it answers what a
test says, and remembers what it was asked. The fake cluster, with objects that can be applied,
changed and deleted, is `objects`.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml
from websocket import ABNF

_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


@dataclass(frozen=True)
class Asked:
    """One request that came. `shown` is the common name of the client's certificate, `command` what
    to run in a container.
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    headers: Mapping[str, str]
    shown: str = ""
    command: Sequence[str] = ()


@dataclass
class Reply:
    """What to answer: a document, or `lines` that are sent one by one; with `cut` the connection
    ends before its answer does. `channels` come over a websocket, as what a command in a container
    prints does; a function makes them of what comes to its standard input.
    """

    status: int = 200
    document: Any = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    lines: Iterable[str] | None = None
    cut: bool = False
    channels: Mapping[int, bytes] | Callable[[bytes], Mapping[int, bytes]] | None = None


Answer = Callable[[Asked], Reply]


def refusal(status: int, message: str, reason: str = "", **details: Any) -> Reply:
    """A `Status` as the API server sends it."""
    document = {
        "kind": "Status",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": status,
    }
    return Reply(status, {**document, **({"details": details} if details else {})})


class Handler(BaseHTTPRequestHandler):
    """Hands each request to the server's `api`, and sends what that answers."""

    protocol_version = "HTTP/1.1"

    disable_nagle_algorithm = True  # or the body waits 40 ms for the acknowledgement of the headers

    def setup(self) -> None:
        """Remember the connection, so that the server can cut it."""
        super().setup()
        self.server.api.connections.append(self.connection)  # type: ignore[attr-defined]  # `Api` puts itself there

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        headers = {name: ", ".join(self.headers.get_all(name) or ()) for name in self.headers}
        asked = Asked(
            self.command,
            unquote(parts.path),
            dict(parse_qsl(parts.query)),
            body,
            headers,
            self._shown(),
            [value for name, value in parse_qsl(parts.query, True) if name == "command"],
        )
        api: Api = self.server.api  # type: ignore[attr-defined]  # `Api` puts itself there
        api.asked.append(asked)
        with suppress(ConnectionError):  # who watched has gone
            self._send(api.answer(asked))

    def _shown(self) -> str:
        if not isinstance(self.connection, ssl.SSLSocket):
            return ""
        subject: Any = (self.connection.getpeercert() or {}).get("subject", ())
        return next((value for part in subject for name, value in part if name == "commonName"), "")

    do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - the names that http.server calls

    def _send(self, reply: Reply) -> None:
        if reply.channels is not None:
            self._send_channels(reply.channels)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.lines is None:
            body = json.dumps(reply.document).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in reply.lines:
            piece = f"{line}\n".encode()
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if reply.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _send_channels(
        self, channels: Mapping[int, bytes] | Callable[[bytes], Mapping[int, bytes]]
    ) -> None:
        """Open the websocket, send messages of at most 32 KiB, as an API server does, and close
        it.
        """
        key = self.headers["sec-websocket-key"].encode() + _WEBSOCKET
        accepted = b64encode(sha1(key, usedforsecurity=False).digest())
        self.send_response(101)
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", "websocket")
        self.send_header("Sec-WebSocket-Accept", accepted.decode())
        protocol = self.headers["sec-websocket-protocol"].partition(",")[0]
        self.send_header("Sec-WebSocket-Protocol", protocol)
        self.end_headers()
        if callable(channels):
            fed = "stdin=true" in self.path
            channels = channels(b"".join(self._read_input()) if fed else b"")
        for channel, text in channels.items():
            for begin in range(0, len(text), 1 << 15):
                data = bytes([channel]) + text[begin : begin + (1 << 15)]
                self.wfile.write(ABNF.create_frame(data, ABNF.OPCODE_BINARY).format())
        self.wfile.write(ABNF.create_frame(b"", ABNF.OPCODE_CLOSE).format())
        self.close_connection = True

    def _read_input(self) -> Iterator[bytes]:
        """The client's messages to channel 0, up to the one that ends it."""
        while True:
            if len(head := self.rfile.read(2)) < 2:
                raise ConnectionError("it was cut off")
            size = head[1] & 0x7F
            if size > 125:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8))
            mask = self.rfile.read(4)
            masked = self.rfile.read(size)
            key = int.from_bytes((mask * (size // 4 + 1))[:size])
            data = (int.from_bytes(masked) ^ key).to_bytes(size)
            if head[0] & 0x0F == ABNF.OPCODE_CLOSE:
                self.wfile.write(ABNF.create_frame(b"", ABNF.OPCODE_CLOSE).format())
                raise ConnectionError("it was closed")
            if data == b"\xff\x00":
                return
            assert data[0] == 0, data
            yield data[1:]

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what goes wrong in a test, except that a client left: it prints to the stderr that
        the test reads.
        """
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Api:
    """A server on a free port of this machine; `answer` may be exchanged while it runs.

    With `clients`, a file of certificates, it asks its clients for one of these.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        port: int = 0,
        certificate: Path | None = None,
        clients: Path | None = None,
    ) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.connections: list[socket.socket] = []
        self._server = _Server(("127.0.0.1", port), Handler)
        self._server.api = self  # type: ignore[attr-defined]  # for the handler
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            if clients is not None:
                context.load_verify_locations(clients)
                context.verify_mode = ssl.CERT_OPTIONAL
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop, cut the connections that there are, and refuse others from now on."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with suppress(OSError):  # most are closed already
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def write_kubeconfig(
    file: Path,
    url: str,
    *,
    user: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | None = None,
) -> None:
    """A kubeconfig with one context, `test`, whose namespace is `ml`."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": url, **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
    }
    file.write_text(yaml.safe_dump(document))
