"""The store of `kdist run`: a folder with one small file per key, on a disk that all agents of the
job share.

torch's own FileStore appends each write to a log in several pieces: an agent killed between two of
them leaves a log that cannot be read, and keep-alives grow it without limit. This store replaces a
value by renaming a new file, so any process may die at any instruction. Writers take turns by a
lock, which the kernel releases when its holder dies. The first key of a round removes those of old
rounds: that it begins says that all nodes of the round before had come together.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote, unquote

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from kdist_trainer.descriptors import spend
from kdist_trainer.rendezvous.old_rounds import find_old, split_number

POLL_SECONDS = 0.01
_FIRST_POLL_SECONDS = 0.001
_LOCK = "lock"
_KEPT_FILE_ROUNDS = 3
"""The one that begins, and the two newest ones that were complete."""
_REMOVAL_SECONDS = 2.0
"""How long after a round has begun those before it are removed."""


class FileStore(Store):
    """A `torch.distributed.Store` in `folder`, which is created if missing. Keys are str, values
    str or bytes; `get` returns bytes.

    `get` and `wait` raise `DistStoreError` if a key is not written within `timeout_seconds`.
    Writers raise it if they do not get the lock in that time, or if the disk fails.
    """

    def __init__(self, folder: Path, *, timeout_seconds: float = 30.0) -> None:
        super().__init__()
        self.folder = folder
        self.while_waiting: Callable[[], None] | None = None
        """Called at each poll while a key is waited for; an exception ends the wait."""
        self._timeout_seconds = timeout_seconds
        self._newest: dict[str, int] = {}
        """By what is counted, the newest number that this process has written."""
        self._removes_at = math.inf
        """When the keys of old rounds are removed, a monotonic time."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        with self._locked():
            self._write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        value = self._read(key)
        if value is None:
            self._wait_for([key], self._timeout_seconds)
            value = self._read(key)
        return value or b""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, 0 if missing; returns the sum."""
        with self._locked():
            total = int(self._read(key) or b"0") + amount
            self._write(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if its value is `expected`, or if it is missing and `expected` is
        empty; returns the value afterwards.
        """
        with self._locked():
            value = self._read(key)
            if (value or b"") != _bytes(expected):
                return _bytes(expected) if value is None else value
            self._write(key, _bytes(desired))
        return _bytes(desired)

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of `key`."""
        with self._locked():
            self._write(key, (self._read(key) or b"") + _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._wait_for(keys, self._timeout_seconds if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys; waits until all exist."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each key to its value, in order."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """False: the store has none of torch's optional operations, such as queues."""
        return False

    def _path(self, key: str) -> Path:
        return self.folder / f"={quote(key, safe='')}"

    def _read(self, key: str) -> bytes | None:
        if time.monotonic() > self._removes_at:
            self._remove_old()
        try:
            return spend(self._path(key).read_bytes)
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        fresh = self.folder / f"new-{os.getpid()}-{threading.get_ident()}"
        try:
            spend(lambda: _write_private(fresh, value))
            fresh.replace(self._path(key))
        except OSError as error:
            # torch handles errors of a store, not those of a disk
            raise dist.DistStoreError(f"{key} cannot be written: {error}") from error
        self._note_round(key)

    def _note_round(self, key: str) -> None:
        """Have the keys of old rounds removed if `key` is the first one of its round that this
        process writes: not at once, since the others wait for this key and the next ones.
        """
        prefix, number = split_number(key) or ("", 0)
        if number > self._newest.get(prefix, 0):
            self._newest[prefix] = number
            self._removes_at = min(self._removes_at, time.monotonic() + _REMOVAL_SECONDS)

    def _remove_old(self) -> None:
        """Remove the keys of old rounds. What cannot be removed is left."""
        self._removes_at = math.inf
        with suppress(OSError):
            names = {unquote(each.name[1:]): each for each in self.folder.glob("=*")}
            for old in find_old(names, kept=_KEPT_FILE_ROUNDS):
                names[old].unlink(missing_ok=True)

    def _wait_for(self, keys: Sequence[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause = _FIRST_POLL_SECONDS
        while not self.check(keys):
            if time.monotonic() > deadline:
                missing = ", ".join(key for key in keys if not self.check([key]))
                raise dist.DistStoreError(
                    f"wait timeout after {seconds * 1000:.0f}ms, keys: {missing}"
                )
            if self.while_waiting is not None:
                self.while_waiting()
            time.sleep(pause)
            pause = min(POLL_SECONDS, 1.5 * pause)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the writers' lock, which excludes other threads too, as each opens the file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        handle = spend(lambda: os.open(self.folder / _LOCK, flags, 0o600))
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        """Take the lock. Raises `DistStoreError` if its holder keeps it beyond the time-out."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = 0.0
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


def _write_private(path: Path, value: bytes) -> None:
    """Write a file that only its owner may read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        while value:
            value = value[os.write(descriptor, value) :]
    finally:
        os.close(descriptor)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
