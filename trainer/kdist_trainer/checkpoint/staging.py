"""Copies a rank's share of a state into CPU memory, so that the training may change the state while
the copy is written.

With `ddp` every rank holds the same tensors, so each rank copies and writes only its share, and
training pauses for 1/N of the time that one rank would need for all of them. The buffers are reused
from one save to the next.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kdist_trainer.checkpoint import torch_internals
from kdist_trainer.checkpoint.torch_internals import KeyPath
from kdist_trainer.checkpoint.values import check_tensor, copy_value

Paths = dict[str, KeyPath]
"""By flat name, the keys that lead to a value."""


class Stager:
    """Copies this rank's share of a state into CPU memory that it owns."""

    def __init__(self, *, rank: int, size: int) -> None:
        """Save share `rank` of `size`: all of the state if `size` is 1, nothing if it is 0."""
        self._rank = rank
        self._size = size
        self._buffers: dict[str, Any] = {}
        self._layout: dict[str, Any] = {}

    def stage(
        self, state: Mapping[str, Any], *, first: Collection[str] = ()
    ) -> tuple[dict[str, Any], Paths]:
        """Copy the share now; when this returns the state may change again.

        Args:
            state: the nested state.
            first: flat names of whole tensors that differ between ranks and are saved from rank 0.

        Returns:
            The copies by flat name (`model.fc.weight`), valid until the next call, and for each the
            path of keys that leads to it.

        Raises:
            UnloadableStateError: a checkpoint cannot hold a value of this type.
        """
        if self._size == 0:
            return {}, {}
        flat, paths = torch_internals.flatten(state)
        for name, value in flat.items():
            if isinstance(value, Tensor):
                check_tensor(value, name)
        share = {name: flat[name] for name in _share(flat, self._rank, self._size, first)}
        tensors = {name: value for name, value in share.items() if isinstance(value, Tensor)}
        layout = {name: (value.shape, value.dtype, value.device) for name, value in tensors.items()}
        on_gpu = any(value.is_cuda for value in tensors.values())
        with torch.no_grad():
            if layout != self._layout:
                self._buffers = torch_internals.allocate_on_cpu(tensors, pin_memory=on_gpu)
                self._layout = layout
            copies = torch_internals.copy_to_cpu(tensors, self._buffers, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            copies |= {
                name: copy_value(value, name)
                for name, value in share.items()
                if name not in tensors
            }
        return copies, {name: paths[name] for name in share}


def _share(flat: Mapping[str, Any], rank: int, size: int, first: Collection[str] = ()) -> list[str]:
    """Names that this rank saves, in the state's order; every rank computes the same division.

    Whole tensors are assigned by size, the largest first, each to the rank with the fewest bytes.
    Shards of a sharded tensor stay on their ranks. Values other than tensors, and the tensors in
    `first`, go to rank 0.
    """
    load = [(0, one) for one in range(size)]
    owner = {name: 0 if not isinstance(value, DTensor) else rank for name, value in flat.items()}
    whole = [
        name
        for name, value in flat.items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
    ]
    sizes = [(flat[name].nbytes, name) for name in whole if name not in first]
    for nbytes, name in sorted(sizes, key=lambda one: (-one[0], one[1])):
        assigned, lightest = heapq.heappop(load)
        owner[name] = lightest
        heapq.heappush(load, (assigned + nbytes, lightest))
    return [name for name in flat if owner[name] == rank]
