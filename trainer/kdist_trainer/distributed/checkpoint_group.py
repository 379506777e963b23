"""The process group of checkpoints, in which ranks exchange small objects and broadcast state.

Saves run in a background thread, so their messages use a gloo group of their own, with a long
timeout because a rank may wait for another rank's disk. In a broadcast one rank reads whole tensors
and sends them in flat buckets through CPU memory, and each rank keeps its shard; no rank holds the
state twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from kdist_trainer.distributed import group_abort

T = TypeVar("T")
_TIMEOUT = timedelta(hours=6)


class RankInfo(Protocol):
    """The part of `World` that checkpoints need; ranks count from 0."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def generation(self) -> int: ...


class CheckpointGroup:
    """All ranks of one world. Every method is collective: all ranks call the same ones in the same
    order.
    """

    def __init__(self, world: RankInfo, *, has_connections: bool = True) -> None:
        """Make the group. Collective. `has_connections` says whether it has connections of its own,
        for use by another thread while the training communicates.
        """
        self.rank = world.rank
        self.size = world.size
        self.process_group: dist.ProcessGroup | None = None
        if self.size > 1 and has_connections:
            if group_abort.is_enabled():
                dist.barrier()  # see `wait_for_ranks` in `kdist_trainer.distributed.world`
            self.process_group = group_abort.make_group(
                lambda timeout: dist.new_group(backend="gloo", timeout=timeout), _TIMEOUT
            )

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0, which commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """The `value` of rank `source`, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.process_group)
        return box[0]

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 only; every rank returns its result or raises its error."""
        result, error = self.broadcast(_attempt(work) if self.is_rank_zero else (None, None))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # no error, so it is the result

    def on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Call `work` on every rank; every rank returns all results, by rank, or raises the error
        of the lowest rank that failed: callers do the same on all ranks by its type. With the own
        traceback, if this rank has failed alike.
        """
        own = _attempt(work)
        outcomes = self.gather(own)
        for _, problem in outcomes:
            if problem is not None:
                if type(own[1]) is type(problem):
                    problem.with_traceback(own[1].__traceback__)
                raise problem
        return [value for value, _ in outcomes]  # type: ignore[misc]  # no error, so all are results


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `work` returns or raises, to be sent to all ranks."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - every error is sent to all ranks
        return None, error


BUCKET_BYTES = 64 << 20
_LEAST_BYTES = 1 << 20
"""About how much `broadcast_state` sends at a time at least; larger tensors are sent uncopied."""

Fetch = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Reads tensors by their names, whole and on the CPU; called on the source rank only."""


class _Layout(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def broadcast_state(state: dict[str, Any], group: CheckpointGroup, *, source: int) -> None:
    """Copy the state of rank `source` to all ranks: values by flat name, and whole tensors, in
    place. What `source` has and another rank lacks is ignored there. Collective.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    if group.size == 1:
        return
    own = {name: _Layout(value.shape, value.dtype) for name, value in tensors.items()}
    found, layouts = group.broadcast((others, own), source=source)
    state.update(found)
    for names in buckets(layouts, _LEAST_BYTES):
        view = _flat_view(tensors, names, layouts)
        flat = view
        if flat is None and group.rank == source:
            flat = _flatten({name: tensors[name].detach().cpu() for name in names}, names, layouts)
        elif flat is None:
            flat = _allocate(names, layouts)
        dist.broadcast(flat, src=source, group=group.process_group)
        if view is None and group.rank != source:
            _fill_from(tensors, names, layouts, flat)


def send(
    tensors: Mapping[str, Tensor],
    fetch: Fetch,
    group: CheckpointGroup,
    *,
    source: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Fill the tensors of every rank in place with those that rank `source` reads, whole and about
    `bucket_bytes` at a time. Ranks may have different names, and parts of tensors. Every rank
    raises what `fetch` raises on `source`, and some tensors are filled then. Collective.
    """
    layouts: dict[str, _Layout] = {}
    for each in group.gather(
        {name: _Layout(value.shape, value.dtype) for name, value in tensors.items()}
    ):
        layouts |= each
    for names in buckets(layouts, bucket_bytes):
        flat, error = None, None
        if group.rank == source:
            try:
                flat = _flatten(fetch(names), names, layouts)
            except Exception as raised:  # noqa: BLE001 - every error is sent to all ranks
                error = raised
        error = group.broadcast(error, source=source)
        if error is not None:
            raise error
        if flat is None:
            flat = _allocate(names, layouts)
        if group.size > 1:
            dist.broadcast(flat, src=source, group=group.process_group)
        _fill_from(tensors, names, layouts, flat)


def buckets(layouts: Mapping[str, _Layout], max_bytes: int) -> Iterator[list[str]]:
    """Divide tensors into buckets of one dtype and about `max_bytes`, from which on a bucket takes
    no further tensor, the same on every rank. Yields the names in a bucket.
    """
    bucket: list[str] = []
    size = 0
    for name in sorted(layouts, key=lambda one: (str(layouts[one].dtype), one)):
        other_type = bool(bucket) and layouts[name].dtype != layouts[bucket[0]].dtype
        if bucket and (other_type or size + layouts[name].nbytes > max_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += layouts[name].nbytes
    if bucket:
        yield bucket


def fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor on the CPU into this rank's part of it, on any device."""
    with torch.no_grad():
        held = target.detach()
        if isinstance(held, DTensor):
            # Without a source rank each rank slices the whole tensor and nothing is sent.
            part = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(part.to_local())
        else:
            held.copy_(whole)


def _flat_view(
    tensors: Mapping[str, Tensor], names: Sequence[str], layouts: Mapping[str, _Layout]
) -> Tensor | None:
    """The memory of a bucket's only tensor, to send from or receive into; None if the bucket has
    more, or the tensor is not on the CPU in one piece.
    """
    if len(names) > 1 or names[0] not in tensors:
        return None
    held = tensors[names[0]].detach()
    if isinstance(held, DTensor) or held.device.type != "cpu" or not held.is_contiguous():
        return None
    return held.view(-1) if (held.shape, held.dtype) == layouts[names[0]] else None


def _allocate(names: Sequence[str], layouts: Mapping[str, _Layout]) -> Tensor:
    elements = sum(layouts[name].shape.numel() for name in names)
    return torch.empty(elements, dtype=layouts[names[0]].dtype)


def _flatten(
    found: Mapping[str, Tensor], names: Sequence[str], layouts: Mapping[str, _Layout]
) -> Tensor:
    if len(names) == 1:
        return found[names[0]].reshape(-1).to(layouts[names[0]].dtype).contiguous()
    return torch.cat([found[name].reshape(-1).to(layouts[name].dtype) for name in names])


def _fill_from(
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    layouts: Mapping[str, _Layout],
    flat: Tensor,
) -> None:
    start = 0
    for name in names:
        count = layouts[name].shape.numel()
        if name in tensors:
            fill(tensors[name], flat[start : start + count].view(layouts[name].shape))
        start += count
