"""Streams to and from pods: logs, commands in containers, and forwarded ports.

A log that is followed continues after a lost connection without lost or repeated lines. Commands
and ports have a websocket, which multiplexes several byte streams: each message begins with its
channel number. An interactive command gets the local terminal in raw mode.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlencode

from kdist.cluster import resources
from kdist.cluster.api_errors import ApiNotFoundError
from kdist.cluster.transport import ApiRequest, Transport, deadline, read_lines
from kdist.errors import Code, KdistError
from kdist.threads import OnError, start_thread
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json


@contextmanager
def raw_terminal(wanted: bool) -> Iterator[bool]:
    """Put the terminal into raw mode until the block ends, so that keys, including Ctrl-C, are
    read as they are typed; yields whether there is a terminal.
    """
    if not (wanted and sys.stdin.isatty()):
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0)
        yield True
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
_CLOSE = 255
_MOST_UNREAD_BYTES = 1 << 20  # or a command that writes without a pause would fill the memory
_FRAME_SECONDS = 30.0  # for a message whose first byte has come
_V5 = "v5.channel.k8s.io"


class Channels:
    """The streams of a command in a container. `websocket` is open already."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self._open = True
        self._read: dict[int, bytearray] = {}

    def fileno(self) -> int:
        """Descriptor of the socket, for `select`."""
        return int(self._websocket.sock.fileno())

    def is_open(self) -> bool:
        """Whether the connection was open at the last `update`."""
        return self._open

    def update(self, timeout: float = 0) -> bool:
        """Read the messages that have arrived, waiting up to `timeout` seconds for the first;
        returns whether there may be more, because a mebibyte came. Raises `WebSocketException`,
        `OSError`.
        """
        from websocket import ABNF

        while self._open and self._waits(timeout):
            if sum(map(len, self._read.values())) >= _MOST_UNREAD_BYTES:
                return True
            timeout = 0
            self._websocket.settimeout(_FRAME_SECONDS)
            code, frame = self._websocket.recv_data_frame(True)
            self._websocket.settimeout(None)
            if code == ABNF.OPCODE_CLOSE:
                self._open = False
                self._websocket.shutdown()  # it has answered; `close` would wait for more
            elif (
                code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT)
                and frame.data
                and frame.data[0] != _CLOSE
            ):
                self._read.setdefault(frame.data[0], bytearray()).extend(frame.data[1:])

        return False

    def _waits(self, timeout: float) -> bool:
        """Whether data is available within `timeout` seconds; a TLS socket may have buffered it,
        which `poll` does not see.
        """
        connection = self._websocket.sock
        if connection is None:
            self._open = False
            return False
        if isinstance(connection, ssl.SSLSocket) and connection.pending():
            return True
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def read(self, channel: int) -> bytes:
        """The bytes that arrived on a channel since the last call."""
        return bytes(self._read.pop(channel, b""))

    def write(self, channel: int, data: bytes) -> None:
        """Send bytes on a channel, unless the connection is lost, which the next `update` finds."""
        from websocket import ABNF, WebSocketException

        with suppress(WebSocketException, OSError):
            self._websocket.send(bytes([channel]) + data, opcode=ABNF.OPCODE_BINARY)

    def end(self, channel: int) -> None:
        """Close this channel for writing, as `write`; the v4 protocol has no message for it."""
        if self._websocket.getheaders().get("sec-websocket-protocol") == _V5:
            self.write(_CLOSE, bytes([channel]))

    def close(self) -> None:
        """Close the connection."""
        self._open = False
        self._websocket.close()


_POLL_SECONDS = 0.1
_CHUNK = 2**16


def _forward_output(client: Channels, outputs: Mapping[int, Callable[[bytes], object]]) -> bool:
    """Pass on what has arrived; returns whether there may be more."""
    from websocket import WebSocketException

    more = False
    try:
        more = client.update()
    except (WebSocketException, OSError):
        # forward what was read; the missing exit code reports the lost connection
        client.close()
    for channel, write in outputs.items():
        if data := client.read(channel):
            write(data)
    return more


def _writer(descriptor: int) -> Callable[[bytes], object]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _exit_code(status: bytes, description: str) -> int:
    """Exit code in the `Status` that ends the stream. Raises `KdistError` if the command could not
    be run.
    """
    try:
        found = parse_json(status)
        if found.get("status") == "Success":
            return 0
        causes = (found.get("details") or {}).get("causes") or []
        codes = [cause.get("message") for cause in causes if cause.get("reason") == "ExitCode"]
        if codes:
            return int(codes[0])
        message = str(found.get("message"))
    except (ValueError, AttributeError):
        message = "the connection was cut"
    raise KdistError(f"{description}: {message}")


_SESSION_POLL_SECONDS = 0.2


class ExecSession:
    """A running command, whose output is read line by line."""

    def __init__(self, client: Channels) -> None:
        self._client = client
        self._buffer = bytearray()

    def read_line(self, timeout: float) -> bytes | None:
        """The next line of its stdout; None if it ended, or printed nothing for `timeout`
        seconds.
        """
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if time.monotonic() > end or not self.is_open():
                return None
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return line

    def is_open(self) -> bool:
        """Whether the command still runs, as far as is known. Waits up to 0.2 s for output."""
        from websocket import WebSocketException

        try:
            self._client.update(timeout=_SESSION_POLL_SECONDS)
        except (WebSocketException, OSError):
            self._client.close()
        self._buffer += self._client.read(STDOUT)
        return self._client.is_open()


# A training may print nothing for a long time, and TCP keep-alive does not detect a dead load
# balancer: after this many seconds the log is requested again. A log that is there comes at once.
_LOG_SILENCE_SECONDS = 300.0
_LOG_BYTES = 4096


class LogCutError(KdistError, ConnectionError):
    """The log did not come to its end."""


class PodStreams:
    """The streams of one cluster's pods. Errors are those of `kdist.cluster.client.Cluster`."""

    _transport: Transport
    namespace: str

    def logs(
        self,
        pod: str,
        *,
        namespace: str | None = None,
        container: str = "trainer",
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: float | str | None = None,
        timestamps: bool = False,
    ) -> Iterator[str]:
        """Lines of a container's log, without their ends; `since` is a number of seconds back, or a
        moment as RFC 3339 text.

        With `follow` it ends when the container has ended; a cut connection is taken up again. A
        container that has not begun is a `ApiError` with status 400.
        """
        path = resources.path("v1", "Pod", namespace=namespace or self.namespace, name=pod)
        query = [("container", container), ("timestamps", "true")]
        query += [(key, "true") for key, on in (("follow", follow), ("previous", previous)) if on]
        begin = [] if tail is None else [("tailLines", str(tail))]
        if isinstance(since, str):
            begin.append(("sinceTime", since))
        elif since is not None:
            begin.append(("sinceSeconds", str(max(1, round(since)))))
        last = ""
        container_id = self._running_container(path, pod, container) if follow else ""
        while True:
            request = ApiRequest(
                "GET",
                f"{path}/log",
                f"read the log of pod/{pod}",
                [*query, *([("sinceTime", last)] if last else begin)],
                accept="*/*",
                timeout=_LOG_SILENCE_SECONDS if follow else None,
                each=1 if follow else _LOG_BYTES,
            )
            resumed_at = last
            try:
                for raw in read_lines(self._transport.open(request)):
                    stamp, _, line = raw.decode(errors="replace").rstrip("\r").partition(" ")
                    # all of the kubelet's timestamps have one format, so their text compares as
                    # time
                    if stamp <= resumed_at:
                        continue
                    # the kubelet's own messages about a deleted pod have no timestamp
                    if stamp[:1].isdigit():
                        last = stamp
                    yield f"{stamp} {line}" if timestamps else line
            except ConnectionError as error:
                if not follow:
                    raise LogCutError(
                        f"read the log of pod/{pod}: it was cut off: {error}",
                        code=Code.UNREACHABLE,
                    ) from error
            if not follow:
                return
            now = self._running_container(path, pod, container)
            if not now or (container_id and now != container_id):
                return
            container_id = now

    def _running_container(self, path: str, pod: str, container: str) -> str:
        """Id of the running container; empty if it does not run."""
        try:
            found = self._transport.send(ApiRequest("GET", path, f"get pods/{pod}")).document()
        except ApiNotFoundError:
            return ""
        status = found.get("status") or {}
        kinds = ("containerStatuses", "initContainerStatuses")
        containers: list[dict[str, Any]] = [
            each for kind in kinds for each in status.get(kind) or []
        ]
        for each in containers:
            if each.get("name") == container and "running" in (each.get("state") or {}):
                return str(each.get("containerID") or "")
        return ""

    def exec(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        container: str = "trainer",
        stdin: bool = False,
        tty: bool = False,
        out: Callable[[bytes], object] | None = None,
        err: Callable[[bytes], object] | None = None,
        feed: Iterator[bytes] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Run a command in a container and return its exit code. What it writes goes to `out` and
        `err` (ours by default) as it arrives. Its standard input is ours with `stdin`, or `feed`.

        Raises `KdistError` if it could not be started, or has not ended within `timeout` seconds
        (TIMEOUT; it keeps running).
        """
        description = f"exec in pod/{pod}"
        client = self._open_exec(pod, argv, container, stdin=stdin or feed is not None, tty=tty)
        outputs = {STDOUT: out or _writer(1), STDERR: err or _writer(2)}
        end = deadline(timeout)
        with closing(client), raw_terminal(tty) as has_terminal:
            listening, size, more = stdin, os.terminal_size((0, 0)), False
            while client.is_open():
                if time.monotonic() > end:
                    raise KdistError(
                        f"{description}: `{argv[0]}` has not ended after {timeout:.0f} s",
                        code=Code.TIMEOUT,
                    )
                if has_terminal and (now := os.get_terminal_size(0)) != size:
                    size = now
                    new = {"Width": size.columns, "Height": size.lines}
                    client.write(RESIZE, encode_json(new).encode())
                ready, _, _ = select.select(
                    [client.fileno(), *([0] if listening else [])],
                    [],
                    [],
                    0 if more or feed is not None else _POLL_SECONDS,
                )
                if 0 in ready or feed is not None:
                    data = os.read(0, _CHUNK) if feed is None else next(filter(None, feed), b"")
                    if data:
                        client.write(STDIN, data)
                    else:
                        client.end(STDIN)
                        listening, feed = False, None
                more = _forward_output(client, outputs)
            _forward_output(client, outputs)
        return _exit_code(client.read(ERROR), description)

    def run(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        container: str = "trainer",
        timeout: float = 30.0,
        most: int = 256 << 20,
    ) -> tuple[int, bytes]:
        """Run a command and collect what it writes to stdout: (exit code, output). Its stderr is
        dropped.

        Raises `KdistError` if it writes more than `most` bytes, and with code TIMEOUT if it takes
        longer than `timeout` seconds.
        """
        found = bytearray()

        def collect(data: bytes) -> None:
            if len(found) + len(data) > most:
                raise KdistError(f"exec in pod/{pod}: it writes more than {most >> 20} MiB")
            found.extend(data)

        code = self.exec(
            pod,
            argv,
            container=container,
            out=collect,
            err=lambda _: None,
            timeout=timeout,
        )
        return code, bytes(found)

    @contextmanager
    def session(
        self, pod: str, argv: Sequence[str], *, container: str = "trainer"
    ) -> Iterator[ExecSession]:
        """A command that runs as long as the context, or this process, lasts: then its standard
        input ends. Its stderr is dropped.
        """
        with closing(self._open_exec(pod, argv, container, stdin=True, stderr=False)) as client:
            try:
                yield ExecSession(client)
            finally:
                client.end(STDIN)

    @contextmanager
    def forward(
        self, pod: str, port: int, *, namespace: str | None = None, local: int = 0
    ) -> Iterator[int]:
        """A port on 127.0.0.1 (`local`, or a free one) whose connections end at the pod's port, as
        long as the context lasts. Each has a websocket of its own, so an outage of the API server
        ends open connections, and no later ones.
        """
        closing = threading.Event()
        with socket.create_server(("127.0.0.1", local)) as server:
            server.settimeout(_POLL_SECONDS)

            def serve() -> None:
                while not closing.is_set():
                    try:
                        connection, _ = server.accept()
                    except TimeoutError:
                        continue
                    except OSError:
                        return
                    start_thread(
                        partial(self._tunnel, pod, port, namespace, connection, closing),
                        name=f"tunnel {pod}:{port}",
                        on_error=OnError.REPORT,  # the connection is closed
                    )

            thread = start_thread(serve, name=f"forward {pod}:{port}", on_error=OnError.RESTART)
            try:
                yield int(server.getsockname()[1])
            finally:
                closing.set()
                thread.join()

    def _tunnel(
        self,
        pod: str,
        port: int,
        namespace: str | None,
        connection: socket.socket,
        closing: threading.Event,
    ) -> None:
        """Copy bytes in both directions until both ends are closed, or the forwarding ends. If the
        pod's port cannot be reached, the local connection is closed.
        """
        from kubernetes.stream.ws_client import PortForward

        with connection, suppress(OSError, KdistError):
            websocket = self._open_forward(pod, port, namespace)
            far = PortForward(websocket, [port]).socket(port)
            ends = {connection: far, far: connection}
            while ends and not closing.is_set():
                ready, _, _ = select.select(list(ends), [], [], _POLL_SECONDS)
                for near in ready:
                    data = near.recv(_CHUNK)
                    other = ends[near]
                    if data:
                        other.sendall(data)
                        continue
                    if near is far:
                        return
                    del ends[near]
                    other.shutdown(socket.SHUT_WR)

    def check_forward(self, pod: str, port: int) -> None:
        """Raise `KdistError` where no connection can be forwarded to the pod; `forward` itself
        closes each connection silently.
        """
        self._open_forward(pod, port, None).close()

    def _open_forward(self, pod: str, port: int, namespace: str | None) -> Any:
        description = f"forward port {port} of pod/{pod}"
        query = [("ports", str(port))]
        return self._open_websocket(pod, namespace, "portforward", query, description)

    def _open_exec(
        self,
        pod: str,
        argv: Sequence[str],
        container: str,
        *,
        stdin: bool,
        tty: bool = False,
        stderr: bool = True,
    ) -> Channels:
        # a terminal has one stream for both outputs
        flags = {"stdin": stdin, "stdout": True, "stderr": stderr and not tty, "tty": tty}
        query = [("container", container), *(("command", word) for word in argv)]
        query += [(key, "true") for key, on in flags.items() if on]
        description = f"exec in pod/{pod}"
        return Channels(self._open_websocket(pod, None, "exec", query, description))

    def _open_websocket(
        self,
        pod: str,
        namespace: str | None,
        subresource: str,
        query: Sequence[tuple[str, str]],
        description: str,
    ) -> Any:
        """Open a websocket to a subresource of a pod."""
        import websocket

        path = resources.path(
            "v1", "Pod", namespace=namespace or self.namespace, name=pod, subresource=subresource
        )
        try:
            return self._transport.access.websocket(f"{path}?{urlencode(query)}")
        except websocket.WebSocketBadStatusException as error:
            body = error.resp_body or b""
            raise self._transport.explain(description, error.status_code, body) from error
        except (websocket.WebSocketException, OSError) as error:
            raise KdistError(
                f"{description}: the API server does not answer: {error}", code=Code.UNREACHABLE
            ) from error
