"""The process group of a training: its size, this rank, its device and mesh, and a few collectives.

    with World.from_environment(timeout_seconds=300) as world:
        world.barrier()

Leaving the block waits for every rank and then destroys the process group: gloo aborts the process
when a peer's sockets close first, which would turn a success into SIGABRT. After an exception no
rank waits, so that the cause is reported at once.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from kdist_trainer.distributed import devices, group_abort
from kdist_trainer.distributed.hosted_store import HostedStore
from kdist_trainer.distributed.left_groups import LeftGroup, left
from kdist_trainer.errors import ConfigError, DeviceFaultError
from kdist_trainer.torch_internals import (
    HashStore,
    TCPStore,
    all_groups,
    flatten_mesh,
    restart_group_names,
)

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""The type of `sys.excepthook`."""


def to_local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the whole of any other tensor; detached."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


_hosted: list[HostedStore] = []
"""The stores of this rank's groups."""
_GPUS = "KDIST_GPUS"  # of the agent: how many the job asks for on this node
_destroyed: list[object] = []
_plain_hook: list[ExceptHook] = []
"""What printed this process's last error before torch's hook for it, and torch's."""
_FIRST_RETRY_SECONDS, _RETRY_SECONDS = 0.001, 0.016
_CONNECT_TIMEOUT = timedelta(seconds=1)
"""Timeout of one try to connect, within which torch cannot be interrupted."""


@dataclass(frozen=True)
class World:
    """One rank's view of the worker group; ranks count from 0, generations (restarts) from 1."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    generation: int
    device: torch.device
    backend: str
    timeout: timedelta
    model_parallel: int = 1
    """Consecutive ranks that share one model replica, on one node if a node has that many."""

    @classmethod
    def from_environment(
        cls,
        *,
        timeout_seconds: float,
        model_parallel: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> World:
        """Join the process group that torchrun's variables describe, by default those of the
        process; without them, a group of one. `model_parallel` ranks share one model replica.

        Raises:
            ConfigError: If the group's size is not a multiple of `model_parallel`.
            DeviceFaultError: If GPUs that the job asks for are missing, or some ranks of the group
                have GPUs and others have none.
            DistError: If the other ranks do not join within the timeout.
        """
        env = os.environ if environment is None else environment
        local_rank, local_size = (
            int(env.get("LOCAL_RANK", "0")),
            int(env.get("LOCAL_WORLD_SIZE", "1")),
        )
        device = _device(local_rank, local_size, env)
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
        alone = self.size == 1
        device = self.device if self.device.type == "cuda" else None
        # The former group may have been aborted once more after it was destroyed. A request to
        # leave this one already is not lost: it aborts again and again.
        group_abort.reset()
        with group_abort.recording():
            store = HashStore() if alone else self._open_store(env)
            if not alone:
                wait_for_ranks(store, self.size, self.timeout)
                self._check_backend(store)
        for hosted in _hosted:
            # NCCL opens connections of its own to the store, of each group
            hosted.refuse_newcomers(admit_members=device is not None)

        def init(timeout: timedelta) -> Any:
            # torch adds a hook for each group, around the others, which puts the rank before each
            # line of a last error: after a thousand groups there would be no error to read
            if _plain_hook and sys.excepthook is _plain_hook[1]:
                sys.excepthook = _plain_hook[0]
            before = sys.excepthook
            dist.init_process_group(
                self.backend,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                device_id=device,
                store=store,
            )
            _plain_hook[:] = [before, sys.excepthook]
            return dist.group.WORLD

        group_abort.make_group(init, self.timeout, connects_later=device is not None)

    def _check_backend(self, store: Store) -> None:
        """Raise `DeviceFaultError` if another rank has another kind of device: NCCL and gloo would
        wait for each other.
        """
        own = self.device.type
        first = store.compare_set("kdist/device", "", own).decode()
        if first != own:
            raise DeviceFaultError(
                f"rank {self.rank} would train on {own}, and other ranks of its group on {first}: "
                "a node has fewer GPUs than ranks"
            )

    def _open_store(self, env: Mapping[str, str]) -> TCPStore:
        """The store of the group, which rank 0 starts, unless torchrun's agent has."""
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        if self.rank > 0 or env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return connect_store(host, port, size=self.size, timeout=self.timeout)
        hosted = HostedStore(host, port, size=self.size, timeout=self.timeout)
        _hosted.append(hosted)
        return hosted.store

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of model replicas, over which the samples of a step are split."""
        return self.size // self.model_parallel

    @property
    def data_rank(self) -> int:
        """The model replica that this rank is part of; all ranks of a replica read the same
        samples.
        """
        return self.rank // self.model_parallel

    @property
    def model_rank(self) -> int:
        """Number of this rank within its model replica."""
        return self.rank % self.model_parallel

    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh: a row for each model replica (`data`), a column for each part of it
        (`model`). Collective.
        """
        mesh = init_device_mesh(
            self.device.type,
            (self.data_size, self.model_parallel),
            mesh_dim_names=("data", "model"),
        )
        flatten_mesh(mesh, "all")  # so that a sum over both dimensions is one operation
        return mesh

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier()

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        """The `value` of rank `source`, on every rank. Pickled, so only for ranks of one job."""
        box = [value]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """The `value` of every rank, in rank order. Pickled, so only for ranks of one job."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            leave()


def connect_store(host: str, port: int, *, size: int, timeout: timedelta) -> TCPStore:
    """Connect to the store that rank 0 starts, and wait for it at most `timeout`, which is also
    that of the store's operations afterwards. torch would wait too, but cannot be interrupted in it
    when rank 0 is lost before, or while it connects.

    Raises:
        PeersLostError: If the agent asks this rank to leave the group.
        DistError: If the store cannot be reached within the timeout.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    pause = _FIRST_RETRY_SECONDS
    while True:
        group_abort.raise_if_aborted()
        try:
            socket.create_connection((host, port), timeout=1).close()
            store = TCPStore(host, port, size, is_master=False, timeout=_CONNECT_TIMEOUT)
        except (OSError, dist.DistError) as error:
            if time.monotonic() > deadline:
                text = f"rank 0 cannot be reached at {host}:{port}: {error}"
                raise dist.DistNetworkError(text) from error
        else:
            store.set_timeout(timeout)
            return store
        time.sleep(pause)
        pause = min(2 * pause, _RETRY_SECONDS)


def wait_for_ranks(store: Store, size: int, timeout: timedelta) -> None:
    """Wait until all ranks have arrived, and then until all have confirmed that they know it, each
    time for `timeout` at most.

    Next, gloo opens connections, for which `group_abort.make_group` allows only a few seconds. So
    slow ranks must be waited for here, and dead ones noticed: one that died after it arrived does
    not confirm. Raises `DistError` if a rank is missing after the timeout, or the connection is
    shut down.
    """
    for phase in ("arrived", "confirmed"):
        if store.add(f"kdist/{phase}", 1) == size:
            store.set(f"kdist/{phase}/all", "")
        store.wait([f"kdist/{phase}/all"], timeout)


def leave() -> None:
    """Wait for every rank, then destroy the process group. Collective.

    The group object is kept until the process ends. Its destructor joins gloo's threads while it
    holds the interpreter's lock, and one of them may wait for that lock, since a collective after a
    backward pass holds a Python object (torch 2.13): a finished training would hang.
    """
    dist.barrier()
    _close_stores()
    _destroyed.append(dist.group.WORLD)
    dist.destroy_process_group()


def abandon(timeout: timedelta) -> None:
    """Leave a broken process group without the other ranks, and all other groups with it: abort
    them, and have them destroyed as soon as nothing waits in them (`left_groups`). `timeout` is
    that of collectives of groups that others have made.
    """
    group_abort.abort()
    _close_stores()
    if dist.is_initialized():
        groups = [LeftGroup(one, group_abort.describe(one), timeout) for one in all_groups()]
        dist.destroy_process_group()
        left.add(groups)
    restart_group_names()
    group_abort.reset()


def _close_stores() -> None:
    """Stop listening for the groups that this rank leaves."""
    while _hosted:
        _hosted.pop().close()


def uses_gpus(local_size: int) -> bool:
    """Whether the `local_size` ranks of this node train on GPUs: only if each has one, since NCCL
    refuses two ranks on one GPU.
    """
    return torch.cuda.is_available() and local_size <= torch.cuda.device_count()


def _device(local_rank: int, local_size: int, env: Mapping[str, str]) -> torch.device:
    """One GPU for each local rank, or the CPU if the job asks for no GPUs. Raises
    `DeviceFaultError` if it asks for some that are not there.
    """
    if uses_gpus(local_size):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if wanted := int(env.get(_GPUS, "0")):
        found = devices.count_gpus() if torch.cuda.is_available() else 0
        node = env.get("KDIST_NODE", "")
        raise DeviceFaultError(devices.describe_missing(wanted, found, node=node))
    return torch.device("cpu")
