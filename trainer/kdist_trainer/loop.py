"""The training loop, to be read from top to bottom: `train` is the life of a run, `step` is one optimizer step."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from kdist_trainer import log
from kdist_trainer.data.loader import Batch, Piece
from kdist_trainer.randomness import STEP, derive
from kdist_trainer.run import Run
from kdist_trainer.signals import Interval
from kdist_trainer.stats import StepPhase


def train(run: Run) -> str:
    """Train until the last step or until some rank is asked to stop; returns "done" or "stopped". Collective."""
    while run.state.step < run.target:
        step(run)
        if run.state.step < run.boundary:
            continue
        said = exchange(run)
        if said is not None and said.stop and run.state.step < run.target:
            drain(run)
            log.event("stopped", step=run.state.step)
            return "stopped"
    drain(run)
    return "done"


def step(run: Run) -> None:
    """One optimizer step over the next `globalBatch` samples of the stream."""
    lap = run.laps.lap
    lap(StepPhase.OTHER)
    batch = next(run.batches)
    lap(StepPhase.DATA_WAIT)

    # Each forward pass adds its share of the step's mean loss: sums over samples, divided by the count of the whole step.
    # Times the world size, because DDP averages over ranks what has to be added.
    scale = run.world.size / batch.samples
    run.optimizer.zero_grad()
    *early, last = batch.pieces
    total = None
    for piece in early:
        with run.strategy.no_sync():  # gradients wait on this rank until the last backward pass
            share = accumulate(run, piece, scale)
            total = share if total is None else total + share
    share = accumulate(run, last, scale)
    run.losses.append(share if total is None else total + share)

    norm = run.precision.update(run.optimizer)
    run.move_rate()
    lap(StepPhase.OPTIMIZER)

    run.state.step += 1
    run.state.samples_seen += batch.samples


def accumulate(run: Run, piece: Piece, scale: float) -> Tensor:
    """Forward and backward over one chunk of a shard; returns its share of the step's loss, detached."""
    run.set_generators(derive(run.state.seed, STEP, run.state.step, piece.shard, piece.chunk))
    with run.precision.autocast():
        loss, _ = run.workload.loss(run.model, piece.batch)
        share = loss * (scale * piece.weight)
    run.laps.lap(StepPhase.FORWARD)
    run.precision.backward(share)
    run.laps.lap(StepPhase.BACKWARD)
    return share.detach()


def exchange(run: Run) -> Interval | None:
    """Post this interval's losses and flags, and read what all ranks said at the end of the one before."""
    said = run.exchange.collect() if run.exchange.pending else None
    run.exchange.post(
        run.losses, last_step=run.state.step, stop=run.flag.requested, save_due=False, step_seconds=0.0
    )
    run.losses.clear()
    run.boundary = min(run.state.step + run.settings.sync_every_steps, run.target)
    if said is not None:
        account(run, said)
    return said


def drain(run: Run) -> None:
    """Wait for what was posted, so that every step's loss is known."""
    while run.exchange.pending:
        account(run, run.exchange.collect())


def account(run: Run, said: Interval) -> None:
    """Take note of an interval's losses."""
    if said.losses and run.world.is_leader:
        log.event("progress", step=said.last_step, target=run.target, loss=said.losses[-1])
