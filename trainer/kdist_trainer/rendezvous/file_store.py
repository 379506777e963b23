"""The store of `kdist run`: a folder with one small file per key, on a disk that all agents of the
job share.

torch's own FileStore keeps a log that every write appends to in several pieces: an agent killed
between two of them leaves a log that nobody can read, and keep-alives grow it for ever. Here a
value is replaced by renaming a whole new file, so any process may die at any instruction; writers
take turns by a lock which the kernel lets go when its holder dies.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist
from torch._C._distributed_c10d import Store

POLL_SECONDS = 0.01
_LOCK = "lock"


class FileStore(Store):
    """`torch.distributed.Store` in `folder`, which is made if missing. Keys and values are str or
    bytes, `get` gives bytes.

    `get` and `wait` raise `DistStoreError` when the key does not come within `timeout_seconds`,
    writers when they do not get their turn within it, or the disk refuses.
    """

    def __init__(self, folder: Path, *, timeout_seconds: float = 30.0) -> None:
        super().__init__()
        self.folder = folder
        self.while_waiting: Callable[[], None] | None = None
        """Called again and again while a key is waited for; what it raises ends the wait."""
        self._timeout_seconds = timeout_seconds
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Let `key` hold `value`."""
        with self._turn():
            self._write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        value = self._read(key)
        if value is None:
            self._await([key], self._timeout_seconds)
            value = self._read(key)
        return value or b""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, 0 if missing; returns the sum."""
        with self._turn():
            total = int(self._read(key) or b"0") + amount
            self._write(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Let `key` hold `desired` if it holds `expected`, or is missing and `expected` is empty;
        returns what it holds then.
        """
        with self._turn():
            value = self._read(key)
            if (value or b"") != _bytes(expected):
                return _bytes(expected) if value is None else value
            self._write(key, _bytes(desired))
        return _bytes(desired)

    def append(self, key: str, value: str | bytes) -> None:
        """Add `value` to the end of what `key` holds."""
        with self._turn():
            self._write(key, (self._read(key) or b"") + _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._await(keys, self._timeout_seconds if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys; waits until there are all."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each key to its value, in order."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Queues and the like are not offered."""
        return False

    def _path(self, key: str) -> Path:
        return self.folder / f"={quote(key, safe='')}"

    def _read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        fresh = self.folder / f"new-{os.getpid()}-{threading.get_ident()}"
        try:
            fresh.write_bytes(value)
            fresh.replace(self._path(key))
        except OSError as error:
            # torch's callers bear with a store that fails, not with a disk that does
            raise dist.DistStoreError(f"{key} cannot be written: {error}") from error

    def _await(self, keys: Sequence[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = ", ".join(key for key in keys if not self.check([key]))
                raise dist.DistStoreError(
                    f"wait timeout after {seconds * 1000:.0f}ms, keys: {missing}"
                )
            if self.while_waiting is not None:
                self.while_waiting()
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock: one writer at a time, among threads too, as each opens the file anew."""
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        """Take the lock. A holder that is stopped keeps it: raises `DistStoreError` when the
        time-out is over.
        """
        deadline, pause = time.monotonic() + self._timeout_seconds, 0.0
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = (
                        f"wait timeout after {self._timeout_seconds * 1000:.0f}ms: another "
                        "process holds"
                    )
                    raise dist.DistStoreError(f"{message} the lock {self.folder / _LOCK}") from None
            time.sleep(pause)
            pause = min(POLL_SECONDS, pause + POLL_SECONDS / 10)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
