"""The agent's end of the metrics socket: binds it, and hands every datagram on."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kdist_trainer.reporter import reachable
from kdist_trainer.stats import MAX_RECORD

_MOST_AT_ONCE = 64
_MOST_ROUNDS = 16


class Receiver:
    """A datagram socket (0600) at `path` and the thread that reads it; `take` gets each datagram, one at a time.

    `lock` is held while datagrams are handed on, for no more than a few milliseconds. Raises `OSError` if `path` cannot be
    bound; a socket that a dead agent left there is replaced.
    """

    def __init__(self, path: Path, *, take: Callable[[bytes], None], lock: threading.Lock) -> None:
        self._path = path
        self._take = take
        self._lock = lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            path.unlink(missing_ok=True)
            with reachable(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
        except OSError:
            self._socket.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._read, name="kdist-metrics-receiver", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Hand on what has arrived so far, a bounded number. The caller holds the lock."""
        for _ in range(_MOST_ROUNDS):
            if not self._drain_some():
                return

    def close(self) -> None:
        """Hand on what has arrived, stop reading, and take the socket away."""
        self._wake.send(b".")
        self._thread.join()
        with self._lock:
            self.drain()
        for end in (self._socket, self._wake, self._woken):
            end.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while self._woken.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
            with self._lock:
                self._drain_some()

    def _drain_some(self) -> bool:
        """Hand on a bounded number of datagrams; whether there may be more."""
        for _ in range(_MOST_AT_ONCE):
            try:
                datagram = self._socket.recv(MAX_RECORD + 1)
            except OSError:  # empty; anything else shows as records that stay away
                return False
            self._take(datagram)
        return True
