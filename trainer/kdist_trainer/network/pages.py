"""A few fixed pages over HTTP: GET and HEAD without request bodies, one request per connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from kdist_trainer.network.server import BoundedServer, Bounds, Connection, Session

MAX_HEAD: Final = 8192
"""Maximum size of a request's line and headers, in bytes."""
_END: Final = b"\r\n\r\n"


@dataclass(frozen=True)
class HttpResponse:
    """A response: status, body, and the media type of the body."""

    status: HTTPStatus
    body: bytes
    media_type: str = "text/plain; charset=utf-8"


Route = Callable[[str], HttpResponse]
"""Handles requests for a path; the argument is the request's Accept header."""


def serve_pages(
    name: str, routes: Mapping[str, Route], addresses: Sequence[str], port: int
) -> BoundedServer:
    """Serve the handlers of these paths; see `BoundedServer`. Raises `OSError`."""
    return BoundedServer(
        name,
        addresses,
        port,
        bounds=Bounds(opening_bytes=MAX_HEAD),
        open_session=lambda connection: _Request(connection, routes),
    )


class _Request(Session):
    """The one request of a connection."""

    def __init__(self, connection: Connection, routes: Mapping[str, Route]) -> None:
        self._connection = connection
        self._routes = routes
        self._is_answered = False

    def receive(self, data: bytearray) -> None:
        if self._is_answered:
            data.clear()
        elif (end := data.find(_END)) >= 0:
            response, method = self._respond(bytes(data[:end]))
            data.clear()
            self._answer(response, with_body=method != "HEAD")

    def exceed(self) -> None:
        self._answer(text_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), with_body=True)

    def _answer(self, response: HttpResponse, *, with_body: bool) -> None:
        self._is_answered = True
        lines = [
            f"HTTP/1.1 {response.status.value} {response.status.phrase}",
            f"Content-Type: {response.media_type}",
            f"Content-Length: {len(response.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            *(["Allow: GET, HEAD"] if response.status is HTTPStatus.METHOD_NOT_ALLOWED else []),
            "Connection: close",
        ]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._connection.send(head, response.body if with_body else b"")
        self._connection.finish()

    def _respond(self, head: bytes) -> tuple[HttpResponse, str]:
        """Handle a request, given its line and headers. Returns the response and the method."""
        line, *headers = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return text_response(HTTPStatus.BAD_REQUEST), "GET"
        method, target, _ = words
        route = self._routes.get(target.partition("?")[0])
        if method not in {"GET", "HEAD"}:
            return text_response(HTTPStatus.METHOD_NOT_ALLOWED), method
        if route is None:
            return text_response(HTTPStatus.NOT_FOUND), method
        fields = (header.partition(":") for header in headers)
        accept = next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")
        try:
            return route(accept), method
        except Exception:  # noqa: BLE001  a bug in a handler fails one request, not the server
            return text_response(HTTPStatus.INTERNAL_SERVER_ERROR), method


def text_response(status: HTTPStatus, line: str = "") -> HttpResponse:
    """A plain-text response of one line, by default the status in words."""
    return HttpResponse(status, f"{line or status.phrase.lower()}\n".encode())
