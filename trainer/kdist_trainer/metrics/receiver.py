"""The Unix datagram socket on which an agent receives the records of its ranks."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kdist_trainer.metrics.reporter import short_address
from kdist_trainer.metrics.wire import MAX_RECORD
from kdist_trainer.threads import OnError, start_thread

_BATCH = 64
_MAX_BATCHES = 16


class Receiver:
    """A datagram socket and the thread that reads it."""

    def __init__(
        self, path: Path, *, on_datagram: Callable[[bytes], None], lock: threading.Lock
    ) -> None:
        """Bind the socket and start the thread. A socket that a dead agent left there is replaced.

        Args:
            path: Path of the socket, which gets mode 0600.
            on_datagram: Called with each datagram, one at a time.
            lock: Held during these calls, for a few milliseconds at most.

        Raises:
            OSError: The socket cannot be bound.
        """
        self._path = path
        self._on_datagram = on_datagram
        self._lock = lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            path.unlink(missing_ok=True)
            with short_address(path) as address:
                self._socket.bind(address)
            path.chmod(0o600)
        except OSError:
            self._socket.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = start_thread(
            self._run, name="kdist-metrics-receiver", on_error=OnError.RESTART
        )

    def drain(self) -> None:
        """Process the datagrams that have arrived, a bounded number. The caller holds the lock."""
        for _ in range(_MAX_BATCHES):
            if not self._read_batch():
                return

    def close(self) -> None:
        """Process what has arrived, stop the thread and remove the socket."""
        self._wake.send(b".")
        self._thread.join()
        with self._lock:
            self.drain()
        for end in (self._socket, self._wake, self._woken):
            end.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while self._woken.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
            with self._lock:
                self._read_batch()

    def _read_batch(self) -> bool:
        """Process a bounded number of datagrams. Returns whether there may be more."""
        for _ in range(_BATCH):
            try:
                datagram = self._socket.recv(MAX_RECORD + 1)
            except OSError:  # no more; any other error shows as missing records
                return False
            self._on_datagram(datagram)
        return True
