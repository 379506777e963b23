"""Undocumented parts of torch that the training loop and the strategies use, in one place.

A release of torch may change them: `tests/trainer/test_torch_internals.py` compares each with the
installed torch. What collectives, checkpoints and the rendezvous use is in the modules of the same
name in their packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Buffers of `module` itself, without those of its children; changes apply to the module."""
    return module._buffers


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Parameters of `module` itself, without those of its children; changes apply to the module."""
    return module._parameters


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers of `module` itself that no state dict has."""
    return module._non_persistent_buffers_set


def flatten_mesh(mesh: DeviceMesh, name: str) -> None:
    """Give `mesh` one more dimension, called `name`, of all its ranks."""
    mesh._flatten(name)


def restart_group_names() -> None:
    """Have the next process group named as the first one of a process is. torch numbers groups, the
    name is part of every key in the store, and a group that could not be formed keeps its number:
    the ranks of the next one would then wait for each other under different keys.
    """
    distributed_c10d._world.group_count = 0


GLOO_WORKER = "pt_gloo_runloop"
"""The name of the threads in which gloo's collectives run and wait; each group has two."""


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank is a member of, also those of the user's code."""
    known = distributed_c10d._world.pg_map
    return [group for group in known if isinstance(group, dist.ProcessGroup)]


def gloo_backend(group: dist.ProcessGroup) -> Any:
    """What runs the collectives of a group for tensors on the CPU. It goes on when torch has
    forgotten the group, and nobody observes it. Raises `RuntimeError` if there is none.
    """
    return group._get_backend(torch.device("cpu"))


def replace_rendezvous_store(open_store: Callable[..., TCPStore]) -> None:
    """Have `init_process_group` make its TCPStore by `open_store`, which gets torch's arguments."""
    # torch.distributed has a function of this name
    vars(import_module("torch.distributed.rendezvous")).update(TCPStore=open_store)


def observe_groups(on_formed: Callable[[int], object]) -> None:
    """Call `on_formed` with the number of its ranks after each process group that this process has
    become a member of, whoever asked for it: a script, a framework, a device mesh.
    """
    original = distributed_c10d._new_process_group_helper

    @wraps(original)
    def create(*arguments: Any, **named: Any) -> Any:
        made = original(*arguments, **named)
        if isinstance(made[0], dist.ProcessGroup):
            on_formed(made[0].size())
        return made

    vars(distributed_c10d).update({original.__name__: create})


_ASSIGN_BUCKETS = "_compute_bucket_assignment_by_size"


@contextmanager
def assigned_buckets(buckets: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """Have a `DistributedDataParallel` that is made within the `with` block reduce these buckets
    from its first backward pass on, not ones that it lays by the order of registration. The one
    that is reduced first comes first.
    """

    def assign(
        parameters: Sequence[Tensor], limits: Sequence[int], *_: Any
    ) -> tuple[list[list[int]], list[int]]:
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        assigned = [[numbers[parameter] for parameter in bucket] for bucket in buckets]
        return assigned[::-1], [limits[-1]] * len(assigned)  # DDP reverses both

    original = vars(dist)[_ASSIGN_BUCKETS]
    vars(dist)[_ASSIGN_BUCKETS] = assign
    try:
        yield
    finally:
        vars(dist)[_ASSIGN_BUCKETS] = original


def found_overflows(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Iterable[Tensor]:
    """Whether unscaling found an infinity or NaN: per device, a tensor of shape (1,) that is 0.0 or
    1.0 and may be changed.
    """
    return scaler._found_inf_per_device(optimizer).values()


def workers_of(batches: Iterator[Any]) -> list[Any]:
    """The worker processes of a `DataLoader`'s iterator."""
    return list(getattr(batches, "_workers", ()))


def queued_batches(batches: Iterator[Any]) -> int | None:
    """How many batches the worker processes of a `DataLoader`'s iterator have ready; None without
    worker processes, and on systems that cannot count.
    """
    queue = getattr(batches, "_data_queue", None)
    try:
        return int(queue.qsize()) if queue is not None else None
    except NotImplementedError:
        return None
