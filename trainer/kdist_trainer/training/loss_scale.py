"""The factor that turns a micro-batch's sum of losses into its part of the step's mean loss.

It is 1 / (terms of the loss in the whole step), times the number of model replicas: strategies
average gradients over the replicas, but the parts of a mean must be summed. It has nothing to do
with the loss scaler of fp16.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from kdist_trainer.data.loader import Batch
from kdist_trainer.instrumentation.step_timer import StepTimer
from kdist_trainer.metrics.step_stats import StepPhase
from kdist_trainer.workload import Workload
from kdist_trainer.world import World


class LossScale(Protocol):
    """Computes the factor of a step's losses."""

    def compute(self, batch: Batch) -> float:
        """The factor for all micro-batches of this step."""
        ...


class FixedLossScale:
    """For workloads where every sample adds `units_per_sample` terms to the loss."""

    def __init__(self, units_per_sample: int, replicas: int) -> None:
        self._units_per_sample = units_per_sample
        self._replicas = replicas

    def compute(self, batch: Batch) -> float:
        """The factor for all micro-batches of this step."""
        return self._replicas / (self._units_per_sample * batch.samples)


class CountedLossScale:
    """For workloads where the number of terms depends on the data: the ranks sum their counts."""

    def __init__(self, workload: Workload, world: World, step_timer: StepTimer) -> None:
        self._workload = workload
        self._world = world
        self._step_timer = step_timer

    def compute(self, batch: Batch) -> float:
        """The factor for all micro-batches of this step. Collective."""
        count = self._workload.count
        own = sum(count(each.batch) for each in batch.micro_batches if each.samples)
        total = torch.tensor(own, dtype=torch.int64, device=self._world.device)
        self._step_timer.record_phase(StepPhase.FORWARD)
        dist.all_reduce(total)  # all ranks of one replica count the same samples
        self._step_timer.record_phase(StepPhase.COMM_EXPOSED)  # all ranks wait here for the slowest
        return self._world.size / max(1, int(total))


def build_loss_scale(workload: Workload, world: World, step_timer: StepTimer) -> LossScale:
    """Build the loss scale of a workload.

    Args:
        workload: The workload, which may declare `units_per_sample`.
        world: The process group.
        step_timer: Attributes the time of counting to phases of the step.
    """
    if workload.units_per_sample is not None:
        return FixedLossScale(workload.units_per_sample, world.data_size)
    return CountedLossScale(workload, world, step_timer)
