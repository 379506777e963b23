"""A command in a container that runs as long as somebody listens: its standard input stays open, and its lines are read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kdist.cluster.channels import STDIN, STDOUT, Channels
from kdist.cluster.streams import open_websocket
from kdist.cluster.transport import Transport

_POLL_SECONDS = 0.2


class Session:
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
        """Whether the command still runs, as far as we hear; takes a fraction of a second, in which what it says is read."""
        from websocket import WebSocketException

        try:
            self._client.update(timeout=_POLL_SECONDS)
        except (WebSocketException, OSError):
            self._client.close()
        self._said += self._client.read(STDOUT)
        return self._client.is_open()


@contextmanager
def session(transport: Transport, pod: str, argv: Sequence[str], *, namespace: str, container: str) -> Iterator[Session]:
    """Run `argv`; the end of the block, or of this process, is the end of its standard input. Its stderr is dropped."""
    query = [("container", container), *(("command", word) for word in argv), ("stdin", "true"), ("stdout", "true")]
    client = Channels(open_websocket(transport, pod, namespace, "exec", query, what=f"exec in pod/{pod}"))
    try:
        yield Session(client)
    finally:
        with suppress(Exception):
            client.end(STDIN)
        client.close()
