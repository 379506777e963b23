"""A server of files over a real socket, which fails on request, and can be a hub of models."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODIFIED = "Fri, 01 Jan 2027 00:00:00 GMT"
DELAY_SECONDS = 0.02
HANG_SECONDS = 2.0
UNGATED_BYTES = 100_000
FAULTS = (
    "503",
    "429",
    "close",  # no reply
    "truncated",  # half of the body
    "slow",  # the body in pieces
    "no-range",  # the whole file instead of a range
    "no-head",  # HEAD is refused
)
# Also known: "hang", no reply within seconds.


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Reply:
    """What it gets."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    reason: str | None = None


Faults = Callable[[Asked], str]
"""Draws one of `FAULTS`, or "" for none."""


def in_turn(*faults: str, method: str = "GET") -> Faults:
    """These faults one after the other, of requests with this method, then none."""
    left, lock = list(faults), threading.Lock()

    def draw(asked: Asked) -> str:
        with lock:
            return left.pop(0) if left and asked.method == method else ""

    return draw


def drawn(seed: int, share: float) -> Faults:
    """A random fault of this share of the requests."""
    generator, lock = random.Random(seed), threading.Lock()

    def draw(_asked: Asked) -> str:
        with lock:
            return generator.choice(FAULTS) if generator.random() < share else ""

    return draw


class WebServer:
    """Serves `files`, by their paths; `with` it listens on a free port.

    Attributes:
        files: The content by path, such as `/folder/name`.
        faults: Draws what goes wrong with each request.
        routes: Answers requests for other paths; None for one that it does not know.
        authorization: What the header must be; empty for anything.
        redirects: The URLs that paths redirect to.
        requests: What came, in order.
        sent: The bytes of bodies that were sent, by path.
        has_etag, has_modified, has_ranges, has_length: What the server can.
        is_chunked: Whether whole bodies come in chunks, without a length.
        gate: While it is closed, the second half of every large body waits for it.
    """

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files = files or {}
        self.faults: Faults = lambda _asked: ""
        self.routes: Callable[[Asked], Reply | None] = lambda _asked: None
        self.authorization = ""
        self.redirects: dict[str, str] = {}
        self.requests: list[Asked] = []
        self.sent: dict[str, int] = {}
        self.has_etag = self.has_modified = self.has_ranges = self.has_length = True
        self.is_chunked = False
        self.gate = threading.Event()
        self.gate.set()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.web = self
        self._scheme = "http"

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"{self._scheme}://127.0.0.1:{self._http.server_port}"

    def encrypt(self, folder: Path) -> Path:
        """Serve https with a certificate of its own, before the first request; returns the file
        that vouches for it.
        """
        key, certificate = folder / "server.key", folder / "ca.crt"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        command += ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self._scheme = "https"
        return certificate

    def paths(self, method: str = "GET") -> list[str]:
        """The paths that were asked for by this method."""
        return [one.path for one in self.requests if one.method == method]

    def answer(self, asked: Asked, fault: str) -> Reply:
        """Do what is asked."""
        if self.authorization and asked.headers.get("authorization", "") != self.authorization:
            given = "authorization" in asked.headers
            return Reply(403 if given else 401)
        if target := self.redirects.get(asked.path):
            return Reply(302, headers={"Location": target})
        if fault == "no-head" and asked.method == "HEAD":
            return Reply(405)
        if (found := self.routes(asked)) is not None:
            return found
        data = self.files.get(asked.path)
        if data is None:
            return Reply(404)
        return self._read(asked, data, has_ranges=self.has_ranges and fault != "no-range")

    def _read(self, asked: Asked, data: bytes, *, has_ranges: bool) -> Reply:
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = {"ETag": etag} if self.has_etag else {}
        if self.has_modified:
            headers["Last-Modified"] = MODIFIED
        match = re.fullmatch(r"bytes=(\d+)-", asked.headers.get("range", ""))
        condition = asked.headers.get("if-range", "")
        if match is None or not has_ranges or (condition and condition not in headers.values()):
            return Reply(200, data, headers)
        start = int(match[1])
        if start >= len(data):
            return Reply(416)
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return Reply(206, data[start:], headers)

    def __enter__(self) -> WebServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    web: WebServer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Not to standard error."""

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, unquote(urlsplit(self.path).path), headers)
        web = self.server.web
        web.requests.append(asked)
        fault = web.faults(asked)
        if fault == "hang":
            time.sleep(HANG_SECONDS)
        if fault in {"close", "hang"}:
            self._end()
            return
        if fault in {"503", "429"}:
            self._send(asked, Reply(int(fault)), fault)
        else:
            self._send(asked, web.answer(asked, fault), fault)

    def _send(self, asked: Asked, reply: Reply, fault: str) -> None:
        web = self.server.web
        self.send_response(reply.status, reply.reason)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        is_chunked = web.is_chunked and reply.status == 200
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif web.has_length or reply.status != 200:
            self.send_header("Content-Length", str(len(reply.body)))
        else:
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(reply.body) // 2
        pieces = [reply.body[:half], reply.body[half:]]
        if fault == "slow":
            step = max(len(reply.body) // 8, 1)
            pieces = [reply.body[at : at + step] for at in range(0, len(reply.body), step)]
        for number, piece in enumerate(pieces):
            if number and fault == "truncated":
                self._end()
                return
            if number and fault == "slow":
                time.sleep(DELAY_SECONDS)
            if number and len(reply.body) > UNGATED_BYTES:
                web.gate.wait()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            self.wfile.flush()
            web.sent[asked.path] = web.sent.get(asked.path, 0) + len(piece)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _end(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = _serve  # noqa: N815 - http.server's names
