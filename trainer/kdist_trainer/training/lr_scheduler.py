"""The learning rate scheduler of the training loop: the job's, the workload's own, or none."""

from __future__ import annotations

from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer.config import Schedule
from kdist_trainer.training.supported import check_end, check_scheduler
from kdist_trainer.workload import LrSchedule, Workload


class LrScheduler(Protocol):
    """Sets the learning rates of the optimizer."""

    def step(self) -> None:
        """Set the learning rates of the next step."""
        ...

    def seek(self, step: int, *, steps: int) -> None:
        """Set the learning rates of a run of `steps` steps after `step` of them."""
        ...


class WorkloadLrScheduler:
    """A scheduler that the workload made itself: its position is part of its own saved state."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    def step(self) -> None:
        """Set the learning rates of the next step."""
        self._scheduler.step()

    def seek(self, step: int, *, steps: int) -> None:  # noqa: ARG002 - a checkpoint restores it
        """Check that there are rates up to the last step.

        Raises:
            ConfigError: If there are not.
        """
        check_end(self._scheduler, steps=steps)


class ConstantLr:
    """Learning rates that stay as the optimizer was built with."""

    def step(self) -> None:
        """Do nothing."""

    def seek(self, step: int, *, steps: int) -> None:
        """Do nothing."""


def make_lr_scheduler(
    workload: Workload, optimizer: Optimizer, settings: Schedule, *, steps: int
) -> LRScheduler | None:
    """The workload's scheduler of a run of `steps` steps. Raises `ConfigError` if the training loop
    cannot use it.
    """
    scheduler = workload.scheduler(optimizer, settings, steps=steps)
    check_scheduler(scheduler, workload)
    return scheduler


def wrap_lr_scheduler(scheduler: LRScheduler | None) -> LrScheduler:
    """The scheduler that `Workload.scheduler` returned, as the training loop uses it."""
    if scheduler is None:
        return ConstantLr()
    return scheduler if isinstance(scheduler, LrSchedule) else WorkloadLrScheduler(scheduler)
