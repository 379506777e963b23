"""An agent's client of the exchange of a round.

torch's own client waits for a silent host without end, deaf to signals, and prints a page of C++
frames for each host that has exited.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from kdist_trainer.json_text import encode_json
from kdist_trainer.rendezvous.exchange import MAX_VALUES_BYTES, ExchangeHost
from kdist_trainer.untrusted_text import parse_json

_RESPONSE_SECONDS = 5.0
_CHECK_SECONDS = 0.1
_MAX_RESPONSE_BYTES = MAX_VALUES_BYTES + (1 << 20)


class HostEndedError(DistNetworkError):
    """The process that hosts an exchange has ended: it has closed the connection, or nothing
    listens at its port.
    """


class ExchangeStore(Store):
    """The exchange of one round, as a `torch.distributed.Store` without numbers and removals. Keys
    are str, values str or bytes; `get` returns bytes.

    All operations raise `DistNetworkError` if the host does not respond, `HostEndedError` if it has
    ended.

    Args:
        host: The host of the exchange.
        timeout_seconds: How long `get` and `wait` wait for a key.

    Raises:
        DistNetworkError: If the host cannot be reached.
    """

    def __init__(self, host: ExchangeHost, *, timeout_seconds: float) -> None:
        super().__init__()
        self.host = host
        self.while_waiting: Callable[[], None] | None = None
        """Called ten times a second while a key is waited for; an exception ends the wait and
        closes the store.
        """
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection((host.address, host.port), _RESPONSE_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(host.opening)
        except OSError as error:
            raise self._lost(error) from error
        self._stream = self._socket.makefile("rb")

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        return self.multi_get([key])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all keys to their values."""
        self._request({"set": dict(zip(keys, map(_text, values), strict=True))})

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys; waits until all exist."""
        return self._wait_for(keys, self._timeout_seconds)

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of all keys, None for those that do not exist."""
        found = self._request({"get": list(keys), "seconds": 0.0})
        return [None if value is None else value.encode("latin-1") for value in found]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return None not in self.peek(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._wait_for(keys, self._timeout_seconds if timeout is None else timeout.total_seconds())

    def has_extended_api(self) -> bool:
        """False: the store has none of torch's optional operations, such as queues."""
        return False

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()  # the socket stays open until its file is closed
        self._socket.close()

    def _wait_for(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        found = self._request({"get": list(keys), "seconds": seconds}, seconds)
        if missing := [key for key, value in zip(keys, found, strict=True) if value is None]:
            raise DistStoreError(
                f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(missing)}"
            )
        return [str(value).encode("latin-1") for value in found]

    def _request(self, request: dict[str, Any], seconds: float = 0.0) -> list[str | None]:
        line = encode_json(request).encode() + b"\n"
        with self._lock:
            try:
                self._socket.settimeout(seconds + _RESPONSE_SECONDS)
                self._socket.sendall(line)
                self._watch(seconds + _RESPONSE_SECONDS)
                response = self._stream.readline(_MAX_RESPONSE_BYTES)
                found: list[str | None] = parse_json(response)
            except (OSError, ValueError) as error:
                self.close()
                raise self._lost(error) from error
            except BaseException:
                # an exception of a signal handler: the response would be that of the next request
                self.close()
                raise
        return found

    def _watch(self, seconds: float) -> None:
        """Call `while_waiting`, if it is set, until there is a response, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while (
            self.while_waiting is not None
            and time.monotonic() < deadline
            and not connection.wait([self._socket], _CHECK_SECONDS)
        ):
            self.while_waiting()

    def _lost(self, error: Exception) -> DistNetworkError:
        has_ended = isinstance(error, ConnectionError | ValueError)
        reason = error if isinstance(error, OSError) else "the connection was closed"
        return (HostEndedError if has_ended else DistNetworkError)(
            f"the agent at {self.host.address}:{self.host.port}, which hosts the exchange of round "
            f"{self.host.round}, does not respond: {reason}"
        )


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")
