"""The ranks as checkpoints see them: small objects passed over a gloo group of their own.

Saves run on a thread beside the training; on a group of their own their messages cannot mix with the training's. The group's
time-out is long because a rank may rightly wait for another one's disk. A peer that dies is noticed at once all the same,
and one that hangs is the watchdog's business.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = timedelta(hours=6)


class Ranks(Protocol):
    """What is needed to know of the world; ranks count from 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int: ...


class Peers:
    """The ranks of one world. Every method is collective: all ranks call the same ones in the same order."""

    def __init__(self, world: Ranks) -> None:
        self.rank = world.rank
        self.size = world.size
        self.group: dist.ProcessGroup | None = None
        if self.size > 1:
            group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self.group = group if isinstance(group, dist.ProcessGroup) else None

    @property
    def is_leader(self) -> bool:
        """Rank 0, which commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """What `value` is on rank `source`."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]

    def on_leader(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0; every rank gets its result, or raises what it raised."""
        result: T | None = None
        error: Exception | None = None
        if self.is_leader:
            try:
                result = work()
            except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks must learn of it
                error = raised
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # no error, so it is the result

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank; every rank gets all results, or raises the lowest failing rank's error."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks must learn of it
            error = raised
        outcomes = self.gather((result, error))
        for _, problem in outcomes:
            if problem is not None:
                raise problem
        return [value for value, _ in outcomes]  # type: ignore[misc]  # no error, so all are results
