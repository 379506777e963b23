"""A workload that makes process groups of its own, as other people's do, in which all ranks but the
last wait for it in vain: kdist, which has not made them, keeps them when they are left.

Option `groups` says how many for each worker group, `folder` where it is said that the storage
holds each save (`paused.hold_storage`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paused import hold_storage
from torch import Tensor, nn

from kdist_trainer.config.workload_options import DigitsOptions
from kdist_trainer.workload import Workload, WorkloadContext
from kdist_trainer.workloads.digits import Digits


class CrowdedOptions(DigitsOptions):
    """Options of this workload."""

    groups: int
    folder: str = ""


class Crowded(Digits):
    """The handwritten digits."""

    def __init__(self, context: WorkloadContext) -> None:
        Workload.__init__(self, context)
        options = context.parse(CrowdedOptions)
        self.options, self._count = options, options.groups
        self._world: object = None
        self._works: list[Any] = []
        if options.folder:
            hold_storage(Path(options.folder), "write")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """See base class."""
        if dist.is_initialized() and self._world is not dist.group.WORLD:
            self._world, self._works = dist.group.WORLD, []
            own = [dist.new_group() for _ in range(self._count)]
            if dist.get_rank() < dist.get_world_size() - 1:
                self._works = [one.allreduce([torch.ones(8)]) for one in own]  # type: ignore[union-attr]  # it is a member of all
        return super().loss(model, batch)
