"""The store of a job in a cluster: one ConfigMap, which survives the loss of any agent and needs no
server of its own.

Every change reads the ConfigMap and replaces it if it has not changed since (compare-and-swap on
its resourceVersion), so any number of agents may write at once, and any may die at any instruction.
One read serves all keys that this process waits for. Keys of old rounds are dropped with the next
change, since an object in Kubernetes holds at most a mebibyte.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from kdist_trainer.rendezvous.configmap_client import (
    ApiRefusedError,
    ApiRejectedError,
    ApiUnavailableError,
    ConfigMap,
    ConflictError,
    Copy,
)
from kdist_trainer.rendezvous.old_rounds import find_old
from kdist_trainer.rendezvous.configmap_client import JITTER

MOST_BYTES = 1_000_000
_FRESH_SECONDS = 0.03
"""How long a copy serves further reads: torch reads each key by itself."""
_STALE_SECONDS = 0.5
_WRITERS = "__writers"  # encode_key never returns this
_WRITER_BYTES, _MOST_WRITERS = 6, 128
_KEPT_CONFIGMAP_ROUNDS = 2

T = TypeVar("T")
Values = dict[str, bytes]


class StoreRefusedError(dist.DistStoreError):
    """The API server answers, and refuses what it has served before."""


class KubernetesStore(Store):
    """A `torch.distributed.Store` in `config_map`. Keys are str, values str or bytes; `get` returns
    bytes.

    `get` and `wait` raise `DistStoreError` if a key is not written within `timeout_seconds`. All
    operations raise it if the API server is unavailable or the store is full, `StoreRefusedError`
    if it refuses what it has served before, and `ConfigError` if it has rejected the requests from
    the start.

    Args:
        config_map: The client.
        run_id: The run whose keys are kept if space runs short.
        timeout_seconds: How long `get` and `wait` wait for a key.
        poll_seconds: The interval of reads while they wait.
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

    def delete_key(self, key: str) -> bool:
        """Remove `key`; returns whether it existed."""
        return self._change(lambda values: values.pop(key, None) is not None)

    def num_keys(self) -> int:
        """The number of keys."""
        return len(self._read())

    def has_extended_api(self) -> bool:
        """False: the store has none of torch's optional operations, such as queues."""
        return False

    def limit_refusals(self, seconds: float) -> None:
        """Have operations raise `StoreRefusedError` once the API server has refused for so long."""
        self.config_map.refused_seconds = seconds

    def fetch(self, *, fresh_seconds: float = 0.0) -> Copy:
        """The ConfigMap as it was at most `fresh_seconds` ago."""
        copy = self._copy
        if copy is None or time.monotonic() - copy.time > fresh_seconds:
            copy = self._copy = _as_store_error(self.config_map.read)
        return copy

    def offer(self, copy: Copy) -> None:
        """Have a copy that another agent has read serve the next reads, unless it is older than
        this store's: what this agent has seen or written stays seen.
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
                for writer in _writers(copy.values):
                    if writer in attempts:  # an earlier write succeeded, and its response was lost
                        return attempts[writer]
            before = _decode(copy.values)
            values = dict(before)
            result = edit(values)
            if values == before:
                if is_current:
                    return result
                copy = None  # only the current values show that nothing is to be changed
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
    two hexadecimal digits.

    Raises:
        ValueError: If the key is too long or empty.
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


def _writers(values: Mapping[str, bytes]) -> list[bytes]:
    ring = values.get(_WRITERS, b"")
    return [ring[start : start + _WRITER_BYTES] for start in range(0, len(ring), _WRITER_BYTES)]


def _as_store_error(request: Callable[[], Copy]) -> Copy:
    """Make the request; its errors are raised as `DistStoreError`, which torch handles."""
    try:
        return request()
    except ApiRefusedError as error:
        raise StoreRefusedError(str(error)) from error
    except (ApiUnavailableError, ApiRejectedError) as error:
        raise dist.DistStoreError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
