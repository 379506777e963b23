"""The three stores that hold the state of a rendezvous.

`FileStore` is for `kdist run`: a folder with one small file per key. torch's own FileStore appends
each write to a log in several pieces: an agent killed between two of them leaves a log that cannot
be read, and keep-alives grow it without limit. This store replaces a value by renaming a new file,
so any process may die at any instruction. Writers hold a lock, which the kernel releases when they
die.

`KubernetesStore` is for a cluster: one ConfigMap, which survives the loss of any agent and needs no
server of its own. Every change reads the ConfigMap and replaces it if it has not changed since
(compare-and-swap on its resourceVersion), so any number of agents may write at once, and any may
die at any instruction. One read serves all keys that this process waits for.

torch and the agents write keys for each round and remove none, so both stores remove those of old
rounds: the file store after the first key of a new round, which shows that the one before had been
complete; the ConfigMap, which holds at most 1 MiB, with its next change.

`open_tcp_store` opens torch's TCPStore, hosted by the agent that the address names, for jobs that
cannot have a Role. It listens at the agent's own address, in a process of its own, so that a flood
of connections does not harm the agent. It has no limits and authenticates nobody. If the agent that
hosts it is lost, so is the store: the other agents exit, and the job resumes when all are
restarted.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from kdist_trainer.distributed.hosted_store import listen
from kdist_trainer.processes.descriptors import spend
from kdist_trainer.rendezvous import store_process
from kdist_trainer.rendezvous.configmap_client import (
    JITTER,
    ApiRefusedError,
    ApiRejectedError,
    ApiUnavailableError,
    ConfigMap,
    ConflictError,
    Copy,
)
from kdist_trainer.torch_internals import TCPStore

_NUMBERED = re.compile(r"(torch\.rendezvous\..*\.|kdist/.*/generation/)(\d+)(?:/.*)?", re.DOTALL)


def split_number(key: str) -> tuple[str, int] | None:
    """The prefix of a key, and the number of its round or generation; None without a number."""
    match = _NUMBERED.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def find_old(keys: Iterable[str], *, kept: int) -> set[str]:
    """The keys of all but the `kept` newest rounds and generations."""
    numbered = {key: found for key in keys if (found := split_number(key)) is not None}
    newest: dict[str, int] = {}
    for prefix, number in numbered.values():
        newest[prefix] = max(number, newest.get(prefix, 0))
    return {key for key, (prefix, number) in numbered.items() if number <= newest[prefix] - kept}


POLL_SECONDS = 0.01
_FIRST_POLL_SECONDS = 0.001
_LOCK = "lock"
_KEPT_FILE_ROUNDS = 3
"""The round that begins, and the latest two complete ones."""
_REMOVAL_SECONDS = 2.0
"""How long after a round has begun the keys of old ones are removed."""


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
        """The newest number that this process has written, by the prefix of its key."""
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

    def _path(self, key: str) -> Path:
        return self.folder / f"={quote(key, safe='')}"

    def _read(self, key: str) -> bytes | None:
        if time.monotonic() > self._removes_at:
            self._removes_at = math.inf
            with suppress(OSError):  # what cannot be removed is left
                names = {unquote(each.name[1:]): each for each in self.folder.glob("=*")}
                for old in find_old(names, kept=_KEPT_FILE_ROUNDS):
                    names[old].unlink(missing_ok=True)
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
        # The first key of a round that this process writes has those of old rounds removed, a while
        # later, since the others wait for this key and the next ones.
        prefix, number = split_number(key) or ("", 0)
        if number > self._newest.get(prefix, 0):
            self._newest[prefix] = number
            self._removes_at = min(self._removes_at, time.monotonic() + _REMOVAL_SECONDS)

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
        """Hold the writers' lock; it excludes other threads too, since each opens the file."""
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
                    raise dist.DistStoreError(
                        f"wait timeout after {self._timeout_seconds * 1000:.0f}ms: another process "
                        f"holds the lock {self.folder / _LOCK}"
                    ) from None
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


MOST_BYTES = 1_000_000
_FRESH_SECONDS = 0.03
"""How long a copy serves further reads: torch reads each key separately."""
_STALE_SECONDS = 0.5
_WRITERS = "__writers"  # encode_key never returns this
_WRITER_BYTES, _MOST_WRITERS = 6, 128
_KEPT_CONFIGMAP_ROUNDS = 2

T = TypeVar("T")
Values = dict[str, bytes]


class StoreRefusedError(dist.DistStoreError):
    """The API server answers, but refuses what it has served before."""


class KubernetesStore(Store):
    """A `torch.distributed.Store` in `config_map`. Keys are str, values str or bytes; `get` returns
    bytes.

    `get` and `wait` raise `DistStoreError` if a key is not written within `timeout_seconds`. All
    operations raise it if the API server is unavailable or the store is full, `StoreRefusedError`
    if it refuses what it has served before, and `ConfigError` if it has rejected the requests from
    the start. Keys of the run `run_id` are kept if space runs short. While `get` and `wait` wait,
    they read every `poll_seconds`.
    """

    def __init__(
        self,
        config_map: ConfigMap,
        *,
        run_id: str,
        timeout_seconds: float = 30.0,
        poll_seconds: float = 0.1,
    ) -> None:
        super().__init__()
        self.config_map = config_map
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._poll_seconds = poll_seconds
        self._copy: Copy | None = None
        self._offered_at = -math.inf

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` to `value`."""
        self._change(lambda values: values.__setitem__(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until there is one."""
        return self._wait_for([key], self._timeout_seconds)[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, 0 if missing; returns the sum."""

        def edit(values: Values) -> int:
            total = int(values.get(key, b"0")) + amount
            values[key] = str(total).encode()
            return total

        return self._change(edit)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` to `desired` if its value is `expected`, or if it is missing and `expected` is
        empty; returns the value afterwards.
        """

        def edit(values: Values) -> bytes:
            if values.get(key, b"") != _bytes(expected):
                return values.get(key, _bytes(expected))
            values[key] = _bytes(desired)
            return values[key]

        return self._change(edit)

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of `key`."""
        self._change(lambda values: values.__setitem__(key, values.get(key, b"") + _bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return self._read().keys() >= set(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._wait_for(keys, self._timeout_seconds if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all keys, from one read; waits until all exist."""
        found = self._wait_for(keys, self._timeout_seconds)
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all keys to their values in one write."""
        fresh = {key: _bytes(value) for key, value in zip(keys, values, strict=True)}
        self._change(lambda held: held.update(fresh))

    def fetch(self, *, fresh_seconds: float = 0.0) -> Copy:
        """The ConfigMap as it was at most `fresh_seconds` ago."""
        copy = self._copy
        if copy is None or time.monotonic() - copy.time > fresh_seconds:
            copy = self._copy = _as_store_error(self.config_map.read)
        return copy

    def offer(self, copy: Copy) -> None:
        """Use a copy that another agent has read for the next reads, unless it is older than this
        store's: reads never go back in time.
        """
        held = self._copy
        if held is None or copy.version >= held.version:
            self._copy, self._offered_at = copy, time.monotonic()

    def _read(self, *, fresh_seconds: float = _FRESH_SECONDS) -> Values:
        if self._copy is not None and time.monotonic() - self._offered_at <= fresh_seconds:
            return _decode(self._copy.values)
        return _decode(self.fetch(fresh_seconds=fresh_seconds).values)

    def _change(self, edit: Callable[[Values], T]) -> T:
        """Let `edit` change the values in place, atomically; returns what it returned."""
        copy = self._copy
        is_current = False
        conflicts = 0
        if copy is not None and time.monotonic() - copy.time > _STALE_SECONDS:
            copy = None  # probably changed meanwhile: a read costs less than a conflict
        attempts: dict[bytes, T] = {}
        while True:
            if copy is None:
                copy = _as_store_error(self.config_map.read)
                is_current = True
                self._copy = copy
                ring = copy.values.get(_WRITERS, b"")
                for start in range(0, len(ring), _WRITER_BYTES):
                    writer = ring[start : start + _WRITER_BYTES]
                    if writer in attempts:  # an earlier write succeeded, and its response was lost
                        return attempts[writer]
            before = _decode(copy.values)
            values = dict(before)
            result = edit(values)
            if values == before:
                if is_current:
                    return result
                copy = None  # only the current values show that no change is needed
                continue
            writer = secrets.token_bytes(_WRITER_BYTES)
            attempts[writer] = result
            try:
                self._copy = self._replace(copy, values, writer)
                return result
            except ConflictError:
                conflicts += 1
                copy = None
                time.sleep(JITTER.uniform(0, min(0.01 * 2**conflicts, self._poll_seconds)))

    def _replace(self, copy: Copy, values: Values, writer: bytes) -> Copy:
        kept = prune(values, run_id=self._run_id)
        encoded = {encode_key(key): value for key, value in kept.items()}
        encoded[_WRITERS] = (writer + copy.values.get(_WRITERS, b""))[
            : _WRITER_BYTES * _MOST_WRITERS
        ]
        size = sum(len(key) + len(value) for key, value in encoded.items())
        if size > MOST_BYTES:
            raise dist.DistStoreError(
                f"ConfigMap {self.config_map.name} would hold {size} bytes, at most "
                f"{MOST_BYTES} fit"
            )
        return _as_store_error(lambda: self.config_map.replace(copy, encoded))

    def _wait_for(self, keys: Sequence[str], seconds: float) -> Values:
        deadline = time.monotonic() + seconds
        values = self._read()
        while missing := [key for key in keys if key not in values]:
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(missing)}"
                )
            time.sleep(JITTER.uniform(self._poll_seconds / 2, self._poll_seconds))
            values = self._read(fresh_seconds=self._poll_seconds / 2)
        return values


def encode_key(key: str) -> str:
    """Encode a key for a ConfigMap: each byte that is no letter, digit, dot or dash becomes `_` and
    two hexadecimal digits. Raises `ValueError` if the key is too long or empty.
    """
    encoded = re.sub(
        rb"[^A-Za-z0-9.-]", lambda match: b"_%02x" % ord(match[0]), key.encode()
    ).decode()
    if not 0 < len(encoded) <= 253 or encoded.startswith(".."):
        raise ValueError(f"a ConfigMap cannot hold the key {key!r}")
    return encoded


def decode_key(encoded: str) -> str:
    """Decode what `encode_key` returned."""
    return re.sub(
        rb"_([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), encoded.encode()
    ).decode(errors="replace")


def prune(values: Values, *, run_id: str) -> Values:
    """The values without those of old rounds and generations, and without those of other runs if
    space runs short.
    """
    old = find_old(values, kept=_KEPT_CONFIGMAP_ROUNDS)
    kept = {key: value for key, value in values.items() if key not in old}
    if sum(map(len, kept.values())) > MOST_BYTES / 2:
        ours = (f"torch.rendezvous.{run_id}", f"kdist/{run_id}/")
        kept = {key: value for key, value in kept.items() if key.startswith(ours)}
    return kept


def _decode(values: Mapping[str, bytes]) -> Values:
    return {decode_key(key): value for key, value in values.items() if key != _WRITERS}


def _as_store_error(request: Callable[[], Copy]) -> Copy:
    """Make the request; its errors are raised as `DistStoreError`, which torch handles."""
    try:
        return request()
    except ApiRefusedError as error:
        raise StoreRefusedError(str(error)) from error
    except (ApiUnavailableError, ApiRejectedError) as error:
        raise dist.DistStoreError(str(error)) from error


_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_RELEASED = "kdist/released"
_RELEASE_SECONDS = 10.0  # how long the host of the store waits for the others at the end


def open_tcp_store(
    host: str,
    port: int,
    *,
    node: str,
    address: str | None,
    timeout_seconds: float,
    retry_seconds: float,
) -> tuple[Store, bool]:
    """Open the store at `host`:`port`, for which to wait `retry_seconds`; this agent hosts it if
    `host` is its own. `address` is that at which this node's ranks listen; None means the host's
    name. The store's own operations wait `timeout_seconds`. Returns the store, and whether this
    agent hosts it.

    Raises:
        DistStoreError: If the store did not respond in time.
        OSError: If it was unreachable all the time.
    """
    deadline = time.monotonic() + retry_seconds
    is_host = False
    while True:
        try:
            if not is_host and is_own_host(host, node=node, address=address):
                is_host = _host(address or host, port)
            where = (address or host) if is_host else host
            # The host may not resolve yet and the port may be closed; torch itself would wait
            # without a message, or not at all.
            socket.create_connection((where, port), _CONNECT_SECONDS).close()
            wait = timedelta(seconds=timeout_seconds)
            store = TCPStore(where, port, is_master=False, timeout=wait, wait_for_workers=False)
            return store, is_host
        except (OSError, DistError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def release_store(store: Store, *, is_host: bool, agents: int) -> None:
    """Record that this agent no longer needs the store; if it is the host, it waits for the other
    `agents`.
    """
    deadline = time.monotonic() + _RELEASE_SECONDS
    with suppress(DistError):
        released = store.add(_RELEASED, 1)
        while is_host and released < agents and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            released = store.add(_RELEASED, 0)


def is_own_host(host: str, *, node: str, address: str | None) -> bool:
    """Whether `host` is this agent's: by its first label, or by the address that it resolves to."""
    if host.partition(".")[0] in (socket.gethostname().partition(".")[0], node):
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found & ({address} if address else {"127.0.0.1", "::1"}))


def _host(host: str, port: int) -> bool:
    """Host the store; False if the port is in use: by another agent on this host, or by a
    predecessor that is about to exit. Raises `OSError` if no process can be started.
    """
    try:
        listener = listen(host, port)
    except DistError:
        return False
    with listener:
        store_process.start(host, port, listener.fileno())
    return True
