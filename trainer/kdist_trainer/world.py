"""The process group of a training: its size, this rank, its device and mesh, and a few collectives.

    with World.from_environment(timeout_seconds=300) as world:
        world.barrier()

Leaving the block waits for every rank and then destroys the process group: gloo aborts the process
when a peer's sockets close first, which would turn a success into SIGABRT. After an exception no
rank waits, so that the cause is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from kdist_trainer.errors import ConfigError


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, the whole of one that is not spread; without its history."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


_left: list[object] = []


@dataclass(frozen=True)
class World:
    """One rank's view of the group; ranks count from 0 to `size - 1`, generations from 1."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    generation: int
    device: torch.device
    backend: str
    timeout: timedelta
    model_parallel: int = 1
    """Ranks that share one copy of the model: neighbours, and so on one node where a node has that
    many.
    """

    @classmethod
    def from_environment(
        cls,
        *,
        timeout_seconds: float,
        model_parallel: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> World:
        """Join the group that torchrun's variables describe; without them, be a group of one.

        Raises `ConfigError` for a group that is no multiple of `model_parallel`, and what
        `init_process_group` raises when the others do not come within the time-out.
        """
        env = os.environ if environment is None else environment
        local_rank, local_size = (
            int(env.get("LOCAL_RANK", "0")),
            int(env.get("LOCAL_WORLD_SIZE", "1")),
        )
        device = _device(local_rank, local_size)
        world = cls(
            rank=int(env.get("RANK", "0")),
            size=int(env.get("WORLD_SIZE", "1")),
            local_rank=local_rank,
            local_size=local_size,
            generation=int(env.get("KDIST_GENERATION", "1")),
            device=device,
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_seconds),
            model_parallel=model_parallel,
        )
        if world.size % model_parallel:
            raise ConfigError(
                f"train.modelParallel: {model_parallel} ranks share one copy of the "
                f"model, and {world.size} ranks are no "
                "multiple of that: change nodes or procsPerNode"
            )
        world._open(env)
        return world

    def _open(self, env: Mapping[str, str]) -> None:
        alone = self.size == 1 and "MASTER_ADDR" not in env
        device = self.device if self.device.type == "cuda" else None
        dist.init_process_group(
            self.backend,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            device_id=device,
            store=HashStore() if alone else None,
        )

    @property
    def is_leader(self) -> bool:
        """Rank 0: the one that writes what is written once."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Copies of the model in the group: the samples of a step are dealt to so many."""
        return self.size // self.model_parallel

    @property
    def data_rank(self) -> int:
        """Which of these copies this rank has a part in; all ranks of one copy read the same
        samples.
        """
        return self.rank // self.model_parallel

    @property
    def model_rank(self) -> int:
        """Which part of the copy is this rank's."""
        return self.rank % self.model_parallel

    def mesh(self) -> DeviceMesh:
        """The group as a table: a row for each copy of the model (`data`), a column for each part
        (`model`). Collective.
        """
        mesh = init_device_mesh(
            self.device.type,
            (self.data_size, self.model_parallel),
            mesh_dim_names=("data", "model"),
        )
        mesh._flatten("all")  # a sum over both dimensions is then one operation
        return mesh

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        """What `value` is on rank `source`, on every rank (pickled: among the ranks of one job
        only).
        """
        box = [value]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks (pickled: among the ranks of one job
        only).
        """
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def new_group(self, backend: str = "gloo") -> dist.ProcessGroup:
        """Another group of the same ranks, for traffic that must not queue behind the training's.
        Collective.
        """
        group = dist.new_group(backend=backend, timeout=self.timeout)
        assert isinstance(group, dist.ProcessGroup)  # noqa: S101 - every rank is a member
        return group

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            leave()


def leave() -> None:
    """Wait for every rank, then take the group down. Collective.

    The group object is kept to the process's end. Whoever lets go of it last - a DDP module, often
    - joins gloo's threads with the interpreter's lock in hand, and one of them may wait for that
    lock: a collective after a backward pass holds a Python object (torch 2.13). The training was
    over, and hung.
    """
    dist.barrier()
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()


def _device(local_rank: int, local_size: int) -> torch.device:
    """A GPU of its own for each rank, else the CPU: NCCL refuses two ranks on one GPU."""
    if torch.cuda.is_available() and local_size <= torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
