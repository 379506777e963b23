"""data_parallel: one process, several GPUs; each step copies the model to all and gathers the outputs on the first.

torch's DataParallel, for those who know it from tutorials. `ddp` with one process per GPU is faster even on one machine: the
copies, the gathering and Python's lock are paid in every step. With fewer than two GPUs there is nothing to spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from kdist_trainer import log
from kdist_trainer.failure import ConfigProblem
from kdist_trainer.parallel.replicated import Replicated
from kdist_trainer.world import World


class DataParallel(Replicated):
    """torch's DataParallel over all GPUs of the one process."""

    copies: dist.ProcessGroup | None = None  # the first GPU's replica works on the module's own buffers

    def __init__(self, world: World) -> None:
        """Raises `ConfigProblem` in a group of several ranks, whose gradients nobody would average."""
        if world.size > 1:
            raise ConfigProblem(
                f"train.strategy: data_parallel is one process with several GPUs, and this job has {world.size} ranks: "
                "set nodes: 1 and procsPerNode: 1, or use ddp"
            )
        self._devices = torch.cuda.device_count()

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:  # noqa: ARG002 - every GPU gets a whole copy
        """The model on all GPUs, or as it is where there are fewer than two; says which."""
        self.module = model
        several = self._devices > 1
        log.warn(
            "data-parallel",
            devices=self._devices,
            message=f"the model is copied to {self._devices} GPUs in every step; ddp with one rank per GPU is faster"
            if several
            else "data_parallel does nothing on fewer than two GPUs: the model trains as in one process",
        )
        return nn.DataParallel(model) if several else model

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nobody to wait for."""
        return nullcontext()
