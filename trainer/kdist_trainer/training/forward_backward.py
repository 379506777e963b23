"""A step's forward and backward passes: one after the other, or side by side through the stages of
a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

from torch import Tensor, nn

from kdist_trainer.data.loader import MicroBatch
from kdist_trainer.metrics.step_stats import StepPhase
from kdist_trainer.parallel.pipeline import MicroBatchTask, Pipeline
from kdist_trainer.parallel.pipeline_schedule import StageHooks
from kdist_trainer.rng import STEP, derive
from kdist_trainer.training.context import TrainContext
from kdist_trainer.training.loss_check import check_loss, split

UNWATCHED: Final = StageHooks(*[lambda: None] * 3)


def accumulate_microbatches(
    run: TrainContext, pieces: Sequence[MicroBatch], scale: float
) -> Tensor:
    """Run the microbatches one after another; leaves the gradients' mean over the ranks, returns
    this rank's share of the step's loss.
    """
    *early, last = pieces
    loss: Tensor | None = None
    for piece in early:
        with run.strategy.no_sync():  # gradients add up on this rank until the last backward pass
            share = accumulate(run, piece, scale)
        loss = share if loss is None else loss + share
    share = accumulate(run, last, scale)
    return share if loss is None else loss + share


def accumulate(run: TrainContext, piece: MicroBatch, scale: float) -> Tensor:
    """Forward and backward over one chunk of a shard; returns its share of the step's loss,
    detached.
    """
    run.set_generators(derive(run.state.seed, STEP, run.state.step, piece.shard, piece.chunk))
    # the backward pass may compute parts of it again
    with run.buffers.at_rest() if piece.scant else nullcontext():
        with run.precision.autocast():
            loss, _ = run.workload.loss(run.model, piece.batch)
            share = loss * (scale * piece.weight)
        run.laps.lap(StepPhase.FORWARD)
        run.precision.backward(share)
        run.laps.lap(StepPhase.BACKWARD)
    return share.detach()


def run_pipeline(run: TrainContext, pieces: Sequence[MicroBatch], scale: float) -> Tensor:
    """Run the microbatches through the pipeline; the time that a stage waits for its neighbours
    counts as exposed communication.
    """
    lap = run.laps.lap
    watch = StageHooks(
        waited=partial(lap, StepPhase.COMM_EXPOSED),
        forward=partial(lap, StepPhase.FORWARD),
        backward=partial(lap, StepPhase.BACKWARD),
    )
    return run_stages(run, pieces, scale, watch)


def run_stages(
    run: TrainContext, pieces: Sequence[MicroBatch], scale: float, watch: StageHooks
) -> Tensor:
    """Forward and backward over the microbatches, with the hooks in `watch`."""
    assert isinstance(run.strategy, Pipeline)  # noqa: S101 - nothing else has stages
    tasks = [
        MicroBatchTask(_loss_of(run, piece, scale), _generators_of(run, piece)) for piece in pieces
    ]
    try:
        return run.strategy.learn(tasks, run.precision, watch)
    finally:
        run.buffers.rest(False)


def _loss_of(run: TrainContext, piece: MicroBatch, scale: float) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        value, count = split(run.workload, run.workload.loss(model, piece.batch))
        check_loss(run.workload, value, count, piece.samples)
        return value * (scale * piece.weight)

    return loss


def _generators_of(run: TrainContext, piece: MicroBatch) -> Callable[[int], object]:
    """Sets the generators: on the first stage as for a single rank, on every other stage to another
    seed. Also sets whether buffers are updated.
    """
    seed = derive(run.state.seed, STEP, run.state.step, piece.shard, piece.chunk)

    def prepare(stage: int) -> None:
        run.buffers.rest(piece.scant)
        run.set_generators(derive(seed, STEP, stage) if stage else seed)

    return prepare
