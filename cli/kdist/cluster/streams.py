"""Commands in a container and forwarded ports, over the official client's websockets."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlencode

from kdist.cluster import resources
from kdist.cluster.refusal import explain
from kdist.cluster.terminal import raw_terminal
from kdist.cluster.transport import Transport, deadline
from kdist.errors import Code, KdistError

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
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

    Raises `KdistError` with code TIMEOUT after `timeout` seconds; the command itself is not ended by that.
    """
    from kubernetes.stream.ws_client import WSClient

    flags = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
    query = [("container", container), *(("command", word) for word in argv)]
    query += [(key, "true") for key, value in flags.items() if value]
    url = url_of(transport, pod, namespace, "exec", query)
    what = f"exec in pod/{pod}"
    with handshake(transport, what):
        client = WSClient(transport.access.official(), url, transport.headers(), capture_all=False, binary=True)
    outputs = {STDOUT: out or _writer(1), STDERR: err or _writer(2)}
    end = deadline(timeout)
    with raw_terminal(tty) as terminal:
        listening = stdin
        while client.is_open():
            if time.monotonic() > end:
                client.close()
                raise KdistError(f"{what}: `{argv[0]}` has not ended after {timeout:.0f} s", code=Code.TIMEOUT)
            if terminal is not None and (size := terminal.changed_size()):
                client.write_channel(RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}).encode())
            ready, _, _ = select.select([client.sock.sock, *([0] if listening else [])], [], [], _POLL_SECONDS)
            if 0 in ready:
                listening = _send_stdin(client)
            _pass_on(client, outputs)
        _pass_on(client, outputs)
    return _exit_code(client.read_channel(ERROR), what)


def _pass_on(client: Any, outputs: Mapping[int, Callable[[bytes], object]]) -> None:
    from websocket import WebSocketException

    try:
        client.update(timeout=0)
    except (WebSocketException, OSError):
        client.close()  # what was read before the cut is still passed on; that no exit code came tells the rest
    for channel, write in outputs.items():
        if data := client.read_channel(channel):
            write(data)


def _send_stdin(client: Any) -> bool:
    """Pass on what was typed; False when there is nothing more to come."""
    data = os.read(0, _CHUNK)
    if data:
        client.write_channel(STDIN, data)
        return True
    client.close_channel(STDIN)
    return False


def _writer(descriptor: int) -> Callable[[bytes], object]:
    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _exit_code(status: bytes, what: str) -> int:
    """Exit code by the `Status` that ends the stream. Raises `KdistError` where the command could not be run."""
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
def forward(transport: Transport, pod: str, port: int, *, namespace: str, local: int) -> Iterator[int]:
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
                tunnel = threading.Thread(target=_tunnel, args=(transport, pod, port, namespace, connection), daemon=True)
                tunnel.start()

        thread = threading.Thread(target=serve, name=f"forward {pod}:{port}", daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            closing.set()
            thread.join()


def _tunnel(transport: Transport, pod: str, port: int, namespace: str, connection: socket.socket) -> None:
    """Carry bytes both ways until both ends are done. A tunnel that cannot be dug closes its connection."""
    from kubernetes.stream.ws_client import PortForward, create_websocket

    with connection, suppress(OSError, KdistError):
        url = url_of(transport, pod, namespace, "portforward", [("ports", str(port))])
        with handshake(transport, f"forward port {port} of pod/{pod}"):
            websocket = create_websocket(transport.access.official(), url, transport.headers())
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


def url_of(transport: Transport, pod: str, namespace: str, subresource: str, query: Sequence[tuple[str, str]]) -> str:
    """Where a websocket to a pod begins."""
    path = resources.path("v1", "Pod", namespace=namespace, name=pod, subresource=subresource)
    server = transport.access.server.replace("http", "ws", 1)
    return f"{server}{path}?{urlencode(query)}"


@contextmanager
def handshake(transport: Transport, what: str) -> Iterator[None]:
    """Turn a websocket that could not be opened into an error of ours."""
    import websocket

    try:
        yield
    except websocket.WebSocketBadStatusException as error:
        access = transport.access
        body = error.resp_body or b""
        raise explain(error.status_code, body, what=what, namespace=access.namespace, context=access.context) from error
    except (websocket.WebSocketException, OSError) as error:
        raise KdistError(f"{what}: the API server does not answer: {error}", code=Code.UNREACHABLE) from error
