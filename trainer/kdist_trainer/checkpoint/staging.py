"""The copy of the state that is saved while the training goes on, and who of the ranks saves what.

With `ddp` every rank holds the same tensors, so each stages and writes only its share: the training stands still for 1/N of
the time that one rank would need for all. The memory of the copies is kept from one save to the next.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

Paths = dict[str, tuple[str | int, ...]]


class Stager:
    """Copies this rank's share of a state into CPU memory that it owns."""

    def __init__(self, *, rank: int, size: int) -> None:
        """With `size` 1 the share is everything; `size` 0 means that this rank saves nothing."""
        self._rank = rank
        self._size = size
        self._buffers: dict[str, Any] = {}
        self._layout: dict[str, Any] = {}

    def stage(self, state: Mapping[str, Any], *, first: Collection[str] = ()) -> tuple[dict[str, Any], Paths]:
        """Copy the share now; when this returns the state may change again.

        `first`: flat names of whole tensors in which ranks may differ: rank 0's are saved, all of one rank.

        Returns the copies by flat name (`model.fc.weight`), and for each the path of keys that leads to it. They stay valid
        until the next call. Raises `ValueError` for values that a checkpoint cannot hold.
        """
        if self._size == 0:
            return {}, {}
        flat, paths = flatten_state_dict(dict(state))
        share = {name: flat[name] for name in _share(flat, self._rank, self._size, first)}
        tensors = {name: value for name, value in share.items() if isinstance(value, Tensor)}
        layout = {name: (value.shape, value.dtype, value.device) for name, value in tensors.items()}
        on_gpu = any(value.is_cuda for value in tensors.values())
        with torch.no_grad():
            if layout != self._layout:
                self._buffers = _create_cpu_state_dict(tensors, pin_memory=on_gpu)
                self._layout = layout
            copies = _copy_state_dict(tensors, self._buffers, non_blocking=on_gpu)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            copies |= {name: _copied(value, name) for name, value in share.items() if name not in tensors}
        return copies, {name: tuple(paths[name]) for name in share}


def _share(flat: Mapping[str, Any], rank: int, size: int, first: Collection[str] = ()) -> list[str]:
    """Names that this rank saves, in the state's order; every rank comes to the same division without asking.

    Whole tensors are dealt by size, the largest first, each to the rank that has least. Shards of a sharded tensor stay where
    they are; what is no tensor goes to rank 0, and so do those named in `first`.
    """
    load = [(0, one) for one in range(size)]
    owner = {name: 0 if not isinstance(value, DTensor) else rank for name, value in flat.items()}
    dealt = [name for name, value in flat.items() if isinstance(value, Tensor) and not isinstance(value, DTensor)]
    whole = [(flat[name].nbytes, name) for name in dealt if name not in first]
    for nbytes, name in sorted(whole, key=lambda one: (-one[0], one[1])):
        taken, lightest = heapq.heappop(load)
        owner[name] = lightest
        heapq.heappush(load, (taken + nbytes, lightest))
    return [name for name in flat if owner[name] == rank]


def _copied(value: Any, name: str) -> Any:
    """A copy of a value that is no tensor, limited to what the reader's `weights_only` will give back."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copied(one, name) for one in value)
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _copied(one, name) for key, one in value.items()})
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, texts or tensors")
