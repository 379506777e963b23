"""The forward and backward passes of a step: micro-batch after micro-batch with gradient
accumulation, or through the stages of a pipeline.

`LossScale` is the factor that turns a micro-batch's sum of losses into its part of the step's mean
loss: 1 / (terms of the loss in the whole step), times the number of model replicas, because
strategies average gradients over the replicas, and the parts of a mean must be summed. It has
nothing to do with the loss scaler of fp16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kdist_trainer.data.loader import Batch, MicroBatch
from kdist_trainer.distributed.world import World
from kdist_trainer.instrumentation.step_timer import StepTimer
from kdist_trainer.metrics.rank_metrics import StepPhase
from kdist_trainer.numerics.precision import Precision
from kdist_trainer.numerics.rng import STEP, Generators, derive
from kdist_trainer.parallel.base import Strategy
from kdist_trainer.parallel.buffers import Buffers
from kdist_trainer.parallel.pipeline import MicroBatchTask, Pipeline, StageHooks
from kdist_trainer.training.training_state import TrainState
from kdist_trainer.training.workload_checks import check_loss, split
from kdist_trainer.workload import Workload


@dataclass(kw_only=True)
class ForwardBackward(ABC):
    """Runs the forward and backward passes of a step."""

    workload: Workload
    model: nn.Module
    """The model as the strategy wrapped it."""
    precision: Precision
    buffers: Buffers
    generators: Generators
    """Seeded before each micro-batch."""
    state: TrainState
    step_timer: StepTimer

    @abstractmethod
    def run(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Leave in each parameter the gradient's mean over the model replicas; returns this rank's
        part of the step's mean loss (a scalar, detached). There is at least one micro-batch, and
        `scale` is the factor of every one's sum of losses (see `LossScale`). Collective.
        """

    @abstractmethod
    def warm_up(
        self, micro_batch: MicroBatch, counting: AbstractContextManager[None] | None = None
    ) -> None:
        """Run one forward and backward pass whose gradients are to be discarded, the forward pass
        in a context that counts its floating-point operations. Collective. Raises `ConfigError` if
        the workload returns a loss that the loop cannot use.
        """

    def seed_of(self, micro_batch: MicroBatch) -> int:
        """Seed of everything that the current step draws at random for this micro-batch."""
        return derive(self.state.seed, STEP, self.state.step, micro_batch.shard, micro_batch.chunk)


@dataclass(kw_only=True)
class GradientAccumulation(ForwardBackward):
    """Runs the micro-batches one after another."""

    strategy: Strategy

    def run(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Add up gradients on this rank, and reduce them in the last backward pass."""
        *first, last = micro_batches
        loss: Tensor | None = None
        for micro_batch in first:
            with self.strategy.no_sync():
                partial_loss = self._accumulate(micro_batch, scale)
            loss = partial_loss if loss is None else loss + partial_loss
        partial_loss = self._accumulate(last, scale)
        return partial_loss if loss is None else loss + partial_loss

    def warm_up(
        self, micro_batch: MicroBatch, counting: AbstractContextManager[None] | None = None
    ) -> None:
        """Run one pass as in training, but without loss scaling."""
        with self.precision.autocast(), counting or nullcontext():
            returned = self.workload.loss(self.model, micro_batch.batch)
            loss, count = split(self.workload, returned)
        check_loss(self.workload, loss, count, micro_batch.samples)
        loss.backward()  # type: ignore[no-untyped-call]

    def _accumulate(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        """Run one micro-batch forward and backward; returns its part of the step's mean loss."""
        self.generators.seed(self.seed_of(micro_batch))
        if not micro_batch.too_small:
            return self._differentiate(micro_batch, scale)
        # around the backward pass too: with activation checkpointing it computes blocks again
        with self.buffers.norms.running_stats():
            return self._differentiate(micro_batch, scale)

    def _differentiate(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        with self.precision.autocast():
            loss, _ = self.workload.loss(self.model, micro_batch.batch)
            partial_loss = loss * (scale * micro_batch.weight)
        self.step_timer.record_phase(StepPhase.FORWARD)
        self.precision.backward(partial_loss)
        self.step_timer.record_phase(StepPhase.BACKWARD)
        return partial_loss.detach()


@dataclass(kw_only=True)
class PipelinePasses(ForwardBackward):
    """Runs the micro-batches through the stages of a pipeline."""

    strategy: Pipeline

    def run(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Run the schedule; the time that this stage waits for its neighbors counts as exposed
        communication.
        """
        record_phase = self.step_timer.record_phase
        hooks = StageHooks(
            waited=partial(record_phase, StepPhase.COMM_EXPOSED),
            forward=partial(record_phase, StepPhase.FORWARD),
            backward=partial(record_phase, StepPhase.BACKWARD),
        )
        return self._run_stages(micro_batches, scale, hooks)

    def warm_up(
        self,
        micro_batch: MicroBatch,
        counting: AbstractContextManager[None] | None = None,  # noqa: ARG002 - a stage is not the model
    ) -> None:
        """Run one micro-batch through all stages."""
        self._run_stages([micro_batch], 1.0, StageHooks(*[lambda: None] * 3))

    def _run_stages(
        self, micro_batches: Sequence[MicroBatch], scale: float, hooks: StageHooks
    ) -> Tensor:
        tasks = [
            MicroBatchTask(partial(self._loss, each, scale), partial(self._prepare, each))
            for each in micro_batches
        ]
        try:
            return self.strategy.forward_backward(tasks, self.precision, hooks)
        finally:
            self.buffers.norms.use_running_stats(False)

    def _loss(self, micro_batch: MicroBatch, scale: float, model: nn.Module) -> Tensor:
        """The micro-batch's part of the step's mean loss."""
        loss, count = split(self.workload, self.workload.loss(model, micro_batch.batch))
        check_loss(self.workload, loss, count, micro_batch.samples)
        return loss * (scale * micro_batch.weight)

    def _prepare(self, micro_batch: MicroBatch, stage: int) -> None:
        """Seed the generators for one stage, the first as a rank without a pipeline, and set
        whether batch norms use their running statistics.
        """
        seed = self.seed_of(micro_batch)
        self.buffers.norms.use_running_stats(micro_batch.too_small)
        self.generators.seed(derive(seed, STEP, stage) if stage else seed)


class LossScale:
    """The factor that turns a micro-batch's sum of losses into its part of the step's mean loss."""

    def __init__(self, workload: Workload, world: World, step_timer: StepTimer) -> None:
        self._workload = workload
        self._units_per_sample = workload.units_per_sample
        self._world = world
        self._replicas = world.data_size
        self._step_timer = step_timer

    def compute(self, batch: Batch) -> float:
        """The factor for all micro-batches of this step. Collective if the number of terms depends
        on the data, so that the ranks sum their counts.
        """
        if self._units_per_sample is not None:
            return self._replicas / (self._units_per_sample * batch.samples)
        count = self._workload.count
        own = sum(count(each.batch) for each in batch.micro_batches if each.samples)
        total = torch.tensor(own, dtype=torch.int64, device=self._world.device)
        self._step_timer.record_phase(StepPhase.FORWARD)
        dist.all_reduce(total)  # all ranks of one replica count the same samples
        self._step_timer.record_phase(StepPhase.COMM_EXPOSED)  # all ranks wait here for the slowest
        return self._world.size / max(1, int(total))
