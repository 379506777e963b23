"""Commands in containers and forwarded ports, over websockets. One websocket carries several
streams of bytes; each message begins with the number of its channel.

`execute` runs a command, with the local terminal in raw mode where it is interactive. `session`
keeps a command running with its standard input open while its lines are read.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlencode

from kdist.cluster import resources
from kdist.cluster.api_errors import explain
from kdist.cluster.transport import Transport, deadline
from kdist.errors import Code, KdistError

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
_CLOSE = 255
_V5 = "v5.channel.k8s.io"


class Channels:
    """The streams of a command in a container. `websocket` is open already."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self._open = True
        self._read: dict[int, bytearray] = {}

    def fileno(self) -> int:
        """The socket's, for `select`."""
        return int(self._websocket.sock.fileno())

    def is_open(self) -> bool:
        """Whether more may come, as far as `update` knows."""
        return self._open

    def update(self, timeout: float = 0) -> None:
        """Take in what has come, waiting up to `timeout` seconds for the first of it. Raises
        `WebSocketException`, `OSError`.
        """
        from websocket import ABNF

        while self._open and self._waits(timeout):
            timeout = 0
            code, frame = self._websocket.recv_data_frame(True)
            if code == ABNF.OPCODE_CLOSE:
                self._open = False
            elif (
                code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT)
                and frame.data
                and frame.data[0] != _CLOSE
            ):
                self._read.setdefault(frame.data[0], bytearray()).extend(frame.data[1:])

    def _waits(self, timeout: float) -> bool:
        """Whether there is something to be read; a TLS socket may hold it already, where `select`
        does not see it.
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
        """What has come on a channel since the last time."""
        return bytes(self._read.pop(channel, b""))

    def write(self, channel: int, data: bytes) -> None:
        """Send bytes on a channel."""
        from websocket import ABNF

        self._websocket.send(bytes([channel]) + data, opcode=ABNF.OPCODE_BINARY)

    def end(self, channel: int) -> None:
        """Say that nothing more comes on this channel; a server that speaks v4 only cannot be
        told.
        """
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
    """Run `argv` in the container and pass its output on as it comes; the command's exit code.

    Raises `KdistError` with code TIMEOUT after `timeout` seconds; the command itself is not ended
    by that.
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
                    RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}).encode()
                )
            ready, _, _ = select.select(
                [client.fileno(), *([0] if listening else [])], [], [], _POLL_SECONDS
            )
            if 0 in ready:
                listening = _send_stdin(client)
            _pass_on(client, outputs)
        _pass_on(client, outputs)
    return _exit_code(client.read(ERROR), what)


def _pass_on(client: Channels, outputs: Mapping[int, Callable[[bytes], object]]) -> None:
    from websocket import WebSocketException

    try:
        client.update()
    except (WebSocketException, OSError):
        # what was read before the cut is still passed on; that no exit code came tells the rest
        client.close()
    for channel, write in outputs.items():
        if data := client.read(channel):
            write(data)


def _send_stdin(client: Channels) -> bool:
    """Pass on what was typed; False when there is nothing more to come."""
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
    """Exit code by the `Status` that ends the stream. Raises `KdistError` where the command could
    not be run.
    """
    try:
        found = json.loads(status)
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
    """A listening port on 127.0.0.1 whose connections end at the pod's port; gives its number."""
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
                tunnel = threading.Thread(
                    target=_tunnel, args=(transport, pod, port, namespace, connection), daemon=True
                )
                tunnel.start()

        thread = threading.Thread(target=serve, name=f"forward {pod}:{port}", daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            closing.set()
            thread.join()


def _tunnel(
    transport: Transport, pod: str, port: int, namespace: str, connection: socket.socket
) -> None:
    """Carry bytes both ways until both ends are done. A tunnel that cannot be dug closes its
    connection.
    """
    from kubernetes.stream.ws_client import PortForward

    with connection, suppress(OSError, KdistError):
        websocket = open_forward(transport, pod, port, namespace=namespace)
        far = PortForward(websocket, [port]).socket(port)
        ends = {connection: far, far: connection}
        while ends:
            ready, _, _ = select.select(list(ends), [], [])
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
    """A websocket to a port of a pod. Raises what `open_websocket` does."""
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
    """A websocket to a part of a pod. Raises `ApiError`, or `KdistError` with code UNREACHABLE;
    `what` names it there.
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
    """What a command under way says."""

    def __init__(self, client: Channels) -> None:
        self._client = client
        self._said = bytearray()

    def read_line(self, timeout: float) -> bytes | None:
        """The next line of its stdout; None if it ended, or said nothing for `timeout` seconds."""
        end = time.monotonic() + timeout
        while b"\n" not in self._said:
            if time.monotonic() > end or not self.is_open():
                return None
        line, _, rest = bytes(self._said).partition(b"\n")
        self._said[:] = rest
        return line

    def is_open(self) -> bool:
        """Whether the command still runs, as far as we hear; takes a fraction of a second, in which
        what it says is read.
        """
        from websocket import WebSocketException

        try:
            self._client.update(timeout=_SESSION_POLL_SECONDS)
        except (WebSocketException, OSError):
            self._client.close()
        self._said += self._client.read(STDOUT)
        return self._client.is_open()


@contextmanager
def session(
    transport: Transport, pod: str, argv: Sequence[str], *, namespace: str, container: str
) -> Iterator[ExecSession]:
    """Run `argv`; the end of the block, or of this process, is the end of its standard input. Its
    stderr is dropped.
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


class Terminal:
    """Remembers the size that was told last."""

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
    """Pass keys on as they are typed, Ctrl-C included, for as long as the context lasts; None where
    there is no terminal.
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
