"""One rank reads a state, all have it: whole tensors travel in flat buckets, and each rank keeps what it holds of them.

The reading rank fetches a bucket at a time, so that nobody ever has the state twice; everything passes through CPU memory, so
that no GPU, and never one GPU for all ranks, holds what it does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from kdist_trainer.checkpoint.peers import Peers

BUCKET_BYTES = 64 << 20

Fetch = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Names of tensors -> the whole tensors, on the CPU. Asked on the reading rank only."""


class _Layout(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def broadcast_state(state: dict[str, Any], peers: Peers, *, source: int) -> None:
    """Make the flat `state` of every rank equal to that of rank `source`, tensors in place. Collective.

    All ranks must have the same names, shapes and dtypes, and whole tensors.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    state.update(peers.broadcast(others, source=source))
    send(tensors, lambda names: {name: tensors[name].detach().cpu() for name in names}, peers, source=source)


def send(tensors: Mapping[str, Tensor], fetch: Fetch, peers: Peers, *, source: int = 0, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Fill the tensors of every rank, in place, with what `fetch` gives on rank `source`. Collective.

    A rank may hold other names than the others, or parts of tensors only. Raises on every rank what `fetch` raised on its one;
    some tensors are filled then and some are not.
    """
    layouts: dict[str, _Layout] = {}
    for each in peers.gather({name: _Layout(value.shape, value.dtype) for name, value in tensors.items()}):
        layouts |= each
    for names in buckets(layouts, bucket_bytes):
        flat, error = None, None
        if peers.rank == source:
            try:
                flat = _flatten(fetch(names), names, layouts)
            except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks must learn of it
                error = raised
        error = peers.broadcast(error, source=source)
        if error is not None:
            raise error
        if flat is None:
            flat = torch.empty(sum(layouts[name].shape.numel() for name in names), dtype=layouts[names[0]].dtype)
        if peers.size > 1:
            dist.broadcast(flat, src=source, group=peers.group)
        _take(tensors, names, layouts, flat)


def buckets(layouts: Mapping[str, _Layout], most_bytes: int) -> Iterator[list[str]]:
    """Names of tensors of one dtype, together about `most_bytes`, in an order that is the same on every rank."""
    bucket: list[str] = []
    size = 0
    for name in sorted(layouts, key=lambda one: (str(layouts[one].dtype), one)):
        other_type = bool(bucket) and layouts[name].dtype != layouts[bucket[0]].dtype
        if bucket and (other_type or size + layouts[name].nbytes > most_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += layouts[name].nbytes
    if bucket:
        yield bucket


def fill(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, on the CPU, into what this rank holds of it, wherever that is."""
    with torch.no_grad():
        held = target.detach()
        if isinstance(held, DTensor):
            # Without a source rank every rank cuts its own part out, and nothing is sent.
            part = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(part.to_local())
        else:
            held.copy_(whole)


def _flatten(found: Mapping[str, Tensor], names: Sequence[str], layouts: Mapping[str, _Layout]) -> Tensor:
    if len(names) == 1:
        return found[names[0]].reshape(-1).to(layouts[names[0]].dtype).contiguous()
    return torch.cat([found[name].reshape(-1).to(layouts[name].dtype) for name in names])


def _take(tensors: Mapping[str, Tensor], names: Sequence[str], layouts: Mapping[str, _Layout], flat: Tensor) -> None:
    start = 0
    for name in names:
        count = layouts[name].shape.numel()
        if name in tensors:
            fill(tensors[name], flat[start : start + count].view(layouts[name].shape))
        start += count
