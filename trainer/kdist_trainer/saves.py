"""When the training's state is saved, what is in it, and how it comes back. The store does the saving itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kdist_trainer import log
from kdist_trainer.checkpoint.checkpointer import CheckpointStore, SaveResult
from kdist_trainer.config import Every
from kdist_trainer.diary import Diary
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.precision import Precision
from kdist_trainer.state import TrainState
from kdist_trainer.stats import StepStats


@dataclass(kw_only=True)
class Saves:
    """The training's state on its way to the store and back. Every rank calls the same methods in the same order."""

    store: CheckpointStore | None
    """None where the job has no folder for checkpoints: then nothing is kept."""
    every: Every
    strategy: Strategy
    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    precision: Precision
    state: TrainState
    diary: Diary
    stats: StepStats
    begun_step: int = -1
    """Step of the newest save that was begun, or of the checkpoint that was resumed from."""
    kept_step: int = -1
    """Step of the newest checkpoint that is committed."""
    begun_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.store is not None:
            self.store.on_result = self._count

    def restore(self) -> bool:
        """Take over the newest checkpoint that verifies; False, and everything as it was, where there is none."""
        if self.store is None:
            return False
        tensors = self.strategy.tensors(self.optimizer)
        found = self.store.load(tensors, fingerprint=self.state.fingerprint)
        for one in self.store.fallbacks:
            self.stats.add_fallback(one.cause)
        if found is None:
            self.optimizer.state.clear()  # making `tensors` took a step there, if one that moves nothing
            return False
        self.strategy.put(tensors, self.optimizer)
        now, saved = (self.state.world_size, self.state.environment), TrainState.from_json(found)
        self.state.take_position(saved)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved.extras["scheduler"])
        self.precision.load_state_dict(saved.extras["precision"])
        self.begun_step = self.kept_step = self.state.step
        self.stats.add_checkpoint("restore")
        if (saved.world_size, saved.environment) != now:
            self._warn_of_other_bits(saved)
        return True

    @property
    def resumed_from(self) -> str | None:
        """Name of the checkpoint that was resumed from."""
        resumed = self.store.resumed if self.store is not None else None
        return resumed.name if resumed is not None else None

    def due_after(self, step: int) -> int | None:
        """The next step after `step` that is saved because of its number."""
        every = self.every.steps
        return None if self.store is None or every is None else (step // every + 1) * every

    def due(self, step: int) -> bool:
        """Whether `step` is saved because of its number."""
        return self.due_after(step - 1) == step

    def due_by_clock(self) -> bool:
        """Whether the time between two saves is over by this rank's clock; the ranks go by rank 0's."""
        seconds = self.every.seconds
        return self.store is not None and seconds is not None and time.monotonic() - self.begun_at >= seconds

    def save(self, *, required: bool = False, done: Mapping[str, Any] | None = None) -> None:
        """Save the state as it is now; a failure is counted and the training goes on.

        `required`: the state is committed on return. `done`: it is also the run's last, and this is the document that says
        so. Raises `StorageProblem` where one of them is asked for and a second try failed too.
        """
        if self.store is None:
            return
        if required and self.begun_step == self.state.step:
            self.store.wait()
            if self.kept_step == self.state.step:
                return
        self.begun_step, self.begun_at = self.state.step, time.monotonic()
        self.state.extras = {"precision": self.precision.state_dict()}
        if self.scheduler is not None:
            self.state.extras["scheduler"] = self.scheduler.state_dict()
        self.diary.flush()
        self.store.save(
            self.strategy.tensors(self.optimizer),
            self.state.to_json(),
            step=self.state.step,
            before_commit=self.diary.sync,
            required=required,
            final=None if done is None else dict(done),
        )

    def poll(self) -> None:
        """Count a save that has ended meanwhile."""
        if self.store is not None:
            self.store.poll()

    def close(self) -> None:
        """Nothing more will be saved."""
        if self.store is not None:
            self.store.close()

    def weights_are_finite(self) -> bool:
        """Whether no weight is NaN or infinite: what is kept should be worth going back to."""
        weights = [weight.detach() for weight in self.module.parameters() if weight.is_floating_point() and weight.numel()]
        largest = [norm.float() for norm in torch._foreach_norm(weights, torch.inf)] if weights else []  # NaN wins over all
        return not largest or bool(torch.isfinite(torch.stack(largest)).all())

    def _count(self, result: SaveResult) -> None:
        self.stats.add_checkpoint(
            "save",
            cause=None if result.ok else result.cause,
            visible=result.visible_seconds,
            total=result.total_seconds,
            nbytes=result.nbytes,
            step=result.step,
        )
        if result.ok:
            self.kept_step = result.step

    def _warn_of_other_bits(self, saved: TrainState) -> None:
        before, now = (f"{state.world_size} ranks, {state.environment}" for state in (saved, self.state))
        why = f"saved by {before}; resumed by {now}"
        log.event("not-bit-equal", why=why, message=f"the training goes on correctly but not equal to the bit: {why}")
