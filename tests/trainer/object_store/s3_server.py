"""A server that speaks S3 over a real socket, keeps its objects in memory, and fails on request.

It has path-style addresses, conditional PUTs, ranges, listings in pages, uploads in parts, and
deletion of many objects. It checks the access key's id and no signature. `faults` draws what goes
wrong with each request.
"""

from __future__ import annotations

import hashlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as Xml
from xml.sax.saxutils import escape

BUCKET = "bucket"
ACCESS_KEY = "TESTKEYID"
SECRET = "a-secret-that-no-error-shows"  # noqa: S105 - of this server alone
SMALLEST_PART = 5 << 20
DELAY_SECONDS = 0.02
FAULTS = (
    "503",  # refused, not executed
    "429",
    "409",  # of a conditional write during another one
    "500-after",  # an error after it was executed
    "close",  # the connection ends before it is executed
    "close-after",  # the reply is lost
    "truncated",  # half of the reply's body
    "slow",  # the body in pieces
    "delay",
)
# Also: "hang", no reply within seconds; "proxy-404", of a proxy in front of the store; and
# "repeats", a refusal with the server's `message`.
HANG_SECONDS = 2.0


@dataclass(frozen=True)
class Request:
    """A client's request."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """The reply to a request."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A stored object."""

    data: bytes
    tag: str
    modified: float


Faults = Callable[[Request], str]
"""Draws one of `FAULTS`, or "" for none."""


def no_faults(_request: Request) -> str:
    """No request fails."""
    return ""


def in_turn(*faults: str, method: str = "") -> Faults:
    """These faults, one for each request with this method, then none."""
    left = list(faults)
    lock = threading.Lock()

    def draw(request: Request) -> str:
        with lock:
            return left.pop(0) if left and method in {"", request.method} else ""

    return draw


def always(fault: str, *, method: str = "") -> Faults:
    """The same fault for every request with this method."""
    return lambda request: fault if method in {"", request.method} else ""


def drawn(seed: int, share: float) -> Faults:
    """Random faults for this share of the requests."""
    generator = random.Random(seed)
    lock = threading.Lock()

    def draw(_request: Request) -> str:
        with lock:
            return generator.choice(FAULTS) if generator.random() < share else ""

    return draw


class S3Server:
    """One bucket; within a `with` block it is served on a free port."""

    def __init__(self, *, page: int = 1000) -> None:
        self.objects: dict[str, Entry] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[Request] = []
        self.faults: Faults = no_faults
        self.quota: int | None = None
        self.message = ""
        self.kept: set[str] = set()
        """Keys that may not be deleted."""
        self.after_put: Callable[[], None] | None = None
        """Called once, after a PUT is executed and before its reply."""
        self._page = page
        self._lock = threading.RLock()
        self._number = 0
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.s3 = self

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @contextmanager
    def failing(self, faults: Faults) -> Iterator[None]:
        """Within the `with` block, requests fail as `faults` says."""
        self.faults = faults
        try:
            yield
        finally:
            self.faults = no_faults

    def count(self, method: str) -> int:
        """The number of requests so far with this method."""
        return sum(one.method == method for one in self.requests)

    def serve(self, request: Request) -> Reply:
        """Execute a request."""
        with self._lock:
            if request.method == "POST" and "delete" in request.query:
                return self._delete_many(request)
            if "uploads" in request.query or "uploadId" in request.query:
                return self._upload(request)
            if not request.key:
                return self._list(request.query)
            found = self.objects.get(request.key)
            if request.method == "PUT":
                return self._put(request, found)
            if request.method == "DELETE":
                self.objects.pop(request.key, None)
                return Reply(204)
            return _read(request, found)

    def _put(self, request: Request, found: Entry | None) -> Reply:
        match = request.headers.get("if-match")
        if match is not None and found is None:
            return _error(404, "NoSuchKey", "The specified key does not exist.")
        if (match is not None and found is not None and found.tag != match) or (
            request.headers.get("if-none-match") == "*" and found is not None
        ):
            return _error(412, "PreconditionFailed", "A condition did not hold.")
        return self._store(request.key, request.body, hashlib.md5(request.body).hexdigest())  # noqa: S324 - S3's tag

    def _store(self, key: str, data: bytes, tag: str) -> Reply:
        used = sum(len(one.data) for name, one in self.objects.items() if name != key)
        if self.quota is not None and used + len(data) > self.quota:
            return _error(403, "QuotaExceeded", "The bucket is full.")
        entry = Entry(data, f'"{tag}"', time.time())
        self.objects[key] = entry
        return Reply(headers={"ETag": entry.tag})

    def _upload(self, request: Request) -> Reply:
        if "uploads" in request.query:
            self._number += 1
            name = f"upload-{self._number}"
            self.uploads[name] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        name = request.query["uploadId"]
        parts = self.uploads.get(name)
        if parts is None:
            return _error(404, "NoSuchUpload", "The specified upload does not exist.")
        if request.method == "PUT":
            parts[int(request.query["partNumber"])] = request.body
            return Reply(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})  # noqa: S324
        if request.method == "DELETE":
            del self.uploads[name]
            return Reply(204)
        numbers = [int(one) for one in re.findall(rb"<PartNumber>(\d+)<", request.body)]
        if any(len(parts[one]) < SMALLEST_PART for one in numbers[:-1]):
            return _error(400, "EntityTooSmall", "A part is too small.")
        data = b"".join(parts[one] for one in numbers)
        tag = f"{hashlib.md5(data).hexdigest()}-{len(numbers)}"  # noqa: S324
        reply = self._store(request.key, data, tag)
        if reply.status != 200:
            return reply
        del self.uploads[name]
        return _xml(
            "CompleteMultipartUploadResult", f"<ETag>{escape(reply.headers['ETag'])}</ETag>"
        )

    def _delete_many(self, request: Request) -> Reply:
        document = Xml.fromstring(request.body)  # noqa: S314 - our client's
        keys = [one.text or "" for one in document.iter() if one.tag.endswith("Key")]
        rows = ""
        for key in keys:
            if key in self.kept:
                rows += f"<Error><Key>{escape(key)}</Key><Code>AccessDenied</Code>"
                rows += "<Message>It may not be deleted.</Message></Error>"
                continue
            self.objects.pop(key, None)
            rows += f"<Deleted><Key>{escape(key)}</Key></Deleted>"
        return _xml("DeleteResult", rows)

    def _list(self, query: dict[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        rows: dict[str, str] = {}
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            head, separator, _ = key[len(prefix) :].partition(delimiter or "\0")
            name = prefix + head + separator if separator else key
            if name > after:
                rows[name] = (
                    f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                    if separator
                    else _contents(key, self.objects[key])
                )
        page = list(rows)[: self._page]
        more = len(rows) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return _xml(
            "ListBucketResult",
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            + "".join(rows[name] for name in page),
        )

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _contents(key: str, entry: Entry) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(entry.modified))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified>"
        f"<ETag>{escape(entry.tag)}</ETag><Size>{len(entry.data)}</Size></Contents>"
    )


def _read(request: Request, found: Entry | None) -> Reply:
    if found is None:
        return _error(404, "NoSuchKey", "The specified key does not exist.")
    headers = {
        "ETag": found.tag,
        "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(found.modified)),
        "Accept-Ranges": "bytes",
    }
    wanted = request.headers.get("if-match")
    if wanted is not None and wanted != found.tag:
        return _error(412, "PreconditionFailed", "A condition did not hold.")
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if match is None:
        return Reply(200, found.data, headers)
    start, size = int(match[1]), len(found.data)
    if start >= size:
        return _error(416, "InvalidRange", "The range is outside of the object.")
    stop = min(int(match[2]) + 1 if match[2] else size, size)
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Reply(206, found.data[start:stop], headers)


def _xml(name: str, inner: str) -> Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'
    return Reply(200, text.encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str, message: str) -> Reply:
    inner = f"<Code>{code}</Code><Message>{message}</Message>"
    return Reply(status, _xml("Error", inner).body, {"Content-Type": "application/xml"})


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    s3: S3Server

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: the client has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Http

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Write nothing."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        request = Request(
            self.command,
            key,
            {name: values[0] for name, values in parse_qs(url.query, True).items()},
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(int(self.headers.get("Content-Length", 0))),
        )
        s3 = self.server.s3
        s3.requests.append(request)
        if f"Credential={ACCESS_KEY}/" not in request.headers.get("authorization", ""):
            fault, reply = "", _error(403, "InvalidAccessKeyId", "The key id is unknown.")
        elif bucket != BUCKET:
            fault, reply = "", _error(404, "NoSuchBucket", "The specified bucket does not exist.")
        else:
            fault = s3.faults(request)
            reply = self._outcome(fault, request)
        self._send(fault, reply)

    def _outcome(self, fault: str, request: Request) -> Reply:
        if fault == "delay":
            time.sleep(DELAY_SECONDS)
        conditional = {"if-match", "if-none-match"} & set(request.headers)
        if fault == "409" and request.method == "PUT" and conditional:
            return _error(409, "ConditionalRequestConflict", "Another request came between.")
        if fault == "503":
            return _error(503, "SlowDown", "Reduce your request rate.")
        if fault == "429":
            return _error(429, "TooManyRequests", "Reduce your request rate.")
        if fault == "hang":
            time.sleep(HANG_SECONDS)
        if fault == "repeats":
            return _error(400, "InvalidRequest", self.server.s3.message)
        if fault == "proxy-404":
            return Reply(404, b"default backend - 404")
        if fault in {"close", "hang"}:
            return Reply()
        reply = self.server.s3.serve(request)
        if request.method == "PUT" and self.server.s3.after_put is not None:
            self.server.s3.after_put()
            self.server.s3.after_put = None
        if fault == "500-after":
            return _error(500, "InternalError", "It may have been done.")
        return reply

    def _send(self, fault: str, reply: Reply) -> None:
        body = b"" if self.command == "HEAD" else reply.body
        if fault in {"close", "close-after"} or (fault == "truncated" and not body):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if fault == "slow":
            for start in range(0, len(body), max(len(body) // 4, 1)):
                self.wfile.write(body[start : start + max(len(body) // 4, 1)])
                self.wfile.flush()
                time.sleep(DELAY_SECONDS / 4)
        else:
            self.wfile.write(body[: len(body) // 2] if fault == "truncated" else body)
        self.wfile.flush()
        if fault == "truncated":
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - http.server's names
