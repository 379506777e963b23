"""Commands in containers and port forwarding, over websockets. A websocket multiplexes several byte
streams; each message begins with its channel number.

`execute` runs a command, with the local terminal in raw mode if it is interactive. `session` keeps
a command running with its standard input open while its output is read line by line.
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
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlencode

from kdist.cluster import resources
from kdist.cluster.api_errors import explain
from kdist.cluster.transport import Transport, deadline
from kdist.errors import Code, KdistError
from kdist.threads import OnError, start_thread
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json


class Terminal:
    """Detects changes of the terminal's size."""

    def __init__(self) -> None:
        self._size: os.terminal_size | None = None

    def changed_size(self) -> os.terminal_size | None:
        """The terminal's size if it has changed since the last call, else None."""
        size = os.get_terminal_size(0)
        if size == self._size:
            return None
        self._size = size
        return size


@contextmanager
def raw_terminal(wanted: bool) -> Iterator[Terminal | None]:
    """Put the terminal into raw mode until the block ends, so that keys, including Ctrl-C, are
    read as they are typed; yields None if there is no terminal.
    """
    if not (wanted and sys.stdin.isatty()):
        yield None
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0)
        yield Terminal()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
_CLOSE = 255
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

    def update(self, timeout: float = 0) -> None:
        """Read the messages that have arrived, waiting up to `timeout` seconds for the first.
        Raises `WebSocketException`, `OSError`.
        """
        from websocket import ABNF

        while self._open and self._waits(timeout):
            timeout = 0
            self._websocket.settimeout(_FRAME_SECONDS)
            code, frame = self._websocket.recv_data_frame(True)
            self._websocket.settimeout(None)
            if code == ABNF.OPCODE_CLOSE:
                self._open = False
            elif (
                code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT)
                and frame.data
                and frame.data[0] != _CLOSE
            ):
                self._read.setdefault(frame.data[0], bytearray()).extend(frame.data[1:])

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
        """Send bytes on a channel."""
        from websocket import ABNF

        self._websocket.send(bytes([channel]) + data, opcode=ABNF.OPCODE_BINARY)

    def end(self, channel: int) -> None:
        """Close this channel for writing; the v4 protocol has no message for it."""
        from websocket import ABNF

        if self._websocket.getsubprotocol() == _V5:
            self._websocket.send(bytes([_CLOSE, channel]), opcode=ABNF.OPCODE_BINARY)

    def close(self) -> None:
        """Close the connection."""
        self._open = False
        self._websocket.close()


_POLL_SECONDS = 0.1
_CHUNK = 2**16


def execute(
    transport: Transport,
    pod: str,
    argv: Sequence[str],
    *,
    namespace: str,
    container: str,
    stdin: bool,
    tty: bool,
    out: Callable[[bytes], object] | None,
    err: Callable[[bytes], object] | None,
    timeout: float | None = None,
) -> int:
    """Run a command in a container and forward its output as it arrives; its exit code.

    `out` and `err` receive stdout and stderr; None writes them to those of this process.

    Raises:
        ApiError: the server rejected the request.
        KdistError: the command did not end within `timeout` seconds (TIMEOUT; it keeps running), or
            could not be started, or the API server is unreachable (UNREACHABLE).
    """
    flags = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
    query = [("container", container), *(("command", word) for word in argv)]
    query += [(key, "true") for key, value in flags.items() if value]
    what = f"exec in pod/{pod}"
    client = Channels(open_websocket(transport, pod, namespace, "exec", query, what=what))
    outputs = {STDOUT: out or _writer(1), STDERR: err or _writer(2)}
    end = deadline(timeout)
    with raw_terminal(tty) as terminal:
        listening = stdin
        while client.is_open():
            if time.monotonic() > end:
                client.close()
                raise KdistError(
                    f"{what}: `{argv[0]}` has not ended after {timeout:.0f} s", code=Code.TIMEOUT
                )
            if terminal is not None and (size := terminal.changed_size()):
                client.write(
                    RESIZE, encode_json({"Width": size.columns, "Height": size.lines}).encode()
                )
            ready, _, _ = select.select(
                [client.fileno(), *([0] if listening else [])], [], [], _POLL_SECONDS
            )
            if 0 in ready:
                listening = _send_stdin(client)
            _forward_output(client, outputs)
        _forward_output(client, outputs)
    return _exit_code(client.read(ERROR), what)


def _forward_output(client: Channels, outputs: Mapping[int, Callable[[bytes], object]]) -> None:
    from websocket import WebSocketException

    try:
        client.update()
    except (WebSocketException, OSError):
        # forward what was read; the missing exit code reports the lost connection
        client.close()
    for channel, write in outputs.items():
        if data := client.read(channel):
            write(data)


def _send_stdin(client: Channels) -> bool:
    """Forward standard input; False at its end."""
    data = os.read(0, _CHUNK)
    if data:
        client.write(STDIN, data)
        return True
    client.end(STDIN)
    return False


def _writer(descriptor: int) -> Callable[[bytes], object]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _exit_code(status: bytes, what: str) -> int:
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
    raise KdistError(f"{what}: {message}")


@contextmanager
def forward(
    transport: Transport, pod: str, port: int, *, namespace: str, local: int
) -> Iterator[int]:
    """Forward connections to 127.0.0.1:`local` (0 for a free port) to a port of a pod until the
    block ends. Yields the local port.
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
                    partial(_tunnel, transport, pod, port, namespace, connection, closing),
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
    transport: Transport,
    pod: str,
    port: int,
    namespace: str,
    connection: socket.socket,
    closing: threading.Event,
) -> None:
    """Copy bytes in both directions until both ends are closed, or the forwarding ends. If the
    pod's port cannot be reached, the local connection is closed.
    """
    from kubernetes.stream.ws_client import PortForward

    with connection, suppress(OSError, KdistError):
        websocket = open_forward(transport, pod, port, namespace=namespace)
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


def open_forward(transport: Transport, pod: str, port: int, *, namespace: str) -> Any:
    """Open a websocket to a port of a pod. Raises the errors of `open_websocket`."""
    what = f"forward port {port} of pod/{pod}"
    return open_websocket(
        transport, pod, namespace, "portforward", [("ports", str(port))], what=what
    )


def open_websocket(
    transport: Transport,
    pod: str,
    namespace: str,
    subresource: str,
    query: Sequence[tuple[str, str]],
    *,
    what: str,
) -> Any:
    """Open a websocket to a subresource of a pod; `what` is the request in words, for errors.

    Raises:
        ApiError: the server rejected the request.
        KdistError: the API server is unreachable (UNREACHABLE).
    """
    import websocket

    path = resources.path("v1", "Pod", namespace=namespace, name=pod, subresource=subresource)
    access = transport.access
    try:
        return access.websocket(f"{path}?{urlencode(query)}")
    except websocket.WebSocketBadStatusException as error:
        body = error.resp_body or b""
        raise explain(
            error.status_code, body, what=what, namespace=access.namespace, context=access.context
        ) from error
    except (websocket.WebSocketException, OSError) as error:
        raise KdistError(
            f"{what}: the API server does not answer: {error}", code=Code.UNREACHABLE
        ) from error


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


@contextmanager
def session(
    transport: Transport, pod: str, argv: Sequence[str], *, namespace: str, container: str
) -> Iterator[ExecSession]:
    """Run a command whose standard input stays open until the block, or this process, ends. Its
    stderr is discarded.
    """
    query = [
        ("container", container),
        *(("command", word) for word in argv),
        ("stdin", "true"),
        ("stdout", "true"),
    ]
    client = Channels(
        open_websocket(transport, pod, namespace, "exec", query, what=f"exec in pod/{pod}")
    )
    try:
        yield ExecSession(client)
    finally:
        with suppress(Exception):
            client.end(STDIN)
        client.close()
