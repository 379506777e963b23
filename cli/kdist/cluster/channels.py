"""A websocket on which several streams of bytes travel side by side, each message led by the number of its channel."""

from __future__ import annotations

import select
import ssl
from typing import Any

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
        """Take in what has come, waiting up to `timeout` seconds for the first of it. Raises `WebSocketException`, `OSError`."""
        from websocket import ABNF

        while self._open and self._waits(timeout):
            timeout = 0
            code, frame = self._websocket.recv_data_frame(True)
            if code == ABNF.OPCODE_CLOSE:
                self._open = False
            elif code in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data and frame.data[0] != _CLOSE:
                self._read.setdefault(frame.data[0], bytearray()).extend(frame.data[1:])

    def _waits(self, timeout: float) -> bool:
        """Whether there is something to be read; a TLS socket may hold it already, where `select` does not see it."""
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
        """Say that nothing more comes on this channel; a server that speaks v4 only cannot be told."""
        from websocket import ABNF

        if self._websocket.getsubprotocol() == _V5:
            self._websocket.send(bytes([_CLOSE, channel]), opcode=ABNF.OPCODE_BINARY)

    def close(self) -> None:
        """Close the connection."""
        self._open = False
        self._websocket.close()
